"""Collectives inside a host without native code: the epochs of native/collectives.h with torch operations and futexes.

Made by hosts.py where a rank has no native code; all ranks of the group then take this path. Same order of additions, same errors; only
slower. Not safe for two threads at once: works.py gives calls their turn.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import torch

from argosy.errors import PeerLost, TimedOut
from argosy.move import kernels, verdicts, waits
from argosy.move.calls import Call, Kind, Operation
from argosy.move.segment import ARRIVED, BROKEN, SAID, stage_bytes
from argosy.native import loader

_SAID = struct.Struct("<QQdQ")
_ALIGNMENT = 64
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


class _Step:
    """Where a call stands, and what it needs to know at each step."""

    def __init__(self, call: Call, timeout_seconds: float) -> None:
        self.call = call
        self.deadline = time.monotonic() + timeout_seconds
        self.inputs = [_flat(tensor) for tensor in call.inputs]
        self.outputs = [_flat(tensor) for tensor in call.outputs]


class TorchRoute:
    """One process's side of a segment, in Python."""

    def __init__(self, place: verdicts.Place, pidfds: list[int], *, spin_seconds: float) -> None:
        self.place = place
        segment = place.segment
        self._size, self._rank = len(place.ranks), place.index
        self._epoch, self._calls = 0, 0
        self._stage_bytes = stage_bytes(segment.slot_bytes, self._size)
        self._share_bytes = self._stage_bytes // self._size // _ALIGNMENT * _ALIGNMENT
        self._slots = [
            [segment.slot(rank, parity) for rank in range(self._size)] for parity in range(2)
        ]
        # Behind what is staged there is room for a reduced slice: in an all-to-all for what each rank sends and takes.
        room = slice(self._stage_bytes, self._stage_bytes + 16 * self._size)
        self._sizes = [
            [slot[room].view(torch.int64).numpy() for slot in row] for row in self._slots
        ]
        self._words = [
            segment.address + segment.rank_page(rank) + ARRIVED for rank in range(self._size)
        ]
        self._peers = waits.Peers(
            pidfds, broken=segment.address + BROKEN, spin_seconds=spin_seconds
        )

    def run(self, call: Call, timeout_seconds: float) -> None:
        """Carry out one call; raises PeerLost, TimedOut or MismatchError."""
        step = _Step(call, timeout_seconds)
        if self.place.segment.word(BROKEN):
            verdicts.raise_for(loader.BROKEN, -1, call, self.place)
        self._say(call)
        with torch.inference_mode():
            if call.is_beneath or call.kind is Kind.MEET:
                self._meet(step, is_first=True)
            elif call.kind is Kind.ALL_REDUCE:
                self._all_reduce(step)
            elif call.kind is Kind.REDUCE_SCATTER:
                self._reduce_scatter(step)
            elif call.kind is Kind.REDUCE:
                self._reduce(step)
            elif call.kind is Kind.ALL_TO_ALL:
                self._all_to_all(step)
            else:
                self._copy(step)

    def abort(self) -> None:
        """Make every rank leave what it waits for."""
        waits.break_off(self._peers, self._rank, verdicts.ABORTED)

    def close(self) -> None:
        """Let go of the segment's memory."""
        self._slots, self._sizes = [], []

    def _say(self, call: Call) -> None:
        self._calls += 1
        at = self.place.segment.rank_page(self._rank) + SAID + 32 * (self._epoch & 1)
        said = _SAID.pack(call.what(), call.count, call.factor, self._calls)
        self.place.segment.memory[at : at + 32] = said

    def _meet(self, step: _Step, *, is_first: bool) -> None:
        """End the epoch: what all ranks wrote in it can be read now."""
        self._epoch += 1
        waits.post(self._words[self._rank], self._epoch)
        for rank, word in enumerate(self._words):
            if rank != self._rank:
                self._wait_for(rank, word, step)
        if is_first:
            self._compare(step.call)

    def _wait_for(self, rank: int, word: int, step: _Step) -> None:
        try:
            waits.wait(word, self._epoch, peers=self._peers, deadline=step.deadline)
        except PeerLost as lost:
            if not self.place.segment.word(BROKEN):
                waits.break_off(self._peers, lost.rank)
        except TimedOut:
            if not self.place.segment.word(BROKEN):
                waits.break_off(self._peers, rank, loader.TIMEOUT)
        except BaseException:
            self.abort()  # a signal's handler has raised: this rank leaves in the middle of a call
            raise
        else:
            return
        verdicts.raise_for(loader.BROKEN, rank, step.call, self.place)

    def _compare(self, call: Call) -> None:
        # No view of the memory may stay in this frame: a kept traceback would keep the mapping.
        segment, parity = self.place.segment, 32 * (self._epoch - 1 & 1)
        said = [
            segment.read(segment.rank_page(rank) + SAID + parity, 24) for rank in range(self._size)
        ]
        for rank, words in enumerate(said):
            if words != said[self._rank]:
                verdicts.raise_for(loader.MISMATCH, rank, call, self.place)

    def _mine(self) -> torch.Tensor:
        return self._slots[self._epoch & 1][self._rank]

    def _theirs(self, rank: int) -> torch.Tensor:
        return self._slots[self._epoch - 1 & 1][rank]

    def _read(self, rank: int, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self._theirs(rank)[offset : offset + num_bytes].view(dtype)

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

    def _all_reduce(self, step: _Step) -> None:
        call, given, out = step.call, step.inputs[0], step.outputs[0]
        element = call.dtype.itemsize
        if call.num_bytes <= min(_SMALL_BYTES, self._stage_bytes):
            _put(self._mine(), 0, given)
            self._meet(step, is_first=True)
            self._fold_apart(call, out, self._inputs_at(given, 0, call.dtype))
            return
        line = _ALIGNMENT // element * self._size
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
                self._meet(step, is_first=index == 0)

    def _slices(self, length: int, element: int) -> list[tuple[int, int]]:
        line = _ALIGNMENT // element
        share = -(-length // self._size)
        share = -(-share // line) * line
        return [
            (min(length, rank * share), min(length, (rank + 1) * share))
            for rank in range(self._size)
        ]

    def _stage(self, piece: torch.Tensor) -> None:
        """All but the own slice."""
        first, last = self._slices(piece.numel(), piece.itemsize)[self._rank]
        room = self._mine()[: piece.nbytes].view(piece.dtype)
        room[:first].copy_(piece[:first])
        room[last:].copy_(piece[last:])

    def _reduce_own(self, call: Call, given: torch.Tensor, out: torch.Tensor) -> None:
        first, last = self._slices(given.numel(), given.itemsize)[self._rank]
        own = given[first:last]
        result = self._mine()[self._stage_bytes :][: own.nbytes].view(own.dtype)
        self._fold(call, result, self._inputs_at(own, first * own.itemsize, own.dtype))
        out[first:last].copy_(result)

    def _copy_out(self, out: torch.Tensor) -> None:
        for rank, (first, last) in enumerate(self._slices(out.numel(), out.itemsize)):
            if rank != self._rank:
                size = (last - first) * out.itemsize
                out[first:last].copy_(self._read(rank, self._stage_bytes, size, out.dtype))

    def _reduce_scatter(self, step: _Step) -> None:
        call, share = step.call, self._share_bytes
        cuts = _cuts(call.count, share // call.dtype.itemsize)
        for index in range(len(cuts) + 1):
            if index < len(cuts):
                start, end = cuts[index]
                for rank, given in enumerate(step.inputs):
                    if rank != self._rank:
                        _put(self._mine(), rank * share, given[start:end])
            if index > 0:
                start, end = cuts[index - 1]
                own = step.inputs[self._rank][start:end]
                inputs = self._inputs_at(own, self._rank * share, call.dtype)
                self._fold_apart(call, step.outputs[0][start:end], inputs)
            if index < len(cuts):
                self._meet(step, is_first=index == 0)

    def _fold_apart(self, call: Call, out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        """As `_fold`, for an output that may be the own input: then the end of the own slot takes the result first."""
        if all(out.data_ptr() != tensor.data_ptr() for tensor in inputs):
            self._fold(call, out, inputs)
            return
        scratch = self._mine()[self._stage_bytes :]
        step = scratch.numel() // out.itemsize
        for start in range(0, out.numel(), step):
            part = slice(start, min(out.numel(), start + step))
            room = scratch[: (part.stop - start) * out.itemsize].view(out.dtype)
            self._fold(call, room, [tensor[part] for tensor in inputs])
            out[part].copy_(room)

    def _reduce(self, step: _Step) -> None:
        call, is_root = step.call, self._rank == step.call.root
        cuts = _cuts(call.count, self._stage_bytes // call.dtype.itemsize)
        for index in range(len(cuts) + 1):
            if index < len(cuts) and not is_root:
                start, end = cuts[index]
                _put(self._mine(), 0, step.inputs[0][start:end])
            if index > 0 and is_root:
                start, end = cuts[index - 1]
                own = step.inputs[0][start:end]
                inputs = self._inputs_at(own, 0, call.dtype)
                self._fold_apart(call, step.outputs[0][start:end], inputs)
            if index < len(cuts):
                self._meet(step, is_first=index == 0)

    def _copy(self, step: _Step) -> None:
        """All-gather, gather, broadcast and scatter."""
        call = step.call
        cuts = _cuts(call.count, self._stage_bytes // call.dtype.itemsize)
        for index in range(len(cuts) + 1):
            if index < len(cuts):
                self._stage_copy(step, *cuts[index])
            if index > 0:
                self._finish_copy(step, *cuts[index - 1])
            if index < len(cuts):
                self._meet(step, is_first=index == 0)

    def _stage_copy(self, step: _Step, start: int, end: int) -> None:
        kind, is_root = step.call.kind, self._rank == step.call.root
        if kind is Kind.ALL_GATHER or (
            (kind is Kind.GATHER) != is_root and kind is not Kind.SCATTER
        ):
            _put(self._mine(), 0, step.inputs[0][start:end])
        elif kind is Kind.SCATTER and is_root:
            for rank, given in enumerate(step.inputs):
                if rank != self._rank:
                    _put(self._slots[self._epoch & 1][rank], 0, given[start:end])

    def _finish_copy(self, step: _Step, start: int, end: int) -> None:
        call, is_root = step.call, self._rank == step.call.root
        num_bytes = (end - start) * call.dtype.itemsize
        if call.kind is Kind.ALL_GATHER or (call.kind is Kind.GATHER and is_root):
            for rank, out in enumerate(step.outputs):
                piece = step.inputs[0][start:end]
                if rank != self._rank:
                    piece = self._read(rank, 0, num_bytes, call.dtype)
                _copy_to(out[start:end], piece)
        elif call.kind is Kind.BROADCAST and not is_root:
            _copy_to(step.outputs[0][start:end], self._read(call.root, 0, num_bytes, call.dtype))
        elif call.kind is Kind.SCATTER:
            if is_root:
                piece = step.inputs[self._rank][start:end]
            else:
                piece = self._read(self._rank, 0, num_bytes, call.dtype)
            _copy_to(step.outputs[0][start:end], piece)

    def _all_to_all(self, step: _Step) -> None:
        """The first chunk travels with the sizes: all then know the number of chunks, and judge alike whether sizes agree."""
        share, num_chunks, index = self._share_bytes, 1, 0
        inputs = [tensor.view(torch.uint8) for tensor in step.inputs]
        outputs = [tensor.view(torch.uint8) for tensor in step.outputs]
        sizes = [tensor.nbytes for tensor in (*inputs, *outputs)]
        self._sizes[self._epoch & 1][self._rank][:] = sizes
        while index <= num_chunks:
            now = slice(index * share, (index + 1) * share)
            before = slice((index - 1) * share, index * share)
            for rank in range(self._size):
                if index < num_chunks and rank != self._rank:
                    _put(self._mine(), rank * share, inputs[rank][now])
                if index == 0:
                    continue
                out = outputs[rank][before]
                piece = inputs[rank][before]
                if rank != self._rank:
                    piece = self._read(rank, self._rank * share, out.nbytes, torch.uint8)
                _copy_to(out, piece)
            if index < num_chunks:
                self._meet(step, is_first=index == 0)
            if index == 0:
                num_chunks = max(1, -(-self._largest_part(step) // share))
            index += 1

    def _largest_part(self, step: _Step) -> int:
        """Bytes of the largest message, when what each rank takes is what the others send to it."""
        tables: list[list[int]] = [sizes.tolist() for sizes in self._sizes[self._epoch - 1 & 1]]
        for taker in range(self._size):
            for sender in range(self._size):
                if tables[sender][taker] != tables[taker][self._size + sender]:
                    other = taker if sender == self._rank else sender
                    verdicts.raise_for(loader.MISMATCH, other, step.call, self.place)
        return max(max(table) for table in tables)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)


def _cuts(count: int, chunk: int) -> list[tuple[int, int]]:
    """Start and end of each chunk; one empty chunk for nothing, since all must meet."""
    return [(start, min(count, start + chunk)) for start in range(0, count, chunk)] or [(0, 0)]


def _put(slot: torch.Tensor, offset: int, piece: torch.Tensor) -> None:
    slot[offset : offset + piece.nbytes].view(piece.dtype).copy_(piece)


def _copy_to(out: torch.Tensor, piece: torch.Tensor) -> None:
    if out.data_ptr() != piece.data_ptr():
        out.copy_(piece)
