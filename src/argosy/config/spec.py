"""RunSpec: what to run. The same object comes from TOML, from the command line and from Python.

Frozen, keyword-only, unknown fields refused. `argosy.config.files` reads and checks it (nearest key, cycles, ranges);
the controller stores it in the event log, so it never holds the value of a secret or of the submitter's environment.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from argosy.config.warmth import DEFAULT_PRELOAD

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
Restart = Literal["permanent", "transient", "temporary"]


class _Spec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    pass


class Budget(_Spec, frozen=True, kw_only=True):
    """How many restarts a failure class may cost, within a period."""

    user: int = 3
    """Exceptions, non-zero exits and crashes of the program itself."""
    host: int = 100
    """Deaths that are not the program's fault: a lost keeper or host, a kill from outside."""
    hang: int = 10
    """Members killed because they made no progress."""
    preemption: int = 1000
    """Exits asked for by the scheduler of the machine (SIGTERM from outside)."""
    period_seconds: float = 3600.0
    """Failures older than this are forgotten."""
    no_progress: int = 3
    """Stop after this many failures in a row without progress (no readiness, no reported step) in between; 0: never.

    Counts only for programs that can show progress: those with a `ready` probe, or that say that they are ready or report steps.
    """
    same_error: int = 2
    """Stop a gang after this many failures in a row with the same exception and without progress in between; 0: never."""


class Backoff(_Spec, frozen=True, kw_only=True):
    """Wait before a restart: first, doubled each time up to most, with jitter. Reset by progress."""

    first_seconds: float = 0.0
    """Wait before the first restart in a row; the second waits at least 0.5 s."""
    most_seconds: float = 30.0
    jitter: float = 0.2


class Probe(_Spec, frozen=True, kw_only=True):
    """When a process counts as ready; exactly one of port, http, file, command."""

    port: str | None = None
    """Name of one of the role's ports: ready when it accepts a connection."""
    http: str | None = None
    """`PORTNAME/path`: ready when it answers 2xx."""
    file: str | None = None
    """Path (relative to the process's cwd): ready when it exists, and was not left there by an earlier start."""
    command: list[str] | None = None
    """Ready when it exits 0; run with the process's environment and cwd."""
    every_seconds: float = 0.2
    timeout_seconds: float = 60.0
    """Not ready by then: a failure of class user."""


class RoleSpec(_Spec, frozen=True, kw_only=True):
    """A named group of like processes: any command in any language, a Python script or a module."""

    command: list[str] | None = None
    """Started by exec. Exactly one of command, script, module."""
    script: str | None = None
    """A Python script, started by a warm fork where possible."""
    module: str | None = None
    """A Python module, as `python -m` would run it, by a warm fork where possible."""
    arguments: list[str] = []
    """Arguments of script or module."""
    python: str | None = None
    """Interpreter of script and module; default: the submitter's."""
    preload: list[str] = msgspec.field(default_factory=lambda: list(DEFAULT_PRELOAD))
    """What the warm parent imports before it forks; a name that ends with `?` only where it can be imported."""
    warm: bool = True
    """False: always start by exec."""

    count: int = 1
    gang: bool = False
    """Processes work only together: one generation, one rank each, torchrun's environment."""
    min: int | None = None
    """Fewest members a gang goes on with; default: count."""
    spares: int = 0
    """Warm processes parked beside the gang; one takes the place of a member that died."""

    env: dict[str, str] = {}
    cwd: str | None = None
    cpus: list[int] | None = None
    """CPUs the processes are pinned to, in turn one per process; default: none."""
    threads: int | None = None
    """OMP_NUM_THREADS and torch's thread count; default for gangs of more than one: 1, unless that variable is set."""
    nice: int = 0
    memory_bytes: int | None = None
    """Memory limit of one process with its children, where the host allows it."""
    cpu_request: float = 0.0
    """CPUs accounted to one process by the queue; 0: not accounted."""
    memory_request_bytes: int = 0

    ports: dict[str, int] = {}
    """name -> port; 0: the runtime chooses. Published as ARGOSY_PORT_<NAME> and ARGOSY_PORT_<ROLE>_<INDEX>_<NAME>."""
    secrets: list[str] = []
    """Names of secrets given to the processes: ARGOSY_SECRET_<NAME>_FD, in capitals, is a descriptor to read."""
    ready: Probe | None = None
    after: list[str] = []
    """Roles that must have been started before (ended well also counts)."""
    after_ready: list[str] = []
    """Roles whose processes must all be ready before."""

    restart: Restart | None = None
    """permanent: always; transient: after a failure; temporary: never. Default: permanent in a service, transient for gangs, else temporary."""
    budget: Budget = Budget()
    """In a service, a role that names neither this nor `restart` is restarted without end."""
    backoff: Backoff = Backoff()
    stop_signal: str = "SIGTERM"
    grace_seconds: float | None = None
    """Between the stop signal and the end of the whole tree; default: 10, and 30 for members that joined, which may save. A trainer whose save goes on has it anew from each sign of that."""
    hang_seconds: float = 0.0
    """A member that reports steps and then none for so long is killed as hung; 0: not watched."""
    log_bytes: int = 1 << 30
    """Most bytes kept of each process's output; older ones are dropped."""
    tty: bool = False


class RunSpec(_Spec, frozen=True, kw_only=True):
    """One submitted piece of work: roles, how they hold together, and where."""

    name: str = ""
    roles: dict[str, RoleSpec]
    """In order of start; stopped in reverse order."""
    strategy: Strategy = "one_for_one"
    """What a failed process takes with it when it is restarted: nothing, all roles, or the roles after it."""
    service: bool = False
    """Lives until it is stopped: what ends is started again, with growing pauses; survives the client, and is never ended by idleness."""
    priority: int = 0
    """Higher runs are admitted first."""
    share: str = ""
    """Name for the queue's fair share; default: the run's name."""
    array: int = 0
    """Number of like runs to make of this; each gets ARGOSY_ARRAY_INDEX. 0: a single run."""
    tied: bool = False
    """Stop the run when the submitting client vanishes."""
    helps: str = ""
    """Id of the run that it works for: commands that name no run do not mean this one."""
    queued: bool = False
    """Wait in the queue for CPU and memory; otherwise start at once."""


class Submission(_Spec, frozen=True, kw_only=True):
    """What the client sends: the spec and the shell it was typed in. Values of env and secrets go to the keeper only."""

    spec: RunSpec
    env: dict[str, str] = {}
    cwd: str = "/"
    umask: int = 0o022
    limits: dict[str, tuple[int, int]] = {}
    """RLIMIT name without prefix, lower case -> (soft, hard)."""
    affinity: list[int] = []
    python: str = ""
    """The submitter's interpreter (sys.executable)."""
    secrets: dict[str, str] = {}
    client: str = ""
    """Version of the client."""
