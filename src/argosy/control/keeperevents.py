"""From a keeper's events to observations for the controller, one for one, with the keeper's number.

What the controller need not know (helpers, errands, later steps, words it does not understand) becomes None. Called by
HostSide for every event; pure, and it never trusts a worker's words to have the right types: what cannot be told to the
controller (half characters, numbers beyond all bounds) would otherwise end one agent after the other.
"""

from __future__ import annotations

from typing import Any

from argosy.control.identity import is_attempt
from argosy.protocol.messages import Observed

MOST_TEXT = 4096
MOST_REASON = 8 << 10
MOST_SECONDS = 1e9
_OF_EXIT = ("code", "signal", "is_oom", "error", "swept", "at")


def is_step(event: dict[str, Any]) -> bool:
    """Whether a worker reported a step."""
    return _says(event) == "step"


def is_advance(event: dict[str, Any]) -> bool:
    """Whether a worker that is to end reported that its save goes on."""
    return _says(event) == "saving"


def _says(event: dict[str, Any]) -> object:
    message = event.get("message")
    return message.get("say") if isinstance(message, dict) else None


def observation_of(
    number: int, event: dict[str, Any], *, is_first_step: bool = False
) -> Observed | None:
    """What the event tells the controller; None: nothing."""
    kind = event.get("event")
    attempt = str(event.get("attempt") or "")
    run = str(event.get("run") or "")
    data: dict[str, Any]
    if kind == "note":
        data = {"level": _text(event.get("level", "info")), "text": _text(event.get("text", ""))}
        return Observed(number=number, kind="note", attempt=attempt, run=run, data=data)
    if not is_attempt(attempt):
        return None
    if kind == "started":
        data = {key: event.get(key) for key in ("pid", "how")}
        data["note"] = _text(event.get("note") or "")
        return Observed(number=number, kind="started", attempt=attempt, run=run, data=data)
    if kind == "exited":
        data = {key: event[key] for key in _OF_EXIT if event.get(key) is not None}
        if "error" in data:
            data["error"] = _text(data["error"])
        return Observed(number=number, kind="exited", attempt=attempt, run=run, data=data)
    message = event.get("message")
    if kind == "link" and isinstance(message, dict):
        return _of_worker(
            Observed(number=number, kind="note", attempt=attempt, run=run), message, is_first_step
        )
    return None


def _of_worker(blank: Observed, message: dict[str, Any], is_first_step: bool) -> Observed | None:
    number, attempt, run = blank.number, blank.attempt, blank.run
    says, generation, step = message.get("say"), message.get("generation"), message.get("step")
    if says == "step" and is_first_step and _is_number(step):
        return Observed(
            number=number, kind="progressed", attempt=attempt, run=run, data={"step": step}
        )
    if says == "ready":
        return Observed(number=number, kind="ready", attempt=attempt, run=run)
    if says == "join" and _is_number(generation):
        data = {"generation": generation}
        return Observed(number=number, kind="joined", attempt=attempt, run=run, data=data)
    if says in ("bounds", "enter", "saved", "saving"):
        return _of_trainer(blank, message)
    if says == "suspect" and _is_number(generation) and _is_number(message.get("rank")):
        data = {
            "rank": message["rank"],
            "generation": generation,
            "reason": _text(message.get("reason") or "")[:MOST_REASON],
        }
        if _is_number(message.get("pid")):
            data["pid"] = message["pid"]
        return Observed(number=number, kind="suspected", attempt=attempt, run=run, data=data)
    if says == "fail":
        data = {"reason": _text(message.get("reason") or "")[:MOST_REASON]}
        if _is_number(message.get("code")) and 0 < message["code"] < 256:
            data["code"] = message["code"]
        if _is_number(message.get("rank")):
            data["rank"] = message["rank"]
        return Observed(number=number, kind="gave_up", attempt=attempt, run=run, data=data)
    if says == "fault" and _is_number(message.get("number")):
        data = {"number": message["number"]}
        return Observed(number=number, kind="met", attempt=attempt, run=run, data=data)
    if says in ("error", "warning", "info"):
        text = {"level": says, "text": _text(message.get("text", ""))[:MOST_TEXT]}
        return Observed(number=number, kind="note", attempt=attempt, run=run, data=text)
    return None


def _of_trainer(blank: Observed, message: dict[str, Any]) -> Observed | None:
    """What a member's trainer says of itself."""
    attempt, run, says = blank.attempt, blank.run, message["say"]
    if says == "enter":
        return Observed(number=blank.number, kind="entered", attempt=attempt, run=run)
    if says == "saved" and _is_number(message.get("step")):
        data = {"step": message["step"], "path": _text(message.get("path") or "")[:MOST_TEXT]}
        return Observed(number=blank.number, kind="saved", attempt=attempt, run=run, data=data)
    if says == "saving":
        return _of_save(blank, message)
    least, most, seconds = (message.get(key) for key in ("least", "most", "hang_seconds"))
    is_bounded = isinstance(seconds, int | float) and 0.0 <= seconds < MOST_SECONDS
    if says != "bounds" or not _is_number(least) or not _is_number(most):
        return None
    data = {
        "least": least,
        "most": most,
        "why": _text(message.get("why") or "")[:MOST_TEXT],
        "keeps_state": bool(message.get("keeps_state")),
        "hang_seconds": float(seconds or 0.0) if is_bounded else 0.0,
    }
    return Observed(number=blank.number, kind="bounded", attempt=attempt, run=run, data=data)


def _of_save(blank: Observed, message: dict[str, Any]) -> Observed | None:
    """How far the save of one that is to end is."""
    numbers = {key: message.get(key) for key in ("step", "num_bytes", "total_bytes")}
    what = message.get("what")
    if not all(map(_is_number, numbers.values())) or what not in ("written", "uploaded", "copied"):
        return None
    data = {**numbers, "what": what}
    return Observed(
        number=blank.number, kind="saving", attempt=blank.attempt, run=blank.run, data=data
    )


def _text(value: object) -> str:
    """As text that can be told: JSON lets halves of surrogate pairs through, UTF-8 does not."""
    return str(value).encode("utf-8", "replace").decode()


def _is_number(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63
