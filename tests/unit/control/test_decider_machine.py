"""Random orders of everything that can happen to a run, against the real coordinator."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec.structs import replace

from argosy.config.spec import Backoff, Budget, RoleSpec
from argosy.control.coordinator import PUT_ASIDE, Coordinator
from argosy.control.faults import draw_faults
from argosy.errors import ConfigError, NotFoundError
from argosy.protocol.facts import (
    AttemptExited,
    AttemptPlanned,
    AttemptSuspected,
    CommandAccepted,
    CommandDone,
    GenerationFormed,
    Note,
    RunEnded,
)
from argosy.testing.scripted import ScriptedHost

BACKOFF = Backoff(first_seconds=0.1, most_seconds=1.0)


def roles_of(count, gang, spares, restart, minimum):
    main = RoleSpec(
        command=["x"],
        count=count,
        gang=gang,
        spares=spares if gang else 0,
        min=min(minimum, count) if gang else None,
        restart=restart,
        budget=Budget(user=2, host=3, no_progress=2),
        backoff=BACKOFF,
    )
    server = RoleSpec(command=["y"], restart="permanent", backoff=BACKOFF)
    last = RoleSpec(command=["z"], after=["main"], restart="transient", backoff=BACKOFF)
    return {"last": last, "server": server, "main": main}


class Deciders(RuleBasedStateMachine):
    """One run on one host."""

    @initialize(
        count=st.integers(1, 4),
        gang=st.booleans(),
        spares=st.integers(0, 2),
        restart=st.sampled_from(["temporary", "transient", "permanent"]),
        minimum=st.integers(1, 4),
        strategy=st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"]),
    )
    def begin(self, count, gang, spares, restart, minimum, strategy):
        self.host = ScriptedHost()
        self.host.submit(roles_of(count, gang, spares, restart, minimum), strategy=strategy)

    def alive(self):
        prefix = f"{self.host.run}."
        names = sorted(self.host.started - self.host.exited)
        return [name.removeprefix(prefix) for name in names]

    @precondition(lambda self: self.host.waiting())
    @rule(data=st.data())
    def something_starts(self, data):
        self.host.start(data.draw(st.sampled_from(sorted(self.host.waiting()))))

    @precondition(lambda self: self.alive())
    @rule(
        data=st.data(),
        end=st.sampled_from(
            [{"code": 0}, {"code": 1}, {"signal": 9}, {"signal": 11}, {"signal": 15}]
        ),
    )
    def something_ends(self, data, end):
        self.host.exit(data.draw(st.sampled_from(self.alive())), **end)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), what=st.sampled_from(["joined", "progressed", "ready", "hung"]))
    def something_is_said(self, data, what):
        name = data.draw(st.sampled_from(self.alive()))
        attempt = self.host.coordinator.runs[self.host.run].attempts[f"{self.host.run}.{name}"]
        self.host.report(what, name, generation=attempt.generation, step=1, reason="")

    @precondition(lambda self: self.host.wanted("term") or self.host.wanted("kill"))
    @rule()
    def what_should_end_ends(self):
        for name in self.host.wanted("term") + self.host.wanted("kill"):
            if f"{self.host.run}.{name}" in self.host.started:
                self.host.exit(name, signal=15)
            else:
                self.host.report("exited", name, error="it was never started")
                self.host.exited.add(f"{self.host.run}.{name}")

    @rule(seconds=st.sampled_from([0.05, 0.5, 5.0]))
    def time_passes(self, seconds):
        self.host.advance(seconds)

    @rule(hard=st.booleans(), role=st.sampled_from([None, None, None, "main"]), index=st.booleans())
    def somebody_stops_it(self, hard, role, index):
        if self.host.log and len(self.host.facts(CommandAccepted)) < 4:
            self.host.stop(role, 0 if role and index else None, hard=hard)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), rank=st.integers(0, 5), age=st.sampled_from([0, 0, 1]))
    def somebody_is_suspected(self, data, rank, age):
        name = data.draw(st.sampled_from(self.alive()))
        generation = self.host.coordinator.runs[self.host.run].roles["main"].generation - age
        self.host.report("suspected", name, rank=rank, generation=generation, reason="silent")

    @rule()
    def evidence_is_kept(self):
        for fact in self.host.facts(AttemptSuspected):
            outputs = self.host.coordinator.keep_evidence(
                self.host.now, fact.attempt, path="x", error=""
            )
            self.host.take(outputs)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), chance=st.integers(0, 9))
    def a_program_gives_up(self, data, chance):
        if chance == 0:
            self.host.report("gave_up", data.draw(st.sampled_from(self.alive())), reason="no use")

    @rule(size=st.integers(0, 7), may_restart=st.booleans())
    def somebody_resizes_it(self, size, may_restart):
        before = len(self.host.log)
        try:
            _, outputs = self.host.coordinator.scale(
                self.host.now, self.host.run, size, role="main", may_restart=may_restart
            )
        except (ConfigError, NotFoundError):
            assert len(self.host.log) == before
            return
        self.host.take(outputs)

    @rule(seed=st.integers(0, 99))
    def somebody_breaks_a_rank(self, seed):
        orders = [replace(order, role="main") for order in draw_faults(seed, 2, 2, (1, 9))]
        try:
            _, outputs = self.host.coordinator.inject(self.host.now, self.host.run, orders)
        except (ConfigError, NotFoundError):
            return
        self.host.take(outputs)

    @rule()
    def the_keeper_is_replaced(self):
        if int(self.host.keeper[1:]) < 4:
            self.host.replace_keeper()

    @rule()
    def the_controller_restarts(self):
        self.host.restart_controller()

    @invariant()
    def a_replay_gives_the_same_state(self):
        again = Coordinator(runs_directory="/runs")
        for event in self.host.log:
            again.replay(event)
        now = self.host.coordinator
        for run, supervisor in now.runs.items():
            assert supervisor.roles == again.runs[run].roles
            assert supervisor.ended == again.runs[run].ended
        assert now.pending == again.pending
        assert not again.unreadable
        assert not [fact for fact in self.host.facts(Note) if fact.text.startswith(PUT_ASIDE)]
        assert now.placement.hosts == again.placement.hosts

    @invariant()
    def nothing_is_planned_or_ended_twice(self):
        for kind in (AttemptPlanned, AttemptExited, AttemptSuspected):
            names = [fact.attempt for fact in self.host.facts(kind)]
            assert len(names) == len(set(names))
        assert len(self.host.facts(RunEnded)) <= 1

    @invariant()
    def ranks_of_a_generation_are_distinct(self):
        for fact in self.host.facts(GenerationFormed):
            assert len(set(fact.members)) == len(fact.members)

    def teardown(self):
        """However it stands: stopped by force, it ends, and every command has its outcome."""
        if not hasattr(self, "host"):
            return
        self.host.stop(hard=True)
        self.what_should_end_ends()
        self.host.advance(1.0)
        assert self.host.ended is not None
        done = {fact.command for fact in self.host.facts(CommandDone)}
        assert done == {fact.command for fact in self.host.facts(CommandAccepted)}


TestDeciders = Deciders.TestCase
TestDeciders.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
