"""Collectives inside a host without native code: the epochs of native/collectives.h with torch operations and futexes.

Made by hosts.py where a rank has no native code; all ranks of the group then take this path. Same order of additions, same errors; only
slower. Here are the reductions; torchcopies.py has what only copies. Not safe for two threads at once: works.py gives calls their turn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from argosy.errors import ArgosyError
from argosy.move import kernels, torchcopies, verdicts
from argosy.move.calls import REDUCING, Call, Kind, Operation
from argosy.move.torchcopies import move
from argosy.move.torchepochs import ALIGNMENT, Epochs, Step

_SMALL_BYTES = 64 << 10
"""Up to here every rank reduces everything by itself: one meeting."""
# What one torch operation does exactly as the kernels do; the rest goes through kernels.reduce.
_FOLDS: dict[Operation, Callable[..., torch.Tensor]] = {
    Operation.SUM: torch.add,
    Operation.AVG: torch.add,
    Operation.MIN: torch.minimum,
    Operation.MAX: torch.maximum,
    Operation.PRODUCT: torch.mul,
}
_HALVES = (torch.bfloat16, torch.float16)


class TorchRoute:
    """One process's side of a segment, in Python."""

    def __init__(self, place: verdicts.Place, pidfds: list[int], *, spin_seconds: float) -> None:
        self.place = place
        self._epochs = Epochs(place, pidfds, spin_seconds=spin_seconds)
        self._size, self._rank = self._epochs.size, self._epochs.rank
        self._stage_bytes = self._epochs.stage_bytes

    def run(self, call: Call, timeout_seconds: float) -> None:
        """Carry out one call; raises PeerLost, TimedOut or MismatchError."""
        try:
            self._carry_out(self._epochs.begin(call, timeout_seconds))
        except ArgosyError:
            raise  # everybody has it, or the same verdict
        except BaseException:
            self.abort()  # a signal's handler has raised: this rank leaves in the middle of a call
            raise

    def _carry_out(self, step: Step) -> None:
        if step.call.is_beneath or step.call.kind is Kind.MEET:
            self._epochs.meet(step, is_first=True)
        elif step.call.kind is Kind.ALL_TO_ALL:
            torchcopies.all_to_all(self._epochs, step)
        elif step.call.kind in REDUCING:
            with torch.inference_mode():
                self._reduction(step)
        else:
            torchcopies.copy(self._epochs, step)

    def abort(self) -> None:
        """Make every rank leave what it waits for."""
        self._epochs.abort()

    def close(self) -> None:
        """Let go of the segment's memory."""
        self._epochs.close()

    def _reduction(self, step: Step) -> None:
        given = [tensor.view(-1) for tensor in step.call.inputs]
        out = step.call.outputs[0].view(-1) if step.call.outputs else given[0]
        if step.call.kind is Kind.ALL_REDUCE:
            self._all_reduce(step, given[0], out)
        elif step.call.kind is Kind.REDUCE_SCATTER:
            self._reduce_scatter(step, given, out)
        else:
            self._reduce(step, given[0], out)

    def _put(self, offset: int, piece: torch.Tensor) -> None:
        """Into the own slot, for the others."""
        move(self._epochs.address_now(self._rank) + offset, piece.data_ptr(), piece.nbytes)

    def _read(self, rank: int, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self._epochs.theirs(rank)[offset : offset + num_bytes].view(dtype)

    def _fold(self, call: Call, out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        """Into `out`, which is none of the inputs, in rank order."""
        if out.numel() == 0:
            return
        if out.dtype in _HALVES or call.operation not in _FOLDS:
            kernels.reduce(out, inputs, call.operation.name.lower(), call.factor)
            return
        fold = _FOLDS[call.operation]
        fold(inputs[0], inputs[1], out=out)
        for tensor in inputs[2:]:
            fold(out, tensor, out=out)
        if call.operation is Operation.AVG:
            out.div_(len(inputs))

    def _inputs_at(self, own: torch.Tensor, offset: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            own if rank == self._rank else self._read(rank, offset, own.nbytes, dtype)
            for rank in range(self._size)
        ]

    def _all_reduce(self, step: Step, given: torch.Tensor, out: torch.Tensor) -> None:
        call = step.call
        element = call.dtype.itemsize
        if call.num_bytes <= min(_SMALL_BYTES, self._stage_bytes):
            self._put(0, given)
            self._epochs.meet(step, is_first=True)
            self._fold_apart(call, out, self._inputs_at(given, 0, call.dtype))
            return
        line = ALIGNMENT // element * self._size
        chunk = self._stage_bytes // element // line * line
        cuts = _cuts(call.count, chunk)
        for index in range(len(cuts) + 2):
            if index < len(cuts):
                start, end = cuts[index]
                self._stage(given[start:end])
            if 1 <= index <= len(cuts):
                start, end = cuts[index - 1]
                self._reduce_own(call, given[start:end], out[start:end])
            if index >= 2:
                start, end = cuts[index - 2]
                self._copy_out(out[start:end])
            if index <= len(cuts):
                self._epochs.meet(step, is_first=index == 0)

    def _slices(self, length: int, element: int) -> list[tuple[int, int]]:
        line = ALIGNMENT // element
        share = -(-length // self._size)
        share = -(-share // line) * line
        return [
            (min(length, rank * share), min(length, (rank + 1) * share))
            for rank in range(self._size)
        ]

    def _stage(self, piece: torch.Tensor) -> None:
        """All but the own slice."""
        first, last = self._slices(piece.numel(), piece.itemsize)[self._rank]
        self._put(0, piece[:first])
        self._put(last * piece.itemsize, piece[last:])

    def _reduce_own(self, call: Call, given: torch.Tensor, out: torch.Tensor) -> None:
        first, last = self._slices(given.numel(), given.itemsize)[self._rank]
        own = given[first:last]
        result = self._epochs.mine()[self._stage_bytes :][: own.nbytes].view(own.dtype)
        self._fold(call, result, self._inputs_at(own, first * own.itemsize, own.dtype))
        _copy(out[first:last], result)

    def _copy_out(self, out: torch.Tensor) -> None:
        for rank, (first, last) in enumerate(self._slices(out.numel(), out.itemsize)):
            if rank != self._rank:
                size = (last - first) * out.itemsize
                reduced = self._epochs.address_before(rank) + self._stage_bytes
                move(out.data_ptr() + first * out.itemsize, reduced, size)

    def _reduce_scatter(self, step: Step, given: list[torch.Tensor], out: torch.Tensor) -> None:
        call, share = step.call, self._epochs.share_bytes
        cuts = _cuts(call.count, share // call.dtype.itemsize)
        for index in range(len(cuts) + 1):
            if index < len(cuts):
                start, end = cuts[index]
                for rank, tensor in enumerate(given):
                    if rank != self._rank:
                        self._put(rank * share, tensor[start:end])
            if index > 0:
                start, end = cuts[index - 1]
                own = given[self._rank][start:end]
                inputs = self._inputs_at(own, self._rank * share, call.dtype)
                self._fold_apart(call, out[start:end], inputs)
            if index < len(cuts):
                self._epochs.meet(step, is_first=index == 0)

    def _fold_apart(self, call: Call, out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        """As `_fold`, for an output that may be the own input: then the end of the own slot takes the result first.

        Others may be in the next call by then: no call writes to the end of another rank's slot.
        """
        if all(out.data_ptr() != tensor.data_ptr() for tensor in inputs):
            self._fold(call, out, inputs)
            return
        scratch = self._epochs.mine()[self._stage_bytes :]
        step = scratch.numel() // out.itemsize
        for start in range(0, out.numel(), step):
            part = slice(start, min(out.numel(), start + step))
            room = scratch[: (part.stop - start) * out.itemsize].view(out.dtype)
            self._fold(call, room, [tensor[part] for tensor in inputs])
            _copy(out[part], room)

    def _reduce(self, step: Step, given: torch.Tensor, out: torch.Tensor) -> None:
        call, is_root = step.call, self._rank == step.call.root
        cuts = _cuts(call.count, self._stage_bytes // call.dtype.itemsize)
        for index in range(len(cuts) + 1):
            if index < len(cuts) and not is_root:
                start, end = cuts[index]
                self._put(0, given[start:end])
            if index > 0 and is_root:
                start, end = cuts[index - 1]
                own = given[start:end]
                inputs = self._inputs_at(own, 0, call.dtype)
                self._fold_apart(call, out[start:end], inputs)
            if index < len(cuts):
                self._epochs.meet(step, is_first=index == 0)


def _cuts(count: int, chunk: int) -> list[tuple[int, int]]:
    """Start and end of each chunk; one empty chunk for nothing, since all must meet."""
    return [(start, min(count, start + chunk)) for start in range(0, count, chunk)] or [(0, 0)]


def _copy(out: torch.Tensor, piece: torch.Tensor) -> None:
    move(out.data_ptr(), piece.data_ptr(), piece.nbytes)
