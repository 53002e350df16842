"""The state that a supervisor folds from facts: roles, their processes, and each start of a process.

Plain records with a few questions one may ask them; only `Supervisor.apply` changes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from argosy.config.spec import Restart, RoleSpec
from argosy.control.restarts import History, Life, classify, policy_of, precedence
from argosy.protocol.facts import (
    AttemptExited,
    AttemptSaving,
    FailureClass,
    FaultInjected,
    GangBounded,
    StateSaved,
)
from argosy.protocol.lastwords import last_words
from argosy.protocol.peerloss import is_peer_loss

End = Literal["", "asked", "well", "failed"]
GRACE_SECONDS, JOINED_GRACE_SECONDS = 10.0, 30.0


@dataclass(slots=True)
class Attempt:
    """One start of one process."""

    id: str
    role: str
    index: int
    number: int
    host: str
    keeper: str
    """The host's keeper when it was planned; with another keeper it is gone."""
    planned_seq: int
    planned_at: float
    generation: int = 0
    since: int = 0
    """The first generation that it was a member of."""
    rank: int | None = None
    parked: bool = False
    saving: bool = False
    """It is started to save what the run has come to, and leaves then."""
    pid: int = 0
    how: str = ""
    note: str = ""
    started_at: float | None = None
    released_at: float = 0.0
    """When a spare was let go."""
    said_ready: bool = False
    joined: int | None = None
    """Generation it joined last; None: it has not come to that yet, or the program does not know Argosy."""
    joined_at: float = 0.0
    """When it joined first."""
    entered_at: float | None = None
    """When its trainer began to take part."""
    step: int | None = None
    advance: AttemptSaving | None = None
    """How far its save is, if it is to end."""
    advanced_at: float = 0.0
    suspected_at: float | None = None
    """When a peer said that it hangs; it is killed when the evidence is kept, or could not be had in time."""
    suspicion: str = ""
    has_evidence: bool = False
    faults: list[FaultInjected] = field(default_factory=list)
    """What it was told to break in itself."""
    reform: bool = False
    """It was a member before: told to re-form, not launched, in its present generation."""
    stopping: Literal["", "term", "kill"] = ""
    stop_reason: str = ""
    stopping_at: float = 0.0
    stop_failure: FailureClass | None = None
    exit: AttemptExited | None = None
    exit_seq: int = 0
    exited_at: float = 0.0
    end: End = ""
    failure: FailureClass | None = None
    words: str = ""
    """The last words of its exception. Read once: a gang of a thousand asks for everybody's at each end."""
    has_lost_a_peer: bool = False
    gravity: tuple[int, float, str] = (9, 0.0, "")
    """Among the ends of a gang the least is the first cause."""

    @property
    def is_alive(self) -> bool:
        """Not known to be reaped."""
        return self.exit is None

    @property
    def is_suspect(self) -> bool:
        """It is about to be killed as hung."""
        return self.exit is None and not self.stopping and self.suspected_at is not None

    def conclude(self, exit: AttemptExited, seq: int, at: float) -> None:
        """Fold its exit. What ended before it was told to, ended by itself (exits of one failure arrive in any order)."""
        self.exit, self.exit_seq, self.exited_at = exit, seq, at
        self.words, self.has_lost_a_peer = last_words(exit.error), is_peer_loss(exit.error)
        self.gravity = precedence(exit)
        if self.stop_failure is not None:
            self.end, self.failure = "failed", self.stop_failure
        elif self.saving or (self.stopping and not 0.0 < exit.at <= self.stopping_at):
            self.end = "asked"
        else:
            self.failure = classify(exit)
            self.end = "failed" if self.failure else "well"

    def life(self, long_seconds: float) -> Life:
        """Its life as the failure counts see it."""
        began = self.started_at if self.started_at is not None else self.exited_at
        return Life(
            has_progressed=self.said_ready or self.step is not None,
            is_long=self.exited_at - began >= long_seconds,
            is_oom=self.exit is not None and self.exit.is_oom,
        )


@dataclass(slots=True)
class Process:
    """One member of a role."""

    index: int
    host: str = ""
    current: Attempt | None = None
    """Its newest attempt, alive or not."""
    retired: Literal["", "term", "kill"] = ""
    """A person ended it: it is not started again."""
    history: History = field(default_factory=History)

    @property
    def alive(self) -> Attempt | None:
        """Its attempt, if it is not known to be reaped."""
        attempt = self.current
        return attempt if attempt is not None and attempt.exit is None else None

    @property
    def next_number(self) -> int:
        """Number of its next attempt."""
        return 0 if self.current is None else self.current.number + 1


def grace_of(spec: RoleSpec, *, has_joined: bool) -> float:
    """A member that joined holds state and saves it when it is stopped; others have little to finish."""
    if spec.grace_seconds is not None:
        return spec.grace_seconds
    return JOINED_GRACE_SECONDS if has_joined else GRACE_SECONDS


class Seat(NamedTuple):
    """Where a rank sits: among those of its host, and its host among all."""

    local_rank: int
    local_size: int
    group: int
    num_groups: int


def seats_of(hosts: Sequence[str]) -> list[Seat]:
    """The seats of ranks, given each one's host."""
    sizes = Counter(hosts)
    groups = {host: place for place, host in enumerate(sizes)}
    seated: Counter[str] = Counter()
    seats = []
    for host in hosts:
        seats.append(Seat(seated[host], sizes[host], groups[host], len(groups)))
        seated[host] += 1
    return seats


@dataclass(slots=True)
class Role:
    """A role with all its processes; those with an index of count or more began as spares."""

    name: str
    spec: RoleSpec
    policy: Restart
    processes: list[Process]
    history: History = field(default_factory=History)
    generation: int = 0
    members: list[int] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    """Of the members, by rank."""
    formed_at: float = 0.0
    dropped: set[int] = field(default_factory=set)
    """Indices the gang goes on without."""
    size: int = 0
    """How many members the gang should have: the spec's count until somebody changes it."""
    is_resizing: bool = False
    """The present generation has another size than was asked for."""
    resized_by: str = ""
    """The command that asked last, and for how many."""
    asked_size: int = 0
    can_join: bool = False
    """All members of a generation have joined: whoever is started later will, too."""
    bounds: GangBounded | None = None
    """What its members' trainers have said of themselves; None: none was made yet."""
    entered_at: float | None = None
    """When the first of its members' trainers began to take part."""
    slowest_entry: float = 0.0
    """Seconds from a start to that, the longest so far."""
    has_trained: bool = False
    """A step was made: there is something to save."""
    saved: StateSaved | None = None
    """The newest save that its members have told of: one at their end."""
    has_saved: bool = False
    """It was made since the run is being stopped."""
    orphans: dict[int, list[FaultInjected]] = field(default_factory=dict)
    """rank -> faults told to a process that ended before their time; its successor is told."""
    is_observable: bool = False
    has_started: bool = False
    failed_generation: int = 0
    """The last one whose failure was counted."""
    failed_at: float = 0.0
    said_generation: int = 0
    """The last one that failed by its program, whose last words the history has."""
    has_progressed: bool = False
    """Somebody who was not there at that failure has shown progress."""

    @classmethod
    def of(cls, name: str, spec: RoleSpec) -> Role:
        """A role before anything has happened."""
        total = spec.count + (spec.spares if spec.gang else 0)
        processes = [Process(index) for index in range(total)]
        return cls(
            name,
            spec,
            policy_of(spec),
            processes,
            size=spec.count,
            is_observable=spec.ready is not None,
        )

    def can_reform(self, attempt: Attempt) -> bool:
        """Alive, neither told to end nor suspected, and its program takes part in a new generation in place."""
        is_well = attempt.exit is None and not attempt.stopping and attempt.suspected_at is None
        return is_well and (attempt.joined is not None or (self.can_join and not attempt.parked))

    def note_progress(self, attempt: Attempt) -> None:
        """It was made since the last failure if the process was not there then: what others tell late may be older."""
        if attempt.since > self.failed_generation:
            self.has_progressed = True

    def alive(self) -> list[Attempt]:
        """All attempts that are not reaped."""
        return [p.current for p in self.processes if p.current is not None and p.current.is_alive]

    def wanted(self) -> list[Process]:
        """The processes that make the role: the members of a gang, else all."""
        if self.spec.gang and self.generation:
            return [self.processes[index] for index in self.members]
        return self.processes[: self.spec.count]

    def is_so_of_all(self, is_so: Callable[[Process], bool]) -> bool:
        """Of every process that makes the role. The last come last, mostly: asked first, they spare the question to the others."""
        indices = self.members if self.spec.gang and self.generation else range(self.spec.count)
        return all(is_so(self.processes[index]) for index in reversed(indices))

    @property
    def least(self) -> int:
        """Fewest members a gang goes on with."""
        return self.spec.min if self.spec.min is not None else self.size

    @property
    def is_closed(self) -> bool:
        """A person stopped so many members of the gang that too few are left."""
        if not self.generation:
            return False
        retired = sum(1 for index in self.members if self.processes[index].retired)
        return retired > 0 and len(self.members) - retired < self.least

    def is_ready(self) -> bool:
        """Every process is ready, or has ended well."""
        return all(self._is_process_ready(process) for process in self.wanted())

    def _is_process_ready(self, process: Process) -> bool:
        attempt = process.current
        if attempt is None or attempt.started_at is None:
            return False
        if not attempt.is_alive:
            return attempt.end == "well" and self.policy != "permanent"
        return attempt.said_ready or self.spec.ready is None

    def is_finished(self) -> bool:
        """Every process has ended and none will be started again by itself."""
        if self.is_closed:
            return not any(process.alive for process in self.wanted())
        for process in self.wanted():
            attempt = process.current
            if process.retired and not process.alive:
                continue
            if attempt is None or attempt.is_alive or attempt.end != "well":
                return False
            if attempt.generation != self.generation:
                return False  # formed, and not yet started in this generation
            if self.policy == "permanent":
                return False
        return True
