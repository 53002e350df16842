"""Folding: equal lines that several ranks print at about the same time become one line with a rank set.

Called by `argosy run` and `argosy logs`. Pure: the caller passes the time in. The order of the lines of each stream of each
rank is always kept (between stdout and stderr there is none: they are two files); a line waits at most `window_seconds` for
the other ranks to say the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Member = tuple[str, int]
"""Who says something: (role, rank or index)."""


class FoldedLine:
    """One line and everybody who said it."""

    __slots__ = ("_due", "_place", "at", "members", "stream", "text")

    def __init__(self, at: float, stream: str, text: str, member: Member) -> None:
        self.at = at
        self.stream = stream
        self.text = text
        self.members = [member]
        self._place = 0
        self._due = at

    def __repr__(self) -> str:
        return f"FoldedLine({self.text!r}, {self.members})"


class Folder:
    """Holds lines for a moment and gives them out folded, oldest first."""

    def __init__(
        self, members: Iterable[Member], *, window_seconds: float = 0.05, most_pending: int = 10_000
    ) -> None:
        self._expected = set(members)
        self._window_seconds = window_seconds
        self._most_pending = most_pending
        self._pending: deque[FoldedLine] = deque()
        self._open: dict[tuple[str, str], list[FoldedLine]] = {}
        self._last_place: dict[tuple[Member, str], int] = {}
        self._next_place = 0

    def expect(self, member: Member) -> None:
        """This process may speak: a line is complete once everybody expected has said it."""
        self._expected.add(member)

    def forget(self, member: Member) -> None:
        """This process has ended: nobody waits for it any more."""
        self._expected.discard(member)

    def add(
        self, at: float, member: Member, stream: str, text: str, *, now: float | None = None
    ) -> list[FoldedLine]:
        """Take a line of time `at`; returns what can be shown now. A live reader says `now`, when the line reached it."""
        now = at if now is None else now
        after = self._last_place.get((member, stream), -1)
        line = next(
            (
                candidate
                for candidate in self._open.get((stream, text), ())
                if candidate._place > after
            ),
            None,
        )
        if line is None:
            line = FoldedLine(at, stream, text, member)
            line._place, line._due = self._next_place, now + self._window_seconds
            self._next_place += 1
            self._pending.append(line)
            self._open.setdefault((stream, text), []).append(line)
        else:
            line.members.append(member)
        self._last_place[member, stream] = line._place
        return self.flush(now)

    def flush(self, now: float) -> list[FoldedLine]:
        """What is complete or has waited long enough, in order."""
        ready = []
        while self._pending and self._is_due(self._pending[0], now):
            ready.append(self._pop())
        return ready

    def drain(self) -> list[FoldedLine]:
        """Everything that is left."""
        ready = []
        while self._pending:
            ready.append(self._pop())
        return ready

    def deadline(self) -> float | None:
        """When to call `flush` next."""
        return self._pending[0]._due if self._pending else None

    def _is_due(self, line: FoldedLine, now: float) -> bool:
        return (
            len(self._pending) > self._most_pending
            or now >= line._due
            or self._expected.issubset(line.members)
        )

    def _pop(self) -> FoldedLine:
        line = self._pending.popleft()
        siblings = self._open[line.stream, line.text]
        siblings.remove(line)
        if not siblings:
            del self._open[line.stream, line.text]
        return line
