"""One save or load of a group, as one of its members takes part in it: what they agree on in it, and that a member has no part in it.

All members count what they are asked for, also what they then refuse. So a turn has the same number everywhere without a word, and what is said in one is
never taken for the next one's. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from argosy.checkpoint.absences import Departures
from argosy.checkpoint.boards import (
    Group,
    PartnerFailed,
    PartnerLost,
    PartnerRefused,
    error_of,
    failure_of,
)
from argosy.errors import MismatchError


class OtherStep(MismatchError):
    """Members were asked for different steps."""


class Turn:
    """Made when a save or a load is asked for, before anything can go wrong."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._number = group.next_number()
        self._rounds = 0
        self._departures: Departures | None = None
        self._step: int | None = None

    @property
    def nonce(self) -> str:
        """A name that no other turn of any group has; all members must have met."""
        return f"{self._group.session}-{self._number}"

    def agree(self, mine: bytes, *, more_seconds: float = 0.0) -> list[bytes]:
        """What each member says, by rank; PartnerRefused when one has no part in the turn. `more_seconds`: that another one may have to wait before."""
        self._rounds += 1
        return self._group.exchange(
            f"turn-{self._number}-{self._rounds}",
            mine,
            self.check,
            more_seconds=more_seconds,
        )

    def first_trouble(self, mine: str) -> str:
        """What the first member says that has any trouble; nothing when none has."""
        said = self.agree(mine.encode())
        for rank, text in enumerate(said):
            if text:
                return f"rank {rank}: {text.decode()}" if len(said) > 1 else text.decode()
        return ""

    @contextmanager
    def telling(self) -> Iterator[None]:
        """The others hear of whatever is raised within it."""
        try:
            yield
        except BaseException as failure:
            self.refuse(failure)
            raise

    def refuse(self, failure: BaseException) -> None:
        """Tell the others, as soon as they are met, that this member has no part in the turn; they may come to it long after this.

        A failure of another member is told by that one, unless it has ended.
        """
        if isinstance(failure, PartnerFailed) and not isinstance(failure, PartnerLost):
            return
        self._group.tell(self._key, msgspec.json.encode(failure_of(self._group, failure)))

    def saves(self, step: int) -> None:
        """Say which step is saved: who would save another one is found by `check`."""
        self._step = step
        if self._group.rank == 0:
            self._group.tell(f"step-{self._number}", b"%d" % step)

    def check(self, missing: Sequence[int]) -> None:
        """PartnerRefused when a member has refused the turn, PartnerLost when one that is missing has ended, OtherStep when the first saves another one."""
        self.check_refused()
        told = None if self._step is None else self._group.heard(f"step-{self._number}")
        if told is not None and int(told) != self._step:
            raise OtherStep(
                f"rank {self._group.rank} saves step {self._step}, rank 0 step {int(told)}",
                fix="save the same step on all ranks",
            )
        board = self._group.met().board
        if board is not None:
            self._departures = self._departures or Departures(board)
            self._departures.check(missing)

    def check_refused(self) -> None:
        """PartnerRefused when a member has refused the turn."""
        found = self.refusal()
        if found is not None:
            raise found

    def refusal(self) -> PartnerRefused | None:
        """That a member has refused the turn."""
        data = self._group.heard(self._key)
        return None if data is None else error_of(data, PartnerRefused)

    @property
    def _key(self) -> str:
        return f"refused-{self._number}"
