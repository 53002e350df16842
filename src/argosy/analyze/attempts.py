"""Attempts: what the events say about each start of each process.

The common ground of causes.py and story.py. Pure: events are the plain objects of `GET /v1/events`, in order of `seq`.
"""

from __future__ import annotations

import signal

from argosy.analyze.ranksets import format_ranks

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

    EventObject = dict[str, Any]


class Attempt:
    """One start of one process, as far as the events tell."""

    __slots__ = (
        "declared",
        "evidence",
        "exit",
        "exited_at",
        "fault",
        "faults_met",
        "generation",
        "has_joined",
        "host",
        "how",
        "id",
        "index",
        "is_parked",
        "number",
        "pid",
        "rank",
        "reason",
        "role",
        "started_at",
        "stop_failure",
        "stop_level",
        "stop_reason",
        "stop_signal",
        "suspicion",
    )

    def __init__(self, fact: dict[str, Any], *, stop_signal: str = "SIGTERM") -> None:
        self.id: str = fact["attempt"]
        self.role: str = fact.get("role", "")
        self.index: int = fact.get("index", 0)
        self.number: int = fact.get("number", 0)
        self.host: str = fact.get("host", "")
        self.generation: int = fact.get("generation", 0)
        self.rank: int | None = fact.get("rank")
        self.is_parked: bool = fact.get("parked", False)
        self.reason: str = fact.get("reason", "")
        self.pid = 0
        self.how = ""
        self.started_at = 0.0
        self.has_joined = False
        self.stop_level = ""
        self.stop_failure = ""
        self.declared = ""
        self.suspicion = ""
        self.evidence = ""
        self.fault = ""
        """What was broken on purpose and explains its end."""
        self.faults_met: list[str] = []
        self.stop_reason = ""
        self.stop_signal = int(signal.Signals[stop_signal])
        """How it is told to stop."""
        self.exit: dict[str, Any] | None = None
        self.exited_at = 0.0

    @property
    def name(self) -> str:
        """How a person calls it: `rank 2`, or `web/0`."""
        if self.rank is not None:
            return f"rank {self.rank}"
        return f"{self.role}/{self.index}" if self.role else self.id

    @property
    def was_told_to_stop(self) -> bool:
        """Argosy asked it to end before it ended."""
        return bool(self.stop_level)

    @property
    def has_failed(self) -> bool:
        """It ended by itself and not well, or for a failure of its own."""
        if self.exit is None or (is_success(self.exit) and not self.declared):
            return False
        return bool(self.declared) or not self.was_told_to_stop or bool(self.stop_failure)

    @property
    def exit_code(self) -> int:
        """As a shell would say it: 128+n for a signal."""
        return exit_code(self.exit or {})


def restart_in(reason: str) -> str:
    """Which restart a reason says it is, as `restart 2 of 3`; empty when it says none."""
    last = reason.rpartition("; ")[2]
    return last if last.startswith("restart ") else ""


class Attempts:
    """All attempts of one run by id; `apply` each event in order."""

    def __init__(self) -> None:
        self.by_id: dict[str, Attempt] = {}
        self._faults: dict[int, str] = {}
        self._roles: dict[str, dict[str, Any]] = {}

    def apply(self, event: EventObject) -> Attempt | None:
        """Note what the event says; returns the attempt it is about."""
        fact = event["fact"]
        kind = fact["kind"]
        self._note_run(kind, fact)
        if kind == "attempt.planned":
            role = self._roles.get(fact.get("role", ""), {})
            stop_signal = role.get("stop_signal", "SIGTERM")
            self.by_id[fact["attempt"]] = Attempt(fact, stop_signal=stop_signal)
        attempt = self.by_id.get(fact.get("attempt", ""))
        if attempt is None:
            return None
        if kind == "attempt.started":
            attempt.pid, attempt.how = fact.get("pid", 0), fact.get("how", "")
            attempt.started_at = event["at"]
        elif kind == "attempt.released":
            attempt.rank, attempt.generation = fact.get("rank"), fact.get("generation", 0)
            attempt.is_parked = False
        elif kind == "fault.injected" and is_done_at_once(fact):
            attempt.faults_met.append(fact["fault"])
        elif kind == "fault.met" and fact["number"] in self._faults:
            attempt.faults_met.append(self._faults[fact["number"]])
        elif kind == "attempt.joined":
            attempt.has_joined, attempt.generation = True, fact.get("generation", 0)
        elif kind == "attempt.stopping":
            attempt.stop_level, attempt.stop_reason = fact.get("level", ""), fact.get("reason", "")
            attempt.stop_failure = fact.get("failure") or attempt.stop_failure
        elif kind == "attempt.suspected":
            attempt.suspicion = fact.get("reason", "")
        elif kind == "attempt.evidence":
            attempt.evidence = fact.get("path", "")
        elif kind == "attempt.exited":
            attempt.exit = fact
            attempt.exited_at = fact.get("at") or event["at"]
            attempt.fault = explaining_fault(fact, attempt.faults_met)
        return attempt

    def _note_run(self, kind: str, fact: dict[str, Any]) -> None:
        """What is said of the run and matters for its attempts."""
        if kind == "run.submitted":
            self._roles = fact.get("spec", {}).get("roles", {})
        elif kind == "run.stop_requested" and fact.get("declared") and fact["cause"] in self.by_id:
            self.by_id[fact["cause"]].declared = fact["reason"]
        elif kind == "fault.injected":
            self._faults[fact["number"]] = fact["fault"]


def is_done_at_once(fault: dict[str, Any]) -> bool:
    """Whether a rank is broken from outside, and not told to break itself later."""
    is_signal = fault["fault"] in ("kill", "stop")
    return is_signal and not fault.get("part") and fault.get("step") is None


def explaining_fault(exit_fact: dict[str, Any], met: list[str]) -> str:
    """The newest of the faults that a process has met by which it may have ended so; empty: it ended otherwise."""
    if exit_fact.get("lost"):
        return "the keeper was killed" if exit_fact.get("fault") else ""
    if exit_fact.get("hung"):
        kinds: tuple[str, ...] = ("stop", "slow")
    elif exit_fact.get("signal") == signal.SIGKILL and not exit_fact.get("is_oom"):
        kinds = ("kill",)
    else:
        kinds = ("raise", "nan") if exit_fact.get("code") else ()
    return next((kind for kind in reversed(met) if kind in kinds), "")


def read_attempts(events: list[EventObject]) -> Attempts:
    """The attempts of a whole list of events."""
    attempts = Attempts()
    for event in events:
        attempts.apply(event)
    return attempts


def is_success(exit_fact: dict[str, Any]) -> bool:
    """Exit code 0 and nothing else."""
    return exit_fact.get("code") == 0 and not exit_fact.get("hung")


def exit_code(exit_fact: dict[str, Any]) -> int:
    """The code a shell would give: the program's, 128+n for a signal, 127 when it could not be started."""
    if exit_fact.get("signal") is not None:
        return 128 + int(exit_fact["signal"])
    if exit_fact.get("code") is not None:
        return int(exit_fact["code"])
    return 137 if exit_fact.get("lost") else 127


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 40` when it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(exit_fact: dict[str, Any]) -> str:
    """`killed by SIGKILL`, `exited with code 1`, …"""
    if exit_fact.get("is_oom"):
        return "killed for lack of memory"
    if exit_fact.get("hung"):
        return "killed because it made no progress"
    if exit_fact.get("lost"):
        return "lost with its keeper"
    if exit_fact.get("signal") is not None:
        return f"killed by {signal_name(int(exit_fact['signal']))}"
    if exit_fact.get("code") is not None:
        code = int(exit_fact["code"])
        return "ended well" if code == 0 else f"exited with code {code}"
    return "could not be started"


def error_lines(exit_fact: dict[str, Any]) -> list[str]:
    """The error that a process left, as lines; an error file in torch's JSON form gives its call stack."""
    # Only line breaks are cut off: a syntax error begins with an indented line.
    text = str(exit_fact.get("error") or "").strip("\n").rstrip()
    if not text.startswith("{"):
        return text.splitlines()
    import json

    try:
        message = json.loads(text).get("message", text)
    except (ValueError, AttributeError):
        return text.splitlines()
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = stack or message.get("message", text)
    return str(message).strip("\n").rstrip().splitlines()


def name_all(attempts: list[Attempt]) -> str:
    """Several processes in one breath: `ranks 0-2`, `web/0 and web/1`."""
    ranks = [attempt.rank for attempt in attempts if attempt.rank is not None]
    names = [attempt.name for attempt in attempts if attempt.rank is None]
    if len(ranks) == 1:
        names.insert(0, f"rank {ranks[0]}")
    elif ranks:
        names.insert(0, f"ranks {format_ranks(ranks)}")
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]
