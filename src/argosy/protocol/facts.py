"""Facts: what the event log holds, the only truth about a cluster.

The controller appends them; all other state (runs, attempts, queue) is a projection rebuilt from them. A fact is never
changed or taken back. Facts hold no environment values and no secrets.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from argosy.config.spec import RunSpec

FailureClass = Literal["user", "host", "hang", "preemption"]
FaultKind = Literal["kill", "stop", "slow", "nan", "raise"]
FaultPoint = Literal["", "lane", "publish", "vote", "update", "flip", "refresh"]
Outcome = Literal["succeeded", "failed", "stopped", "cancelled"]


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Base of all facts; `kind` on the wire is the class's tag."""


class HostJoined(Fact, frozen=True, kw_only=True, tag="host.joined"):
    """An agent with a keeper reported for duty. A new keeper id means the old keeper's processes are gone."""

    host: str
    keeper: str
    cpus: int
    memory_bytes: int
    pid: int = 0


class HostLost(Fact, frozen=True, kw_only=True, tag="host.lost"):
    """No sign of a host for too long (off-host agents only; silence never ends a process on this machine)."""

    host: str
    reason: str


class CommandAccepted(Fact, frozen=True, kw_only=True, tag="command.accepted"):
    """A client asked for something and was told yes; a CommandDone with the same id follows."""

    command: str
    verb: str
    """submit, stop, kill, scale, cancel, exec, signal, drain, …"""
    target: str = ""
    about: str = ""
    """The run that it is about; of an array, its first. Its events are kept as long as that run's."""


class CommandDone(Fact, frozen=True, kw_only=True, tag="command.done"):
    """What became of an accepted command."""

    command: str
    outcome: str
    """ok, or what prevented it"""
    about: str = ""
    """As in CommandAccepted."""


class RunSubmitted(Fact, frozen=True, kw_only=True, tag="run.submitted"):
    """A run exists from here on; it waits in the queue."""

    run: str
    name: str
    spec: RunSpec
    """With digests in the place of the values of the roles' variables."""
    env_blob: str
    """Digest of the submitter's environment; the values live in the keeper."""
    env_names: list[str] = []
    role_env_blobs: dict[str, str] = {}
    """The same for roles with variables of their own: the submitter's environment with theirs in it."""
    cwd: str = "/"
    umask: int = 0o022
    limits: dict[str, tuple[int, int]] = {}
    affinity: list[int] = []
    python: str = ""
    secret_blobs: dict[str, str] = {}
    array_index: int | None = None


class RunAdmitted(Fact, frozen=True, kw_only=True, tag="run.admitted"):
    """The queue let the run start; `hosts` says where each process lives."""

    run: str
    hosts: dict[str, list[str]]
    """role -> host of each index, spares last"""


class PortsReserved(Fact, frozen=True, kw_only=True, tag="run.ports"):
    """The host holds the run's ports."""

    run: str
    host: str
    ports: dict[str, int]
    """`role/index/name` -> number"""


class PortsRefused(Fact, frozen=True, kw_only=True, tag="run.ports_refused"):
    """A port could not be had; the run fails."""

    run: str
    host: str
    reason: str


class GenerationFormed(Fact, frozen=True, kw_only=True, tag="gang.formed"):
    """A gang's new membership: `members[rank]` is the process index. Also the fencing token."""

    run: str
    role: str
    generation: int
    members: list[int]
    reason: str


class GangResized(Fact, frozen=True, kw_only=True, tag="gang.resized"):
    """A person wants another number of members; the next generation has it."""

    run: str
    role: str
    size: int
    hosts: list[str] = []
    """Where the processes live that the role has from now on in addition, in order of index."""
    command: str = ""


class GangBounded(Fact, frozen=True, kw_only=True, tag="gang.bounded"):
    """A member has made its trainer: it knows how many ranks it can use, and whether what it trains outlives them."""

    run: str
    role: str
    least: int
    most: int
    why: str
    """What the bounds come from, in words: `it has 8 lanes`."""
    keeps_state: bool
    """The state is in the run's memory: any new process of the program can save it."""
    hang_seconds: float = 0.0
    """So long a member may take to enter beyond what others took; 0: for ever."""


class StateSaved(Fact, frozen=True, kw_only=True, tag="run.saved"):
    """A member has saved what the run has come to, or was to do so and no step was made yet: then the path is empty."""

    run: str
    attempt: str
    step: int
    path: str = ""


class AttemptSaving(Fact, frozen=True, kw_only=True, tag="attempt.saving"):
    """It is to end and its save goes on: so far it is. Told every few seconds, and only when bytes were added."""

    attempt: str
    run: str
    step: int
    num_bytes: int
    total_bytes: int = 0
    """0: not known."""
    what: str = "written"
    """Or `uploaded`, `copied` (to peers)."""


class AttemptPlanned(Fact, frozen=True, kw_only=True, tag="attempt.planned"):
    """One start of one process was decided. Durable before anything is started."""

    attempt: str
    run: str
    role: str
    index: int
    number: int
    """0 for a process's first start, then 1, …"""
    host: str
    not_before: float = 0.0
    """Wall-clock second of the earliest start (backoff)."""
    generation: int = 0
    rank: int | None = None
    parked: bool = False
    """A spare: forked and held at its gate until a generation takes it."""
    saving: bool = False
    """The run is being stopped and nobody was left to save its state: this process does so, and leaves."""
    reason: str = ""


class AttemptReleased(Fact, frozen=True, kw_only=True, tag="attempt.released"):
    """A parked spare was given a rank."""

    attempt: str
    run: str
    generation: int
    rank: int


class AttemptStarted(Fact, frozen=True, kw_only=True, tag="attempt.started"):
    """The keeper has the process."""

    attempt: str
    run: str
    pid: int
    how: Literal["fork", "exec"]
    note: str = ""
    """Why a warm fork was not possible."""


class AttemptReady(Fact, frozen=True, kw_only=True, tag="attempt.ready"):
    """Its probe succeeded, or it said so over its link; without a probe: it started."""

    attempt: str
    run: str


class AttemptJoined(Fact, frozen=True, kw_only=True, tag="attempt.joined"):
    """The program knows Argosy: it called `argosy.join()` and can re-form in place."""

    attempt: str
    run: str
    generation: int


class AttemptEntered(Fact, frozen=True, kw_only=True, tag="attempt.entered"):
    """Its trainer takes part: from here on its peers see whether it hangs."""

    attempt: str
    run: str


class AttemptProgressed(Fact, frozen=True, kw_only=True, tag="attempt.progressed"):
    """It reported its first step since it started (later steps are not facts)."""

    attempt: str
    run: str
    step: int


class AttemptSuspected(Fact, frozen=True, kw_only=True, tag="attempt.suspected"):
    """A peer says that this member hangs: stacks of the gang are taken, then it is killed as hung."""

    attempt: str
    run: str
    by: str
    """The attempt that said so; empty: it never joined or never entered, although its program does."""
    generation: int
    reason: str


class EvidenceKept(Fact, frozen=True, kw_only=True, tag="attempt.evidence"):
    """Stacks of a suspect and of its gang, taken before it was killed."""

    attempt: str
    run: str
    path: str = ""
    """In the run's directory; empty: they could not be had."""
    error: str = ""


class FaultInjected(Fact, frozen=True, kw_only=True, tag="fault.injected"):
    """Somebody breaks something on purpose: at once, or a rank is told to break itself at a step."""

    run: str
    number: int
    """Of the run's faults; a rank that was told twice knows it by this."""
    fault: FaultKind
    part: str = ""
    """keeper, agent, controller or zygote; empty: a rank."""
    attempt: str = ""
    role: str = ""
    rank: int | None = None
    step: int | None = None
    point: FaultPoint = ""
    seconds: float = 0.0

    @property
    def is_told(self) -> bool:
        """The rank injects it itself; else it is carried out at once."""
        return not self.part and (self.step is not None or self.fault not in ("kill", "stop"))


class FaultMet(Fact, frozen=True, kw_only=True, tag="fault.met"):
    """A rank that was told a fault has come to it: it breaks itself now."""

    run: str
    attempt: str
    number: int
    """Of the fault."""


class AttemptStopping(Fact, frozen=True, kw_only=True, tag="attempt.stopping"):
    """It was told to end: `term` = stop signal then, after the grace, the whole tree; `kill` = the tree at once."""

    attempt: str
    run: str
    level: Literal["term", "kill"]
    reason: str
    failure: FailureClass | None = None
    """Set when it is ended for a failure of its own (hung, never ready); then its exit counts as one."""


class AttemptExited(Fact, frozen=True, kw_only=True, tag="attempt.exited"):
    """Reaped, its whole tree swept. Exactly one of code, signal is set; both None: it could not be started (`error`) or was lost with its keeper (`lost`)."""

    attempt: str
    run: str
    code: int | None = None
    signal: int | None = None
    is_oom: bool = False
    lost: bool = False
    hung: bool = False
    error: str = ""
    """Traceback, error file or exec error; bounded."""
    swept: int = 0
    """Descendants that had to be killed."""
    at: float = 0.0
    """Wall-clock second at which the keeper saw it."""
    fault: int = 0
    """with lost: number of the fault by which its keeper was killed"""


class StopRequested(Fact, frozen=True, kw_only=True, tag="run.stop_requested"):
    """Somebody (or a policy) wants the run to end."""

    run: str
    hard: bool
    reason: str
    failed: bool = False
    """A policy gave the run up: it ends as failed."""
    cause: str = ""
    """with failed: the attempt that decided it"""
    declared: bool = False
    """with failed: the cause's own program said that the run cannot succeed."""
    code: int | None = None
    """with declared: the run's exit code, if the program named one: it refuses what it was given."""


class RunEnded(Fact, frozen=True, kw_only=True, tag="run.ended"):
    """No process of the run is left."""

    run: str
    outcome: Outcome
    exit_code: int
    reason: str = ""
    first_cause: str = ""
    """Attempt that failed first."""


class RunsForgotten(Fact, frozen=True, kw_only=True, tag="runs.forgotten"):
    """Ended runs were dropped; the log may delete all their events. The rest is what those events had led to beside them."""

    runs: list[str]
    cursors: dict[str, int] = {}
    """source -> its last number that was taken"""
    num_submitted: int = 0
    """Runs there ever were: the next one's id follows from it."""
    num_ended: int = 0
    num_admitted: int = 0
    turns: dict[str, int] = {}
    """share -> the admission that was its last"""
    overtaken: dict[str, int] = {}
    """waiting run -> how often smaller ones went before it"""


class Note(Fact, frozen=True, kw_only=True, tag="note"):
    """Something a person should know: a fallback, a full log disk, a restarted part. Steers nothing."""

    run: str = ""
    attempt: str = ""
    level: Literal["info", "warning", "error"] = "info"
    text: str


AnyFact = (
    HostJoined
    | HostLost
    | CommandAccepted
    | CommandDone
    | RunSubmitted
    | RunAdmitted
    | PortsReserved
    | PortsRefused
    | GenerationFormed
    | GangResized
    | GangBounded
    | StateSaved
    | AttemptSaving
    | AttemptPlanned
    | AttemptReleased
    | AttemptStarted
    | AttemptReady
    | AttemptJoined
    | AttemptEntered
    | AttemptProgressed
    | AttemptSuspected
    | EvidenceKept
    | FaultInjected
    | FaultMet
    | AttemptStopping
    | AttemptExited
    | StopRequested
    | RunEnded
    | RunsForgotten
    | Note
)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A fact in the log: `seq` is its place, `at` the wall-clock second, `source` (keeper id, number) if a keeper saw it."""

    seq: int
    at: float
    fact: AnyFact
    source: tuple[str, int] | None = None
