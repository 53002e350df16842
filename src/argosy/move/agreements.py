"""Before a call moves anything between hosts, all ranks of all of them must have made the same one.

Inside a host the route compares; then the leaders gather a descriptor of fixed size, and the texts of calls only when descriptors differ.
Everybody gets the same verdict, so everybody leaves with `MismatchError` or nobody does, and the group stays usable. Called by
hostroute.py at the start of every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct

import torch

from argosy.errors import ArgosyError, MismatchError
from argosy.move import torchgroup, verdicts
from argosy.move.calls import Call, Kind
from argosy.move.hosts import Host
from argosy.move.leaders import Failed, Leaders

_DESCRIPTOR = struct.Struct("<QQdQ")
_TEXT_BYTES = 3072
_GRACE_SECONDS = 1.0


class Agreement:
    """One process's part in agreeing; `leaders` is None on all but the first rank of a host."""

    def __init__(
        self,
        host: Host,
        birth: torchgroup.Birth,
        whole: torchgroup.Gloo,
        leaders: Leaders | None,
    ) -> None:
        self._host = host
        self._inside = host.route
        self._rank, self._size, self._group = birth.rank, birth.size, birth.name
        self._ranks = birth.ranks
        self._whole = whole
        self._leaders = leaders

    def reach(self, call: Call, timeout_seconds: float, patience_seconds: float) -> None:
        """Return when all ranks have made this call; `patience_seconds` is how long to wait for the leader's word."""
        try:
            self._meet_inside(call, timeout_seconds)
        except MismatchError as torn:
            if self._leaders is not None:
                # The other hosts may be on their way into something else, or never come: this error is the one to see.
                with contextlib.suppress(ArgosyError, Failed):
                    self._compare(self._leaders, call, torn, timeout_seconds)
            raise
        theirs = ""
        if self._leaders is not None:
            theirs = self._compare(self._leaders, call, None, timeout_seconds)
        theirs = self._told_inside(call, theirs, patience_seconds)
        if theirs:
            raise self._mismatch(call, theirs)
        if call.kind is Kind.ALL_TO_ALL:
            self._check_sizes(call)

    def _meet_inside(self, call: Call, timeout_seconds: float) -> None:
        said = dataclasses.replace(call, is_beneath=call.kind is not Kind.MEET)
        self._inside.run(said, timeout_seconds)

    def _compare(
        self, leaders: Leaders, call: Call, torn: MismatchError | None, timeout_seconds: float
    ) -> str:
        """What another host's ranks have called, when it is not the same; all leaders decide alike."""
        own = _DESCRIPTOR.pack(call.what(), call.count, call.factor, torn is not None)
        # A host that waits for one of its ranks finds out first, and says which.
        seconds = timeout_seconds + _GRACE_SECONDS
        said = [_unpacked(one) for one in leaders.gather(_packed(own, len(own)), seconds)]
        if torn is None and all(one == own for one in said):
            return ""
        text = self._line(self._rank, verdicts.told(call))
        if torn is not None:
            text = "\n".join(torn.what.splitlines()[1:])
        given = _packed(text.encode(), _TEXT_BYTES)
        texts = [_unpacked(one) for one in leaders.gather(given, timeout_seconds)]
        # Descriptors that differ from the own one, or whose own ranks differ.
        other = next((index for index, one in enumerate(said) if one != own), 0)
        return texts[other].rstrip(b"\0").decode(errors="replace")

    def _told_inside(self, call: Call, theirs: str, patience_seconds: float) -> str:
        """The leader's finding, on all ranks of its host."""
        if len(self._host.ranks) == 1:
            return theirs
        data = theirs.encode()[:_TEXT_BYTES]
        length = torch.tensor([len(data)])
        self._spread(call, length, patience_seconds)
        if not length.item():
            return ""
        text = _packed(data, int(length.item()))
        self._spread(call, text, patience_seconds)
        return _unpacked(text).decode(errors="replace")

    def _spread(self, call: Call, tensor: torch.Tensor, patience_seconds: float) -> None:
        inner = Call(Kind.BROADCAST, tensor.dtype, tensor.numel(), [tensor], [tensor])
        inner.label = str(call)
        self._inside.run(inner, patience_seconds)

    def _check_sizes(self, call: Call) -> None:
        """What each rank takes must be what the others send to it. All ranks are in the same call by now: Gloo can ask them all."""
        sizes = [tensor.nbytes for tensor in (*call.inputs, *call.outputs)]
        mine = torch.tensor(sizes)
        tables = [torch.empty_like(mine) for _ in range(self._size)]
        self._whole.allgather([tables], [mine]).wait()
        rows: list[list[int]] = [table.tolist() for table in tables]
        wrong = [
            (sender, taker)
            for taker in range(self._size)
            for sender in range(self._size)
            if rows[sender][taker] != rows[taker][self._size + sender]
        ]
        if not wrong:
            return
        given = _packed(verdicts.told(call).encode(), _TEXT_BYTES)
        texts = [torch.empty_like(given) for _ in range(self._size)]
        self._whole.allgather([texts], [given]).wait()
        sender, taker = wrong[0]
        other = taker if sender == self._rank else sender
        theirs = _unpacked(texts[other]).rstrip(b"\0").decode(errors="replace")
        raise self._mismatch(call, self._line(other, theirs))

    def _mismatch(self, call: Call, theirs: str) -> MismatchError:
        mine = self._line(self._rank, verdicts.told(call))
        return verdicts.mismatch(self._group, mine, theirs)

    def _line(self, rank: int, told: str) -> str:
        return f"    rank {self._ranks[rank]}: {told}"


def _packed(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _unpacked(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
