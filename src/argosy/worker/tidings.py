"""What the runtime has told a member of a gang: who has ended, and its place in the generation that comes next. Pure.

Frames go in (`note`), in the order of the link; what they mean for the present generation comes out. An end may be told before the generation that it
belongs to is taken, and of a member that never took its place. Used by gang.py, under its lock, and by the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Frame = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """A place in a generation that was told and not yet taken."""

    generation: int
    rank: int
    world_size: int


class Tidings:
    """Everything told that still matters to one process."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        """The one that this process has taken its place in."""
        self.told: Frame | None = None
        """The newest generation told and not yet taken."""
        self.lost: frozenset[int] = frozenset()
        """The ended ranks of this generation: replaced as a whole, so that it is read without a lock."""
        self.death: Frame | None = None
        """The first member of this generation that was heard to have died."""
        self._ends: dict[int, dict[int, Frame]] = {}
        """What was told of ended members, by generation and rank; of this generation and newer ones."""

    def note(self, frame: Frame) -> bool:
        """Remember what the frame means for this process; False if it changes nothing."""
        if frame.get("type") == "peer":
            return self._note_end(frame)
        message = frame.get("message")
        if frame.get("type") != "told" or not isinstance(message, Mapping):
            return False
        if message.get("tell") != "reform":
            return False
        newest = self.told["generation"] if self.told else self.generation
        if int(message.get("generation", 0)) <= newest:
            return False
        self.told = message
        return True

    def coming(self) -> Place | None:
        """The place in the newest generation that was told and not yet taken."""
        told = self.told
        if told is None:
            return None
        return Place(int(told["generation"]), int(told["rank"]), int(told["world_size"]))

    def lost_in(self, generation: int) -> frozenset[int]:
        """Ended ranks of this generation or a newer one: some may have ended before they could take their place in it."""
        return frozenset(self._ends.get(generation, ()))

    def take(self) -> Frame | None:
        """Take the place that `coming()` shows; what was told of it, None when there is none."""
        told, self.told = self.told, None
        if told is not None:
            self.generation = int(told["generation"])
            self._ends = {g: ends for g, ends in self._ends.items() if g >= self.generation}
            self._review()
        return told

    def _note_end(self, frame: Frame) -> bool:
        # It may have been told a newer generation than this process has taken: its older places count here.
        places = [(frame.get("generation", 0), frame.get("rank"))]
        places += [(place[0], place[1]) for place in frame.get("places") or ()]
        for generation, rank in places:
            if rank is not None and int(generation) >= self.generation:
                ends = self._ends.setdefault(int(generation), {})
                if _is_death(frame) or int(rank) not in ends:
                    ends[int(rank)] = {**frame, "rank": int(rank)}
        before = (self.lost, self.death is None)
        self._review()
        return before != (self.lost, self.death is None)

    def _review(self) -> None:
        """What the ends that were told mean for the present generation."""
        ends = self._ends.get(self.generation, {})
        self.lost = frozenset(ends)
        self.death = next((end for end in ends.values() if _is_death(end)), None)


def _is_death(end: Frame) -> bool:
    """One that ended well has finished its work: that is for the runtime to judge."""
    return bool(end.get("signal")) or end.get("code") not in (0, None)
