"""One save or load of a group, as one of its members takes part in it: what they agree on in it, and that a member has no part in it.

All members count what they are asked for, also what they then refuse. So a turn has the same number everywhere without a word, and what is said in one is
never taken for the next one's. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from argosy.checkpoint.boards import Group, PartnerRefused, error_of, failure_of


class Turn:
    """Made when a save or a load is asked for, before anything can go wrong."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._number = group.next_number()
        self._rounds = 0

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
            self.check_refused,
            more_seconds=more_seconds,
        )

    @contextmanager
    def telling(self) -> Iterator[None]:
        """The others hear of whatever is raised within it."""
        try:
            yield
        except PartnerRefused:
            raise
        except BaseException as failure:
            self.refuse(failure)
            raise

    def refuse(self, failure: BaseException) -> None:
        """Tell the others, as soon as they are met, that this member has no part in the turn; they may come to it long after this."""
        self._group.tell(self._key, msgspec.json.encode(failure_of(self._group, failure)))

    def check_refused(self, missing: Sequence[int] = ()) -> None:
        """PartnerRefused when a member has refused the turn."""
        del missing
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
