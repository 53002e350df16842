"""The collectives that only copy, without native code: bytes from address to address, a chunk at a time, one meeting per chunk.

Called by torchroute.py. The C library's memmove is called without the GIL and costs a tenth of what slices and views of tensors cost
to make. Outputs are written only after the first meeting has found that all ranks call the same.
"""

from __future__ import annotations

import ctypes

from argosy.move import verdicts
from argosy.move.calls import Kind
from argosy.move.torchepochs import SIZES_BYTES, Epochs, Step
from argosy.native import loader


def copy(epochs: Epochs, step: Step) -> None:
    """All-gather, gather, broadcast and scatter."""
    # The root of a scatter writes into slots of ranks that may still be in the call before, and add up at the ends of their slots.
    is_scatter = step.call.kind is Kind.SCATTER
    chunk = epochs.stage_bytes if is_scatter else epochs.slot_bytes
    total = step.call.num_bytes
    num_chunks = max(1, -(-total // chunk))
    work = _Copy(epochs, step)
    for index in range(num_chunks + 1):
        at = index * chunk
        if index < num_chunks:
            work.stage(at, min(chunk, total - at))
        if index > 0:
            work.finish(at - chunk, min(chunk, total - at + chunk))
        if index < num_chunks:
            epochs.meet(step, is_first=index == 0)


class _Copy:
    """Who copies what of a chunk, in one call."""

    def __init__(self, epochs: Epochs, step: Step) -> None:
        call = step.call
        self._epochs = epochs
        self._root, self._kind = call.root, call.kind
        self._inputs = [tensor.data_ptr() for tensor in call.inputs]
        self._outputs = [tensor.data_ptr() for tensor in call.outputs]
        is_root = epochs.rank == call.root
        self._stages = (
            call.kind is Kind.ALL_GATHER
            or (call.kind is Kind.GATHER and not is_root)
            or (call.kind is Kind.BROADCAST and is_root)
        )
        self._collects = call.kind is Kind.ALL_GATHER or (call.kind is Kind.GATHER and is_root)
        self._is_root = is_root

    def stage(self, at: int, num_bytes: int) -> None:
        """Put what the others need of a chunk into slots."""
        epochs = self._epochs
        if self._stages:
            move(epochs.address_now(epochs.rank), self._inputs[0] + at, num_bytes)
        elif self._kind is Kind.SCATTER and self._is_root:
            # Nobody else writes in a scatter: the root may use everybody's slots, but for their ends.
            for rank, given in enumerate(self._inputs):
                if rank != epochs.rank:
                    move(epochs.address_now(rank), given + at, num_bytes)

    def finish(self, at: int, num_bytes: int) -> None:
        """Take what the others have staged of a chunk."""
        epochs = self._epochs
        if self._collects:
            # The own part first: the input may be another rank's output.
            for turn in range(epochs.size):
                rank = (epochs.rank + turn) % epochs.size
                is_own, out = turn == 0, self._outputs[rank]
                given = self._inputs[0] + at if is_own else epochs.address_before(rank)
                move(out + at, given, num_bytes)
        elif self._kind is Kind.BROADCAST and not self._is_root:
            move(self._outputs[0] + at, epochs.address_before(self._root), num_bytes)
        elif self._kind is Kind.SCATTER:
            own = self._inputs[epochs.rank] + at if self._is_root else None
            given = epochs.address_before(epochs.rank) if own is None else own
            move(self._outputs[0] + at, given, num_bytes)


def all_to_all(epochs: Epochs, step: Step) -> None:
    """The first chunk travels with the sizes: all then know the number of chunks, and judge alike whether sizes agree."""
    call, chunk = step.call, epochs.message_bytes
    inputs = [(tensor.data_ptr(), tensor.nbytes) for tensor in call.inputs]
    outputs = [(tensor.data_ptr(), tensor.nbytes) for tensor in call.outputs]
    _tell_sizes(epochs, [size for _, size in (*inputs, *outputs)])
    num_chunks, index = 1, 0
    while index <= num_chunks:
        now, before = index * chunk, (index - 1) * chunk
        for rank in range(epochs.size):
            given, num_bytes = inputs[rank]
            if index < num_chunks and rank != epochs.rank:
                to = epochs.address_now(epochs.rank) + _place(epochs.rank, rank) * chunk
                move(to, given + now, min(chunk, num_bytes - now))
            if index > 0:
                out, num_bytes = outputs[rank]
                theirs = epochs.address_before(rank) + _place(rank, epochs.rank) * chunk
                source = given + before if rank == epochs.rank else theirs
                move(out + before, source, min(chunk, num_bytes - before))
        if index < num_chunks:
            epochs.meet(step, is_first=index == 0)
        if index == 0:
            num_chunks = max(1, -(-_largest_part(epochs, step) // chunk))
        index += 1


def move(to: int, source: int, num_bytes: int) -> None:
    """Copy bytes; nothing for a length below one, or in place."""
    if num_bytes > 0 and to != source:
        ctypes.memmove(to, source, num_bytes)


def _place(sender: int, taker: int) -> int:
    """Of a message in its sender's slot, which has none for itself."""
    return taker - (taker > sender)


def _tell_sizes(epochs: Epochs, sizes: list[int]) -> None:
    told = (ctypes.c_int64 * len(sizes))(*sizes)
    room = epochs.address_now(epochs.rank) + epochs.slot_bytes - SIZES_BYTES
    move(room, ctypes.addressof(told), ctypes.sizeof(told))


def _told_sizes(epochs: Epochs, rank: int) -> list[int]:
    room = epochs.address_before(rank) + epochs.slot_bytes - SIZES_BYTES
    return (ctypes.c_int64 * (2 * epochs.size)).from_address(room)[:]


def _largest_part(epochs: Epochs, step: Step) -> int:
    """Bytes of the largest message, when what each rank takes is what the others send to it."""
    tables = [_told_sizes(epochs, rank) for rank in range(epochs.size)]
    for taker in range(epochs.size):
        for sender in range(epochs.size):
            if tables[sender][taker] != tables[taker][epochs.size + sender]:
                other = taker if sender == epochs.rank else sender
                verdicts.raise_for(loader.MISMATCH, other, step.call, epochs.place)
    return max(max(table) for table in tables)
