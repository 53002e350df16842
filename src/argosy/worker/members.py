"""The members of a household: one start of each rank, their generations and places, and the frames that tell of both. Pure.

Owned by upkeep.py, which decides what follows from what happens to them; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_MOST_PLACES = 16


@dataclass
class Exit:
    """How a process ended, as its parent saw it."""

    code: int | None
    signal: int | None
    error: str = ""
    """Its traceback or message, if it left one."""
    is_refusal: bool = False
    """The program said that its input is wrong: another start would say the same."""

    @property
    def is_well(self) -> bool:
        """Whether it ended as it should."""
        return self.code == 0

    @property
    def shell_code(self) -> int:
        """The code that a shell shows for it."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def describe(self) -> str:
        """In a few words."""
        lines = [line for line in self.error.strip().splitlines() if not line.startswith(" ")]
        last = f": {lines[-1]}" if lines else ""
        if self.signal is not None:
            return f"was killed by signal {self.signal}{last}"
        return f"exited with code {self.code}{last}"


@dataclass
class Member:
    """One start of one rank."""

    attempt: str
    rank: int
    generation: int
    started_at: float = 0.0
    places: dict[int, int] = field(default_factory=dict)
    """Its rank in each of the newest generations that it was a member of."""
    exit: Exit | None = None
    has_joined: bool = False
    has_entered: bool = False
    """Its trainer takes part: its peers see whether it hangs."""
    has_progressed: bool = False
    killed_for: str = ""
    """Why the household itself killed it: `hang`, `late`, or `others` when it could not stay without them."""
    is_saver: bool = False

    @property
    def has_ended_well(self) -> bool:
        """Whether it has ended as it should."""
        return self.exit is not None and self.exit.is_well

    @property
    def has_failed(self) -> bool:
        """Whether it has ended otherwise."""
        return self.exit is not None and not self.exit.is_well

    def peer_frame(self) -> dict[str, Any]:
        """Tells the others of its end."""
        assert self.exit is not None
        return {
            "type": "peer",
            "attempt": self.attempt,
            "rank": self.rank,
            "index": self.rank,
            "generation": self.generation,
            "places": [[generation, rank] for generation, rank in self.places.items()],
            "code": self.exit.code,
            "signal": self.exit.signal,
        }


class Members:
    """The newest start of each rank."""

    def __init__(self, num_ranks: int, run: str) -> None:
        self.num_ranks = num_ranks
        self.run = run
        self.generation = 0
        self._newest: dict[int, Member] = {}
        self._num_starts = 0

    def __iter__(self) -> Iterator[Member]:
        return iter(self._newest.values())

    def __getitem__(self, rank: int) -> Member:
        return self._newest[rank]

    def find(self, attempt: str) -> Member | None:
        """The member of this name, if it is the newest start of its rank."""
        return next((member for member in self if member.attempt == attempt), None)

    def living(self) -> list[Member]:
        """Those that have not ended."""
        return [member for member in self if member.exit is None]

    def form(self, at: float) -> tuple[list[Member], list[Member]]:
        """The next generation: survivors get a place in it, all other places a new member; both, by rank."""
        self.generation += 1
        survivors = self.living()
        for member in survivors:
            member.generation = self.generation
            member.places[self.generation] = member.rank
            if len(member.places) > _MOST_PLACES:
                del member.places[min(member.places)]
        staying = {member.rank for member in survivors}
        free = [rank for rank in range(self.num_ranks) if rank not in staying]
        return survivors, [self._enroll(rank, at) for rank in free]

    def form_of_saver(self, at: float) -> Member:
        """The next generation is one member, alone."""
        self.generation += 1
        new = self._enroll(0, at)
        new.is_saver = True
        return new

    def reform_frame(self, member: Member) -> dict[str, Any]:
        """Tells a member its place in the present generation."""
        place = {"generation": member.generation, "rank": member.rank, "world_size": self.num_ranks}
        return {"type": "told", "message": {"tell": "reform", **place}}

    def welcome_frames(self, member: Member) -> list[dict[str, Any]]:
        """What was told to others before this one could hear it."""
        frames = [other.peer_frame() for other in self if other.exit is not None]
        if member.generation > min(member.places):
            frames.append(self.reform_frame(member))
        return frames

    def _enroll(self, rank: int, at: float) -> Member:
        """A new process for a rank of the present generation."""
        self._num_starts += 1
        attempt = f"{self.run}-{rank}-{self._num_starts}"
        self._newest[rank] = Member(attempt, rank, self.generation, at, {self.generation: rank})
        return self._newest[rank]
