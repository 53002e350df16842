"""Numbered events for the agent: kept until acknowledged, sent again to every new agent.

`exited` events are also records on disk. What workers say is bounded per attempt: when the agent does not acknowledge,
the oldest of that attempt's `link` events give way. Called by everything that has something to report.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from argosy.control.keeper.loop import log
from argosy.control.keeper.records import Records

_MOST_LINKS_PER_ATTEMPT = 256
_MOST_NOTES = 2000
MOST_ERROR_BYTES = 16 << 10


class Outbox:
    """The events of one keeper id, in order."""

    def __init__(self, keeper: str, records: Records) -> None:
        self.keeper = keeper
        self.records = records
        self.number = 0
        self.send: Callable[[dict[str, Any]], None] | None = None
        """Set while an agent is connected."""
        self._waiting: dict[int, dict[str, Any]] = {}
        self._links: dict[tuple[str, bool], deque[int]] = {}
        self._notes: deque[int] = deque()
        self._unneeded: deque[tuple[str, int]] = deque()
        """Exit records of acknowledged events, to be removed."""
        self._is_disk_failing = False

    def emit(self, event: dict[str, Any]) -> int:
        """Number it, keep it, send it if somebody listens."""
        self.number += 1
        number = self.number
        kind = event["event"]
        self._waiting[number] = event
        is_recorded = True
        if kind == "exited":
            is_recorded = self.records.write_exit(self.keeper, number, event)
        elif kind == "link":
            said = self._links.setdefault(_links_key(event), deque())
            self._bound(said, _MOST_LINKS_PER_ATTEMPT)
            said.append(number)
        elif kind == "note":
            self._bound(self._notes, _MOST_NOTES)
            self._notes.append(number)
        if self.send is not None:
            self.send({"type": "event", "number": number, "event": event})
        if kind == "exited":
            # A note is an event too: before the exit was sent it would overtake it, and whoever listens takes numbers in order.
            self._judge_disk(is_recorded)
        return number

    def note(self, text: str, *, run: str = "", attempt: str = "", level: str = "warning") -> None:
        """Something a person should know; also in the keeper's log."""
        log(f"{level}: {text}" + (f" [{attempt}]" if attempt else ""))
        self.emit(
            {
                "event": "note",
                "run": run,
                "attempt": attempt,
                "level": level,
                "text": text,
                "at": time.time(),
            }
        )

    def acknowledge(self, through: int) -> list[str]:
        """Forget what is durable elsewhere; the attempts whose exit was among it. Their records are left to `tidy`."""
        ended = []
        for number in list(itertools.takewhile(lambda number: number <= through, self._waiting)):
            event = self._waiting.pop(number)
            if event["event"] == "exited":
                self._unneeded.append((self.keeper, number))
                was = event.get("was")
                if was:
                    self._unneeded.append((was[0], was[1]))
                ended.append(event["attempt"])
                for is_step in (False, True):
                    self._links.pop((event["attempt"], is_step), None)
        return ended

    def tidy(self, most: int | None = None) -> bool:
        """Remove records that nobody needs, up to so many; whether there are more. One that stays behind is only reported again."""
        for _ in range(len(self._unneeded) if most is None else min(most, len(self._unneeded))):
            self.records.remove_exit(*self._unneeded.popleft())
        return bool(self._unneeded)

    def adopt(self, keeper: str, number: int, event: dict[str, Any]) -> None:
        """Report an exit that a dead keeper recorded and nobody acknowledged."""
        event = {**event, "event": "exited", "was": event.get("was") or [keeper, number]}
        self.emit(event)
        if event["was"] != [keeper, number] or keeper != self.keeper:
            self.records.remove_exit(keeper, number)

    def resend(self) -> None:
        """Send everything unacknowledged to the agent that has just come."""
        for number, event in list(self._waiting.items()):
            if self.send is None:
                # The agent left while it was being told.
                return
            self.send({"type": "event", "number": number, "event": event})

    def to_state(self) -> dict[str, Any]:
        """For a successor program of the same keeper id."""
        self.tidy()
        return {"number": self.number, "waiting": list(self._waiting.items())}

    def take_state(self, state: dict[str, Any]) -> None:
        """Go on with the predecessor's numbers."""
        self.number = state["number"]
        for number, event in state["waiting"]:
            self._waiting[number] = event
            if event["event"] == "link":
                self._links.setdefault(_links_key(event), deque()).append(number)
            elif event["event"] == "note":
                self._notes.append(number)

    def statistics(self) -> dict[str, int]:
        """Counts for people."""
        return {"events": self.number, "unacknowledged": len(self._waiting)}

    def _bound(self, numbers: deque[int], most: int) -> None:
        while numbers and numbers[0] not in self._waiting:
            numbers.popleft()
        while len(numbers) >= most:
            self._waiting.pop(numbers.popleft(), None)

    def _judge_disk(self, is_writable: bool) -> None:
        """Say that exit records cannot be written, once until they can again."""
        was_failing, self._is_disk_failing = self._is_disk_failing, not is_writable
        if self._is_disk_failing and not was_failing:
            self.note(f"an exit record could not be written ({self.records.last_error})")


def _links_key(event: dict[str, Any]) -> tuple[str, bool]:
    """Steps and saves on their way are told often and only the newest matters, and nobody acts on what only informs: they must not drive out what is said once."""
    message = event.get("message")
    is_frequent = isinstance(message, dict) and message.get("say") in ("step", "saving", "info")
    return event["attempt"], is_frequent


def bounded_text(text: str, most_bytes: int = MOST_ERROR_BYTES) -> str:
    """The end of the text, where a traceback says what happened."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most_bytes:
        return text
    return "[…]\n" + data[-(most_bytes - 8) :].decode("utf-8", "ignore")


def bounded_error(text: str) -> str:
    """An error within bounds; an error file in torch's JSON form stays one, with its texts bounded."""
    if len(text.encode("utf-8", "replace")) <= MOST_ERROR_BYTES:
        return text
    try:
        message = json.loads(text)["message"]
        words = message if isinstance(message, str) else message.get("message", "")
        extra = {} if isinstance(message, str) else message.get("extraInfo") or {}
        stack = str(extra.get("py_callstack") or words)
    except (ValueError, KeyError, TypeError, AttributeError):
        return bounded_text(text)
    most_bytes = MOST_ERROR_BYTES
    bounded = text
    while len(bounded.encode("utf-8", "replace")) > MOST_ERROR_BYTES:
        # What is escaped in JSON takes up to six times its room.
        most_bytes //= 2
        inside = {"py_callstack": bounded_text(stack, most_bytes)}
        record = {"message": {"message": str(words)[: most_bytes // 8], "extraInfo": inside}}
        bounded = json.dumps(record, ensure_ascii=False)
    return bounded
