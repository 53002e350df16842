"""Supervisor: one run as a pure state machine. Facts go in by `apply`, the next facts come out of `decide`.

The coordinator owns one per run, gives facts their place in the log, and calls `decide` until it has nothing to add.
Deciding looks at the state alone, never at the last event, so a log that was cut anywhere continues correctly. The fold is
in runstate.py, gangs are decided in membership.py, meanings of exits in restarts.py. Never reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from argosy.control import membership, saving
from argosy.control.attempts import Attempt, Process, Role
from argosy.control.identity import attempt_id
from argosy.control.restarts import (
    Tally,
    describe,
    describe_restart,
    exit_code,
    first_cause,
    wait_seconds,
    why_given_up,
    why_hopeless,
)
from argosy.control.runstate import RunState
from argosy.protocol.facts import (
    AttemptExited,
    AttemptPlanned,
    AttemptReleased,
    AttemptStopping,
    AttemptSuspected,
    CommandDone,
    Event,
    Fact,
    FailureClass,
    FaultInjected,
    GenerationFormed,
    RunEnded,
    StopRequested,
)
from argosy.protocol.lastwords import TOGETHER_SECONDS

# Stacks of a suspect's gang are waited for so long before it is killed without them.
EVIDENCE_SECONDS = 1.0
# A program whose other starts have joined, and that takes so long, hangs before it has said a word: no peer knows it.
JOIN_SECONDS = 120.0
STOPPED_CODE, KILLED_CODE = 143, 137


class Supervisor(RunState):
    """The state of one run and what follows from it."""

    def __init__(self, event: Event, keepers: Mapping[str, str]) -> None:
        super().__init__(event, keepers)
        self.waits: dict[str, str] = {}
        """role or role/index -> why it is not started, for people; made by decide."""
        self._deadline: float | None = None

    def deadline(self) -> float | None:
        """When `decide` would have something to say without a new fact."""
        return self._deadline

    def decide(self, now: float) -> list[Fact]:
        """The next facts that follow from the state; none: nothing to do."""
        self._deadline = None
        self.waits = {}
        if self.ended is not None:
            return self._finish_commands()
        facts = self._request_stop()
        if facts:
            return facts
        if self.admitted is None:
            if self.stop is not None:
                return [self._end("cancelled", STOPPED_CODE, self.stop.reason)]
            return self._finish_commands()
        if self.stop is not None:
            return self._wind_down(self.stop.hard, self.stop.reason, now)
        if self._is_complete():
            return self._wind_down(False, "the run is complete", now)
        if self.ports_refused is not None:
            return [self._give_up(self.ports_refused.reason, "")]
        facts = self._stop_retired() or self._finish_commands() or self._pass_faults_on()
        return (
            facts or self._suspect_newcomers(now) or self._end_suspects(now) or self._supervise(now)
        )

    def _request_stop(self) -> list[Fact]:
        for verb, target in self.commands.values():
            hard = verb == "kill"
            if verb not in ("stop", "kill"):
                continue
            if "/" not in target and (self.stop is None or (hard and not self.stop.hard)):
                return [StopRequested(run=self.run, hard=hard, reason=f"{verb} was asked for")]
        return []

    def _finish_commands(self) -> list[Fact]:
        done: list[Fact] = []
        for command, (verb, target) in self.commands.items():
            if verb == "scale":
                outcome = self._outcome_of_scale(command, target)
                if outcome:
                    done.append(CommandDone(command=command, outcome=outcome, about=self.run))
                continue
            is_whole_run = "/" not in target
            alive = any(process.alive for process in self.targets(target))
            if self.ended is not None or (not is_whole_run and not alive):
                done.append(CommandDone(command=command, outcome="ok", about=self.run))
        return done

    def _outcome_of_scale(self, command: str, target: str) -> str:
        """What became of a resize; empty: it is under way."""
        role = self.roles[target.partition("/")[2]]
        if role.resized_by != command:
            is_older = bool(role.resized_by) and int(command[1:]) < int(role.resized_by[1:])
            return "replaced by a later one" if is_older else "interrupted: it was not recorded"
        members = [process.current for process in role.wanted()]
        if not role.is_resizing and all(
            a is not None and a.generation == role.generation and a.started_at is not None
            for a in members
        ):
            has = len(role.members)
            return "ok" if has == role.asked_size else f"it went on with {has} members"
        if self.ended is not None:
            return f"the run {self.ended.outcome} before"
        return "the gang was about to end" if membership.is_ending(role) else ""

    def _pass_faults_on(self) -> list[Fact]:
        """Tell whoever has the rank now what a process was told that has ended before."""
        facts: list[Fact] = []
        for role in self.order:
            for rank, waiting in role.orphans.items():
                index = role.members[rank] if rank < len(role.members) else None
                attempt = role.processes[index].alive if index is not None else None
                if attempt is None or attempt.joined is None or attempt.stopping:
                    continue
                facts += [_passed_on(fault, attempt) for fault in waiting]
        return facts

    def _suspect_newcomers(self, now: float) -> list[Fact]:
        """Members that never join, or never come to train, although their program does."""
        facts: list[Fact] = []
        for role in self.order:
            for attempt in role.alive():
                if attempt.started_at is None or attempt.parked or attempt.entered_at is not None:
                    continue
                if attempt.stopping or attempt.suspected_at is not None:
                    continue
                at, reason = _expected(role, attempt)
                if at is None or not self._has_passed(at, now):
                    continue
                facts.append(
                    AttemptSuspected(
                        attempt=attempt.id,
                        run=self.run,
                        by="",
                        generation=role.generation,
                        reason=reason,
                    )
                )
        return facts

    def _has_passed(self, at: float, now: float) -> bool:
        """Whether a time has come; if not, this is to be looked at again then."""
        if at > now:
            self._deadline = at if self._deadline is None else min(self._deadline, at)
        return at <= now

    def _end_suspects(self, now: float) -> list[Fact]:
        """Kill those that hang in the eyes of a peer, as soon as the evidence is kept or could not be had in time."""
        facts: list[Fact] = []
        for role in self.order:
            for attempt in role.alive():
                if not attempt.is_suspect:
                    continue
                at = (attempt.suspected_at or 0.0) + EVIDENCE_SECONDS
                if attempt.has_evidence or self._has_passed(at, now):
                    facts.append(
                        AttemptStopping(
                            attempt=attempt.id,
                            run=self.run,
                            level="kill",
                            reason=attempt.suspicion,
                            failure="hang",
                        )
                    )
        return facts

    def _stop_retired(self) -> list[Fact]:
        facts: list[Fact] = []
        for role in reversed(self.order):
            for process in role.processes:
                attempt = process.alive
                if process.retired and attempt is not None:
                    facts += _stopping(self.run, [attempt], process.retired, "stop was asked for")
        return facts

    def _is_complete(self) -> bool:
        main = [role for role in self.order if role.policy != "permanent"]
        if main and not self.spec.service:
            return all(role.is_finished() for role in main)
        return all(role.is_finished() for role in self.order)  # the permanent ones by hand

    def _wind_down(self, hard: bool, reason: str, now: float) -> list[Fact]:
        """End what is left, role by role in reverse order of start, then the run."""
        facts: list[Fact] = []
        is_clear = True
        for role in reversed(self.order):
            alive = role.alive()
            for attempt in alive:
                if attempt.saving and not hard:
                    facts += self._await_saver(role, attempt, now)
                    continue
                if attempt.advance is not None:
                    name = f"{role.name}/{attempt.index}"
                    self.waits[name] = saving.describe_advance(attempt)
                is_at_once = hard or attempt.parked
                facts += _stopping(self.run, [attempt], "kill" if is_at_once else "term", reason)
            if not alive and not hard:
                facts += self._start_saver(role)
            if alive or facts:
                is_clear = False
                if not hard:
                    self.waits[role.name] = "is told to end; roles before it follow"
                    break
        return [self._conclusion()] if is_clear else facts

    def _start_saver(self, role: Role) -> list[Fact]:
        """Of a role that has ended without a save, although its state is still there: one process that makes it."""
        index = next((i for i in role.members if not role.processes[i].retired), None)
        if index is None or self.stop is None or self.stop.declared:
            return []  # who says that the run cannot succeed has saved before
        if not saving.needs_saver(self, role):
            return []
        reason, generation = "nobody is left who could save its state", role.generation + 1
        formed = GenerationFormed(
            run=self.run, role=role.name, generation=generation, members=[index], reason=reason
        )
        return [
            formed,
            self.plan(role, index, reason, generation=generation, rank=0, saving=True),
        ]

    def _await_saver(self, role: Role, attempt: Attempt, now: float) -> list[AttemptStopping]:
        late_at = saving.late_at(role, attempt)
        if not self._has_passed(late_at, now):
            what = saving.describe_advance(attempt) or "saves its state"
            self.waits[f"{role.name}/{attempt.index}"] = what
            return []
        reason = f"it has not done so within {late_at - attempt.planned_at:.0f} s"
        return _stopping(self.run, [attempt], "kill", reason)

    def _conclusion(self) -> RunEnded:
        stop = self.stop
        if stop is not None and stop.failed:
            cause = self._first_cause(stop.cause, is_named=stop.declared)
            # Whoever says that the run cannot succeed may itself end in any way that was asked of it.
            is_own = cause is not None and not (stop.declared and cause.signal is not None)
            code = exit_code(cause) if cause is not None and is_own else 1
            if stop.code is not None:
                # However those end that are told to, and whoever is first to say it.
                code = stop.code
            return self._end("failed", code, stop.reason, cause.attempt if cause else "")
        if stop is not None:
            reason = "; ".join(filter(None, (stop.reason, saving.describe_loss(self))))
            return self._end("stopped", KILLED_CODE if stop.hard else STOPPED_CODE, reason)
        if any(
            p.retired for role in self.order for p in role.processes if role.policy != "permanent"
        ):
            return self._end("stopped", STOPPED_CODE, "its processes were stopped")
        if all(role.policy == "permanent" for role in self.order):
            return self._end("stopped", STOPPED_CODE, "its processes were stopped")
        return self._end("succeeded", 0, "")

    def _end(self, outcome: Any, code: int, reason: str, cause: str = "") -> RunEnded:
        return RunEnded(
            run=self.run, outcome=outcome, exit_code=code, reason=reason, first_cause=cause
        )

    def _first_cause(self, decisive: str, *, is_named: bool) -> AttemptExited | None:
        """Among failures close to the decisive one and not healed since: the one that explains them."""
        attempt = self.attempts.get(decisive)
        if attempt is None or attempt.exit is None:
            return None
        if is_named:
            return attempt.exit
        near = [attempt.exit]
        for role in self.order:
            for process in role.processes:
                other = process.current
                if (
                    other is not None
                    and other.exit is not None
                    and other.end == "failed"
                    and abs(_time(other) - _time(attempt)) <= TOGETHER_SECONDS
                ):
                    near.append(other.exit)
        return first_cause(near)

    def _give_up(self, reason: str, cause: str) -> StopRequested:
        return StopRequested(run=self.run, hard=False, reason=reason, failed=True, cause=cause)

    def _supervise(self, now: float) -> list[Fact]:
        """Restart waves first, then each role in order of start."""
        held, facts = self._waves(now)
        if facts:
            return facts
        for role in self.order:
            why = self._why_gated(role)
            if role.spec.gang:
                facts += self._decide_gang(role, now, why, role.name in held)
                continue
            for process in role.processes:
                facts += self._decide_process(role, process, now, why, held)
        return facts

    def _why_gated(self, role: Role) -> str:
        for name in role.spec.after:
            if not self.roles[name].has_started:
                return f"waits for role {name} to start"
        for name in role.spec.after_ready:
            if not self.roles[name].is_ready():
                return f"waits for role {name} to be ready"
        if self.has_any_ports:
            for host in dict.fromkeys(process.host for process in role.processes):
                if not self.has_ports(host) and self.wanted_ports(host):
                    return f"waits for its ports on {host}"
        return ""

    def _decide_process(
        self, role: Role, process: Process, now: float, why: str, held: set[str]
    ) -> list[Fact]:
        attempt = process.current
        if process.retired or (attempt is not None and attempt.is_alive):
            return []
        reason = "start"
        if attempt is not None:
            if attempt.end == "well" and role.policy != "permanent":
                return []
            given_up = self._why_given_up(role, process, attempt)
            if given_up:
                return [self._give_up(given_up, attempt.id)]
            reason = self._why_again(role, attempt)
        if role.name in held:
            self.waits[f"{role.name}/{process.index}"] = "waits for its siblings to end"
            return []
        if why:
            self.waits[f"{role.name}/{process.index}"] = why
            return []
        if not self._is_due(self.restart_at(role, process), f"{role.name}/{process.index}", now):
            return []
        return [self.plan(role, process.index, reason)]

    def _why_again(self, role: Role, attempt: Attempt) -> str:
        if attempt.exit is None:
            return "restart"
        if attempt.failure is None:
            return describe(attempt.exit)
        count = self._num_failures(role, attempt.failure, attempt.exited_at)
        return f"{describe(attempt.exit)}; {describe_restart(role.spec, attempt.failure, count)}"

    def _num_failures(self, role: Role, failure: FailureClass, at: float) -> int:
        """Of this class, in the budget's period before that time."""
        since = at - role.spec.budget.period_seconds
        return sum(1 for time in role.history.failures.get(failure, ()) if time > since)

    def _why_given_up(self, role: Role, process: Process, attempt: Attempt) -> str:
        if attempt.failure is None:
            return ""
        count = self._num_failures(role, attempt.failure, attempt.exited_at)
        tally = Tally(count, process.history.row, process.history.fruitless)
        why = why_given_up(role.spec, attempt.failure, tally, role.is_observable)
        if role.policy == "transient" and attempt.failure == "user" and attempt.exit is not None:
            life = attempt.life(role.spec.backoff.most_seconds)
            why = why or why_hopeless(attempt.exit, life)
        if not why or attempt.exit is None:
            return ""
        return f"{role.name}/{process.index} {describe(attempt.exit)}; {why}"

    def restart_at(self, role: Role, process: Process) -> float:
        """Earliest time of the process's next start."""
        attempt = process.current
        if attempt is None or attempt.end == "asked":
            return 0.0
        if attempt.failure == "user" or attempt.failure == "hang" or attempt.exit is None:
            row = process.history.row
        else:
            row = process.history.row_of_kills(attempt.exited_at, attempt.failure or "host")
            row = max(row, process.history.row) if attempt.exit.is_oom else row
        if attempt.end == "well":  # permanent: it came back too soon to be useful
            is_long = attempt.life(role.spec.backoff.most_seconds).is_long
            row = 1 if is_long else min(attempt.number + 1, 8)
        key = (self.run, role.name, process.index, attempt.number)
        return attempt.exited_at + wait_seconds(role.spec.backoff, row, *key)

    def _is_due(self, at: float, what: str, now: float) -> bool:
        if self._has_passed(at, now):
            return True
        self.waits[what] = f"backoff: restarts in {at - now:.1f} s"
        return False

    def plan(self, role: Role, index: int, reason: str, **more: Any) -> AttemptPlanned:
        """The plan of a process's next attempt."""
        process = role.processes[index]
        number = process.next_number
        return AttemptPlanned(
            attempt=attempt_id(self.run, role.name, index, number),
            run=self.run,
            role=role.name,
            index=index,
            number=number,
            host=process.host,
            reason=reason,
            **more,
        )

    def _decide_gang(self, role: Role, now: float, why: str, is_held: bool) -> list[Fact]:
        decision = membership.decide(role, self.run)
        if decision.stop or decision.kill:
            return [
                *_stopping(self.run, decision.kill, "kill", decision.reason),
                *_stopping(self.run, decision.stop, "term", decision.reason),
            ]
        if decision.give_up:
            return [self._give_up(decision.give_up, decision.cause)]
        if decision.members is None and not decision.start and not decision.park:
            return []
        if is_held or why:
            self.waits[role.name] = why or "waits for its siblings to end"
            return []
        if decision.members is not None:
            if not self._is_due(decision.not_before, role.name, now):
                return []
            return [
                GenerationFormed(
                    run=self.run,
                    role=role.name,
                    generation=role.generation + 1,
                    members=decision.members,
                    reason=decision.reason,
                )
            ]
        return self._fill_generation(role, decision, now)

    def _fill_generation(self, role: Role, decision: membership.Decision, now: float) -> list[Fact]:
        facts: list[Fact] = []
        for rank, index in decision.start:
            attempt = role.processes[index].alive
            if attempt is not None:
                facts.append(
                    AttemptReleased(
                        attempt=attempt.id, run=self.run, generation=role.generation, rank=rank
                    )
                )
                continue
            facts.append(
                self.plan(role, index, "generation", generation=role.generation, rank=rank)
            )
        for index in decision.park:
            at = self.restart_at(role, role.processes[index])
            if self._is_due(at, f"{role.name}/{index}", now):
                facts.append(
                    self.plan(role, index, "spare", generation=role.generation, parked=True)
                )
        return facts

    # --- strategies ---------------------------------------------------------------------------------------------

    def _waves(self, now: float) -> tuple[set[str], list[Fact]]:
        """What a failed process takes with it: roles held back, and the stops that come first."""
        held: set[str] = set()
        if self.spec.strategy == "one_for_one":
            return held, []
        for position, role in enumerate(self.order):
            trigger = self._trigger(role)
            if trigger is None:
                continue
            affected = self.order if self.spec.strategy == "one_for_all" else self.order[position:]
            for other in reversed(affected):
                older = [
                    attempt
                    for attempt in other.alive()
                    if attempt.planned_seq < trigger.exit_seq
                    and (other is not role or self.spec.strategy == "one_for_all")
                ]
                if older:
                    held |= {each.name for each in affected}
                    reason = f"restarts with {role.name}/{trigger.index}"
                    return held, list[Fact](_stopping(self.run, older, "term", reason))
            if not role.spec.gang:
                at = self.restart_at(role, role.processes[trigger.index])
                if at > now:
                    held |= {each.name for each in affected if each is not role}
        return held, []

    def _trigger(self, role: Role) -> Attempt | None:
        """The newest failure of the role that is to be followed by a restart."""
        newest: Attempt | None = None
        for process in role.wanted():
            attempt = process.current
            if attempt is None or attempt.is_alive or process.retired:
                continue
            is_due = attempt.end == "failed" or (
                attempt.end == "well" and role.policy == "permanent" and not role.spec.gang
            )
            if (role.spec.gang and attempt.generation != role.generation) or (
                not role.spec.gang and is_due and self._why_given_up(role, process, attempt)
            ):
                is_due = False
            if is_due and (newest is None or attempt.exit_seq > newest.exit_seq):
                newest = attempt
        return newest


def _expected(role: Role, attempt: Attempt) -> tuple[float | None, str]:
    """When a member that was started should have joined, or one that joined should have begun to train, and what to say if it has not."""
    if attempt.joined is None:
        began = max(attempt.started_at or 0.0, attempt.released_at)
        at = began + JOIN_SECONDS if role.can_join else None
        return at, f"it has not joined within {JOIN_SECONDS:.0f} s"
    if role.entered_at is None or role.bounds is None or not role.bounds.hang_seconds:
        return None, ""
    # It may prepare as long as the slowest so far, and longer; others have come to their loops.
    seconds = role.bounds.hang_seconds + 3.0 * role.slowest_entry
    reason = f"it has joined and not come to train within {seconds:.0f} s, as others have"
    return max(attempt.joined_at, role.entered_at) + seconds, reason


def _time(attempt: Attempt) -> float:
    assert attempt.exit is not None
    return attempt.exit.at or attempt.exited_at


def _passed_on(fault: FaultInjected, attempt: Attempt) -> FaultInjected:
    return msgspec.structs.replace(fault, attempt=attempt.id, rank=attempt.rank)


def _stopping(
    run: str, attempts: Iterable[Attempt], level: Any, reason: str
) -> list[AttemptStopping]:
    """Stops for those that were not told yet (or told less)."""
    return [
        AttemptStopping(attempt=attempt.id, run=run, level=level, reason=reason)
        for attempt in attempts
        if attempt.stopping != level and attempt.stopping != "kill"
    ]
