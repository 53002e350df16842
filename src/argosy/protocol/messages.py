"""Messages between controller and agent; one tagged union per direction, JSON in length-prefixed frames.

Both directions survive loss, doubling and reorder: wants carry a version per host and are sent again until acknowledged,
observations carry (source, number) and are sent again until acknowledged durably. A source is a keeper's id, with the
keeper's own numbers, or `HOST@INCARNATION` for what the agent itself saw (probes, ports, hangs), numbered from 1 by each
agent process. The latter die with the agent; its successor sees the same things again, and the controller takes them by
their content (an attempt becomes ready once), so nothing is lost or doubled. Numbers that tell the controller nothing
(later steps) are left out: a gap in a report means that there is nothing to know.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PROTOCOL_VERSION = 1
MOST_FRAME_BYTES = 16 << 20


class Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
):
    """Base of all messages."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a keeper needs to start one attempt; see docs/reference/keeper-protocol.md."""

    attempt: str
    run: str
    role: str
    index: int
    program: dict[str, Any]
    """{"kind": "exec", "argv": [...]} | {"kind": "script", "path", "args"} | {"kind": "module", "name", "args"}"""
    python: str
    env_blob: str
    env: dict[str, str]
    """Added to the submitter's environment; wins over it."""
    cwd: str
    umask: int
    limits: dict[str, tuple[int, int]]
    affinity: list[int]
    stdout: str
    stderr: str
    generation: int = 0
    rank: int | None = None
    world_size: int = 0
    gang: bool = False
    parked: bool = False
    preload: list[str] = []
    warm: bool = False
    threads: int | None = None
    nice: int = 0
    memory_bytes: int | None = None
    tty: bool = False
    ports: dict[str, int] = {}
    """name -> held port of this process"""
    secret_blobs: dict[str, str] = {}
    error_file: str = ""
    stop_signal: str = "SIGTERM"
    grace_seconds: float = 10.0
    log_bytes: int = 1 << 30
    probe: dict[str, Any] | None = None
    not_before: float = 0.0
    """Wall-clock second; the agent waits until then."""
    hang_seconds: float = 0.0
    """The agent reports it as hung after so long without a step, once it has reported one; 0: not watched."""


class Want(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one attempt on one host should be; the newest version per attempt counts."""

    attempt: str
    version: int
    state: Literal["running", "term", "kill", "gone"]
    """gone: ended and acknowledged, the host may forget it"""
    launch: Launch | None = None
    """with running; also the changed launch of a released spare (parked false, rank set)"""
    reform: dict[str, Any] | None = None
    """with running, for a member that joined: {"generation", "rank", "world_size"}: tell it to re-form in place. With gone: the place that
    it may have ended too early to be told"""
    faults: list[dict[str, Any]] = []
    """with running: faults to tell it, by number; it breaks itself."""
    progressed: bool = False
    """It has reported a step before (a new agent watches it for hangs at once)."""


class Reserve(msgspec.Struct, frozen=True, kw_only=True):
    """Ports to hold for a run: `role/index/name` -> number, 0 for any."""

    run: str
    version: int
    ports: dict[str, int]
    """Empty: release them, the run is over."""


# --- agent -> controller -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of an agent, and again after every reconnect."""

    version: int
    host: str
    keeper: str
    pid: int
    cpus: int
    memory_bytes: int
    alive: list[str]
    """Attempts the keeper holds, running or ended but not acknowledged; what is not here is gone."""
    runs: list[str] = []
    """Runs of which the host holds anything; those that are over are released again."""


class Observed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing a host saw; number is the keeper's sequence number."""

    number: int
    kind: Literal[
        "started",
        "exited",
        "ready",
        "joined",
        "bounded",
        "entered",
        "saved",
        "saving",
        "progressed",
        "hung",
        "suspected",
        "gave_up",
        "met",
        "unready",
        "ports",
        "ports_refused",
        "note",
    ]
    attempt: str = ""
    run: str = ""
    data: dict[str, Any] = {}
    """started: pid how note · exited: code signal is_oom error swept at · joined: generation · bounded: least most why keeps_state hang_seconds · saved: step path · saving: step num_bytes total_bytes what · progressed: step · hung, unready: reason · suspected (by this attempt): rank generation reason · gave_up: reason code rank · met: number · ports: ports · ports_refused: reason · note: level text"""


class Report(Message, frozen=True, kw_only=True, tag="report"):
    """What happened since the last acknowledged number, in order; sent again until acknowledged."""

    host: str
    keeper: str
    """The source of the observations (see the top of this file)."""
    observed: list[Observed] = []
    wants_version: int = 0
    """Highest want version such that it and all below have been received."""


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """Reply to an Ask."""

    id: int
    ok: bool
    data: dict[str, Any] = {}
    error: str = ""


# --- controller -> agent -------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Answer to Hello: the controller knows this keeper up to this number."""

    version: int
    keeper: str
    """The keeper whose hello this answers; the number is of that keeper alone."""
    acknowledged: int


class Wants(Message, frozen=True, kw_only=True, tag="wants"):
    """Everything that changed for this host since the version the agent has reported."""

    since: int
    version: int
    keeper: str = ""
    """Meant for this keeper: a host with another one ignores them, what they ask for is gone."""
    wants: list[Want] = []
    reserves: list[Reserve] = []
    page: int = 0
    """Of several messages with the same since and version, which hold no more than fits each."""
    has_more: bool = False
    """There is another page; nothing counts until all have come."""


class Acknowledge(Message, frozen=True, kw_only=True, tag="acknowledge"):
    """All observations of this source up to the number are durable."""

    keeper: str
    number: int


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """A question or side errand that is not part of the desired state; at most once, may be lost with the link.

    verbs: put_blob {data}, get_blob {name}, drop_blob {name}, room {commands, pythons}, stacks {attempts}, steps {attempts}, exec {attempt, argv, tty, env}, signal {attempt, signal}, statistics {}, shutdown {}.
    """

    id: int
    verb: str
    data: dict[str, Any] = {}


FromAgent = Hello | Report | Answer
FromController = Welcome | Wants | Acknowledge | Ask
