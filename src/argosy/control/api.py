"""The shapes of the HTTP API: queries, bodies and answers as Structs, checked on the way in and described in the OpenAPI document.

Used by http.py and openapi.py. Shapes of facts, specs and lines are those of their own modules.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from argosy.control.commands import RunStopping
from argosy.control.faults import FaultOrder
from argosy.control.views import ProcessView, RunView
from argosy.protocol.facts import Event, FaultInjected
from argosy.telemetry.logs import Line

Flag = Annotated[int, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what comes in: a misspelt field is refused."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer that is not a success."""

    error: str
    fix: str


class RunsQuery(Shape, frozen=True, kw_only=True):
    """Which runs to list."""

    all: Flag = 0
    limit: Count = 100
    name: str = ""


class ProcessesQuery(Shape, frozen=True, kw_only=True):
    """Which processes to list."""

    run: str = ""
    all: Flag = 0
    """Also those of runs that have ended."""
    limit: Count = 1000


class EventsQuery(Shape, frozen=True, kw_only=True):
    """Which events to read."""

    after: Number = 0
    limit: Count = 1000
    run: str = ""
    follow: Flag = 0


class LogsQuery(Shape, frozen=True, kw_only=True):
    """Which lines to read."""

    role: str | None = None
    index: Index | None = None
    follow: Flag = 0
    tail: Count | None = None


class StreamQuery(Shape, frozen=True, kw_only=True):
    """How a run's stream is watched."""

    tied: Flag = 0
    lines: Flag = 1
    """0: only word that there is more output, as `event: output`, for those who read the files themselves."""


class StacksQuery(Shape, frozen=True, kw_only=True):
    """Whose stacks to take."""

    role: str | None = None
    index: Index | None = None


class StopBody(Shape, frozen=True, kw_only=True):
    """What to end, and how."""

    hard: bool = False
    reason: str = ""
    role: str | None = None
    index: Index | None = None


class StopRunsBody(Shape, frozen=True, kw_only=True):
    """Which runs to end, all in one decision, and how."""

    runs: list[Annotated[str, msgspec.Meta(min_length=1)]] | None = None
    """Ids, names, names of arrays; null: all that are alive. Those that have ended are left alone."""
    hard: bool = False
    reason: str = ""


class ScaleBody(Shape, frozen=True, kw_only=True):
    """How many members a gang should have."""

    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    role: str | None = None
    restart: bool = False
    """Also when its program cannot re-form in place: all ranks are then restarted."""


class FaultsBody(Shape, frozen=True, kw_only=True):
    """What to break on purpose, all or nothing."""

    faults: Annotated[list[FaultOrder], msgspec.Meta(min_length=1, max_length=1000)]


class SignalBody(Shape, frozen=True, kw_only=True):
    """A signal by name, as `SIGUSR1`."""

    signal: str


class ExecBody(Shape, frozen=True, kw_only=True):
    """A command to run beside a process, in its environment, directory and containment group."""

    argv: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
    tty: bool = False
    env: dict[str, str] = {}


class DownBody(Shape, frozen=True, kw_only=True):
    """Whether to stop what is alive first."""

    force: bool = False


class RunName(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was accepted."""

    run: str
    name: str


class RunsAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a submission."""

    runs: list[RunName]


class RunCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Runs by state."""

    queued: int
    running: int
    ended: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at a glance."""

    version: str
    cluster: str
    keeper: str
    pids: dict[str, int]
    hosts: list[str]
    runs: RunCounts
    uptime_seconds: float
    home: str
    http_port: int | None
    trouble: str
    """What is wrong with the cluster itself, as a disk that is full; empty when all is well."""


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """A list of runs, newest first."""

    runs: list[RunView]


class Processes(msgspec.Struct, frozen=True, kw_only=True):
    """Processes of the newest runs first, each by its newest start."""

    processes: list[ProcessView]


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of the cluster."""

    hosts: list[dict[str, Any]]


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that wait, in the order of admission."""

    queue: list[dict[str, Any]]


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """Events of the log, oldest first."""

    events: list[Event]


class Lines(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of output in the order of their arrival."""

    lines: list[Line]


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted command; its outcome will be in the log."""

    command: str


class RunsStopping(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that were asked to end."""

    runs: list[RunStopping]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Faults as they are in the log."""

    faults: list[FaultInjected]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """It was done."""

    ok: bool


class ExecStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Where the output of an exec'd command goes."""

    attempt: str
    stdout: str
    stderr: str


class ExecState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an exec'd command still runs, and how it ended."""

    running: bool
    code: int | None = None
    signal: int | None = None
    error: str = ""


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks of the processes that were asked for."""

    stacks: list[dict[str, Any]]
