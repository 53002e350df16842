"""Stories of training: runs of simulated trainers on a simulated cluster, with troubles of their own and with everything that breaks in a cluster.

`simulate_training(seed)` runs one story until all its runs have ended, and checks the invariants all the way (trainingtruth.py, invariants.py). The same seed gives the same story.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from argosy.config.spec import Backoff, Budget, RoleSpec, RunSpec, Submission
from argosy.errors import ConfigError, InvariantError, NotFoundError
from argosy.protocol.facts import AttemptSuspected, Event, RunEnded
from argosy.testing.cluster import SimulatedCluster
from argosy.testing.network import Weather
from argosy.testing.processes import SimulatedKeeper, SimulatedProcess
from argosy.testing.trainers import SimulatedTrainer
from argosy.testing.trainersteps import LoopingTrainer
from argosy.testing.trainingmemory import TrainingMemory
from argosy.testing.trainingplans import TrainingPlan, random_plan
from argosy.testing.trainingtruth import TrainingTruth

MOST_RANKS = 6
_FAULT_SECONDS = 30.0
_MOST_SECONDS = 30_000.0


class TrainingRun:
    """One run: its plan, its memory, its members and how it may end."""

    def __init__(self, run: str, plan: TrainingPlan) -> None:
        self.plan = plan
        truth = TrainingTruth(run, plan.num_lanes, plan.costs, plan.may_leave_out)
        self.memory = TrainingMemory(truth)
        self.trainers: dict[str, SimulatedTrainer] = {}
        self.wish = "raised" if plan.poison is not None else ""
        self.is_over = False


class TrainingStory:
    """A cluster that trains."""

    def __init__(self, seed: int, *, num_hosts: int = 2, num_runs: int = 2) -> None:
        self.runs: dict[str, TrainingRun] = {}
        self.cluster = SimulatedCluster(seed, num_hosts=num_hosts, lives={"trainer": self._live})
        durable = self.cluster.invariants.durable

        def watch(event: Event) -> None:
            durable(event)
            self._durable(event)

        self.cluster.invariants.durable = watch  # type: ignore[method-assign]
        self._submit(num_runs)

    def _submit(self, left: int) -> None:
        """One run after the other, as soon as a controller takes it."""
        cluster = self.cluster
        if not left or cluster.coordinator is None:
            if left:
                cluster.clock.call_later(0.5, partial(self._submit, left))
            return
        random = cluster.random
        count = random.randint(1, MOST_RANKS)
        role = RoleSpec(
            command=["trainer"],
            gang=True,
            count=count,
            min=random.randint(1, count),
            spares=random.choice([0, 0, 1]),
            budget=Budget(user=1000, host=1000, hang=1000, no_progress=0, same_error=0),
            backoff=Backoff(first_seconds=0.05, most_seconds=2.0),
            grace_seconds=5.0,
        )
        spec = RunSpec(name=f"training{left}", roles={"train": role})
        runs, outputs = cluster.coordinator.submit(
            cluster.clock.now,
            Submission(spec=spec, python="/usr/bin/python3"),
            env_blob="blob",
            secret_blobs={},
        )
        plan = random_plan(random, random.randint(MOST_RANKS, MOST_RANKS + 4))
        self.runs[runs[0]] = TrainingRun(runs[0], plan)
        cluster.carry_out(outputs)
        cluster.clock.call_later(cluster.draw(0.0, 2.0), partial(self._submit, left - 1))

    def _live(self, keeper: SimulatedKeeper, process: SimulatedProcess) -> SimulatedTrainer:
        run = self.runs[process.run]
        trainer = LoopingTrainer(keeper, process, run.memory, run.plan)
        run.trainers[process.attempt] = trainer
        return trainer

    def _durable(self, event: Event) -> None:
        fact = event.fact
        run = self.runs.get(getattr(fact, "run", ""))
        if run is None:
            return
        truth = run.memory.truth
        truth.tell(f"{self.cluster.clock.now:.3f} log {fact}")
        if isinstance(fact, AttemptSuspected) and not fact.by:
            trainer = run.trainers[fact.attempt]
            truth.accused("the controller", trainer.name, bool(trainer.hang), fact.reason)
        elif isinstance(fact, RunEnded):
            run.is_over = True
            truth.ended(fact.outcome, fact.reason, run.plan.num_steps, run.wish)
            if fact.outcome == "stopped" and run.wish == "cancelled":
                truth.stopped(fact.reason, run.memory.saved)

    # --- what people and the world do ---------------------------------------------------------------------------------

    def resize(self) -> None:
        """Give a gang another size."""
        coordinator, random = self.cluster.coordinator, self.cluster.random
        alive = [name for name, run in self.runs.items() if not run.is_over]
        if coordinator is None or not alive:
            return
        try:
            _command, outputs = coordinator.scale(
                self.cluster.clock.now,
                random.choice(alive),
                random.randint(1, MOST_RANKS),
                role="train",
                may_restart=False,
            )
        except (ConfigError, NotFoundError):
            return
        self.cluster.num_resizes += 1
        self.cluster.carry_out(outputs)

    def stop(self, name: str = "") -> None:
        """Ask a run to stop."""
        coordinator = self.cluster.coordinator
        alive = [name for name, run in self.runs.items() if not run.is_over and not run.wish]
        if coordinator is None or not alive or (name and name not in alive):
            return
        name = name or self.cluster.random.choice(alive)
        self.runs[name].wish = "cancelled"
        _command, outputs = coordinator.stop(self.cluster.clock.now, name, hard=False, reason="")
        self.cluster.carry_out(outputs)

    def kill_all_and_stop(self) -> None:
        """All members of a run that has trained are killed at once, and a person stops it a moment later: nobody is there who could save."""
        clock, random = self.cluster.clock, self.cluster.random
        busy = [
            name for name, run in self.runs.items() if run.memory.state.version and not run.wish
        ]
        if not busy:
            clock.call_later(1.0, self.kill_all_and_stop)
            return
        name = random.choice(busy)
        for trainer in self.runs[name].trainers.values():
            if trainer.is_alive:
                trainer.keeper.end(trainer.name, signal=9)
        clock.call_later(random.choice([0.0, 0.02, 1.0]) * random.random(), lambda: self.stop(name))

    def kill_one(self) -> None:
        """A person kills one member for good, where the gang may go on without it: the others get other ranks."""
        coordinator, random = self.cluster.coordinator, self.cluster.random
        alive = [name for name, run in self.runs.items() if not run.is_over]
        if coordinator is None or not alive:
            return
        name = random.choice(alive)
        role = coordinator.runs[name].roles["train"]
        members = [index for index in role.members if not role.processes[index].retired]
        if len(members) <= max(1, role.least):
            return
        index = random.choice(members)
        self.runs[name].wish = self.runs[name].wish or "killed"
        _command, outputs = coordinator.stop(
            self.cluster.clock.now, name, hard=True, reason="", role="train", index=index
        )
        self.cluster.carry_out(outputs)

    def kill_lonely(self) -> None:
        """A person ends members that hang when nobody is left who waits for them."""
        for run in self.runs.values():
            alive = [trainer for trainer in run.trainers.values() if trainer.is_alive]
            if alive and all(trainer.hang for trainer in alive):
                for trainer in alive:
                    trainer.keeper.end(trainer.name, signal=9)

    def is_over(self) -> bool:
        """Whether all runs have ended."""
        return all(run.is_over for run in self.runs.values())


def simulate_training(
    seed: int,
    *,
    num_hosts: int = 2,
    num_runs: int = 2,
    num_faults: int = 6,
    kills_and_stops: bool = False,
    most_seconds: float = _MOST_SECONDS,
) -> dict[str, Any]:
    """One story; raises InvariantError, else returns its numbers and the hash of its history."""
    story = TrainingStory(seed, num_hosts=num_hosts, num_runs=num_runs)
    cluster, clock = story.cluster, story.cluster.clock
    begin = clock.now
    for _ in range(num_faults):
        clock.call_at(begin + cluster.draw(0.5, _FAULT_SECONDS), cluster.fault)
    for _ in range(cluster.random.randrange(6)):
        clock.call_at(begin + cluster.draw(0.5, _FAULT_SECONDS), story.resize)
    for _ in range(cluster.random.choice([0, 0, 1, 2])):
        clock.call_at(begin + cluster.draw(0.5, _FAULT_SECONDS), story.kill_one)
    if kills_and_stops:
        clock.call_at(begin + cluster.draw(0.5, _FAULT_SECONDS), story.kill_all_and_stop)
    elif cluster.random.random() < 0.1:
        clock.call_at(begin + cluster.draw(0.5, _FAULT_SECONDS), story.stop)
    clock.run_until(begin + _FAULT_SECONDS + 2.0)
    cluster.network.weather = Weather(loss=0.0, doubling=0.0)
    while not (len(story.runs) == num_runs and story.is_over()):
        clock.run_until(clock.now + 5.0)
        story.kill_lonely()
        if clock.now > begin + most_seconds:
            raise InvariantError("training never came to an end", story=_unrest(story))
    truths = [run.memory.truth for run in story.runs.values()]
    return {
        "seed": seed,
        "num_events": clock.num_events,
        "num_facts": cluster.log.num_appended,
        "num_faults": cluster.num_faults
        + sum(t.has_come for run in story.runs.values() for t in run.plan.troubles),
        "num_checks": cluster.invariants.num_checks + sum(t.num_checks for t in truths),
        "num_messages": cluster.network.num_sent,
        "num_commits": sum(truth.num_commits for truth in truths),
        "num_left_out": sum(truth.num_left_out for truth in truths),
        "num_accusations": sum(truth.num_accusations for truth in truths),
        "num_memberships": sum(truth.num_memberships for truth in truths),
        "num_resizes": cluster.num_resizes,
        "num_saved": sum(run.memory.saved > 0 for run in story.runs.values()),
        "num_unsaved": sum(truth.num_unsaved for truth in truths),
        "digest": cluster.digest.hexdigest(),
    }


def _unrest(story: TrainingStory) -> list[str]:
    lines: list[str] = []
    for run in story.runs.values():
        if run.is_over:
            continue
        lines += list(run.memory.truth.story)[-40:]
        for trainer in run.trainers.values():
            if trainer.is_alive:
                place = f"rank {trainer.rank} of {trainer.tidings.generation}, in {trainer.number}"
                coming, hang = trainer.tidings.coming(), trainer.hang
                lines.append(f"{trainer.name}: {place}, {trainer.where}, {coming}, {hang}")
    return lines
