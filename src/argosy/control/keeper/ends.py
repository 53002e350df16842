"""Ends: how members of gangs ended, kept for workers that connect later.

A peer's end is told to the links that are there at that moment; whoever comes after it hears it with its welcome, whether the exit is
acknowledged by then or not. Filled by `exits`, read by `links`. Only ends that somebody alive could wait for are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from argosy.control.keeper.attempts import Attempt
from argosy.control.keeper.frames import Message

MOST_PLACES = 16
_MOST_ENDS = 8192
"""Of one role."""
_FEW_ENDS = 64
"""Those that concern nobody any more are looked for when there are more than this, and twice as many as were left last time."""


class Ends:
    """The ends of each role's members, as the frames that tell of them."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], dict[str, Message]] = {}
        self._roles: dict[str, tuple[str, str]] = {}
        """attempt -> its run and role"""
        self._num_left: dict[tuple[str, str], int] = {}
        """How many there were after the last look at them."""

    def remember(self, run: str, role: str, frame: Message, oldest: Callable[[], int]) -> None:
        """Keep an end; those that were over before the generation `oldest()` concern nobody any more."""
        if frame["rank"] is None:
            return
        ends = self._ends.setdefault((run, role), {})
        ends[frame["attempt"]] = frame
        self._roles[frame["attempt"]] = (run, role)
        if len(ends) > _FEW_ENDS and len(ends) > 2 * self._num_left.get((run, role), 0):
            first = oldest()
            self._drop(ends, [name for name, end in ends.items() if end["generation"] < first])
            self._num_left[run, role] = len(ends)
        if len(ends) > _MOST_ENDS:
            self._drop(ends, [next(iter(ends))])

    def _drop(self, ends: dict[str, Message], names: list[str]) -> None:
        for name in names:
            del ends[name], self._roles[name]

    def since(self, run: str, role: str, oldest: int) -> list[Message]:
        """Ends of members that had a place in this generation or a newer one."""
        ends = self._ends.get((run, role), {})
        return [frame for frame in ends.values() if frame["generation"] >= oldest]

    def give_place(self, attempt: str, generation: int, rank: int) -> Message | None:
        """A member had ended before it could be told its newest place; the frame to tell, if that is news."""
        frame = self._ends.get(self._roles.get(attempt, ("", "")), {}).get(attempt)
        if frame is None or frame["generation"] >= generation:
            return None
        places = [*frame["places"], [frame["generation"], frame["rank"]]][-MOST_PLACES:]
        frame.update(generation=generation, rank=rank, places=places)
        return frame

    def role_of(self, attempt: str) -> tuple[str, str] | None:
        """Run and role of an attempt whose end is kept."""
        return self._roles.get(attempt)

    def run_ended(self, run: str) -> None:
        """Nobody of this run comes any more."""
        for key in [key for key in self._ends if key[0] == run]:
            self._num_left.pop(key, None)
            for attempt in self._ends.pop(key):
                del self._roles[attempt]

    def to_state(self) -> list[list[Any]]:
        """For a successor program."""
        return [[run, role, list(ends.values())] for (run, role), ends in self._ends.items()]

    def take_state(self, state: list[list[Any]]) -> None:
        """Go on with the predecessor's."""
        for run, role, frames in state:
            for frame in frames:
                self.remember(run, role, frame, lambda: 0)


def oldest_generation(attempt: Attempt) -> int:
    """The oldest generation in which the process may still believe itself."""
    return int(attempt.places[0][0]) if attempt.places else attempt.generation


def frame_of(attempt: Attempt) -> Message:
    """What peers are told of an end."""
    code, number = attempt.status
    if attempt.has_failed_to_start and number is None:
        code = code or 127  # it never ran: that is no end to be content with
    return {
        "type": "peer",
        "attempt": attempt.attempt,
        "rank": attempt.rank,
        "index": attempt.index,
        "generation": attempt.generation,
        "places": list(attempt.places),
        "code": code,
        "signal": number,
    }
