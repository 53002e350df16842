"""Outbox: observations of one source on their way to the controller, kept until they are durable there.

A source is a keeper (its numbers) or the agent itself. Numbers that tell the controller nothing are kept in order too, so
that the keeper can be told up to where it may forget. Owned by HostSide; pure.
"""

from __future__ import annotations

from collections import deque

from argosy.protocol.messages import Observed

# Few unacknowledged ones are sent again with each new one, so that no report is ever needed twice; many wait for the
# acknowledgement.
FEW = 64
MOST_IN_REPORT = 512
MOST_ERROR_CHARACTERS = 1 << 20
"""In one report: errors are long, and in a message they may take several times their room."""
RESEND_SECONDS = 1.0
SILENT_ACKNOWLEDGEMENTS = 32


class Outbox:
    """Numbered observations, oldest first."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.last = 0
        self.forgettable = 0
        """All numbers up to here are durable or say nothing."""
        self.sent_at = 0.0
        self._sent = 0
        self._entries: deque[tuple[int, Observed | None]] = deque()
        self._told = 0
        self._is_due = False
        self._has_first = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, number: int, observed: Observed | None) -> bool:
        """Take the next one (None: nothing to tell); False if it was taken before."""
        if number <= self.last:
            return False
        if not self._has_first:
            # What came before was acknowledged to the source by an earlier agent.
            self._has_first = True
            self.forgettable = self._told = number - 1
        self.last = number
        if observed is None and self._entries and self._entries[-1][1] is None:
            self._entries.pop()  # a long silence of the controller must not fill the memory with steps
        self._entries.append((number, observed))
        self._drop(self.forgettable)
        return True

    def acknowledge(self, number: int) -> None:
        """All up to the number are durable."""
        self._drop(number)
        self._is_due = True

    def _drop(self, through: int) -> None:
        entries = self._entries
        while entries and (entries[0][0] <= through or entries[0][1] is None):
            self.forgettable = entries.popleft()[0]

    def take_forgettable(self) -> int:
        """The number the source may forget up to, if it is worth a frame; else 0."""
        news = self.forgettable - self._told
        if news <= 0 or (not self._is_due and news < SILENT_ACKNOWLEDGEMENTS):
            return 0
        self._is_due = False
        self._told = self.forgettable
        return self.forgettable

    def unsent(self) -> bool:
        """Something new should go out now."""
        if not self._entries or self.last <= self._sent:
            return False
        return len(self._entries) <= FEW or self._sent <= self.forgettable

    def due_at(self) -> float | None:
        """When what is unacknowledged is sent again."""
        return self.sent_at + RESEND_SECONDS if self._entries else None

    def take(self, now: float) -> list[Observed]:
        """Everything unacknowledged, oldest first, up to a limit."""
        observed: list[Observed] = []
        self.sent_at = now
        room = MOST_ERROR_CHARACTERS
        for number, each in self._entries:
            if len(observed) >= MOST_IN_REPORT or room <= 0:
                break
            if each is not None and each.data:
                room -= len(each.data.get("error") or each.data.get("text") or "")
            self._sent = max(self._sent, number)
            if each is not None:
                observed.append(each)
        return observed

    def rewind(self) -> None:
        """A new connection: nothing is under way."""
        self._sent = self.forgettable
        self.sent_at = 0.0
