"""Collectives inside a host by native code: one C call per collective, without the GIL.

Made by hosts.py once all ranks have agreed on the native path. Not safe for two threads at once: works.py gives calls their turn.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from argosy.errors import InvariantError
from argosy.move import counters, verdicts
from argosy.move.calls import DTYPE_CODES, Call, Kind
from argosy.move.segment import (
    AGAIN,
    BROKEN,
    REASON_SHIFT,
    CallStruct,
    GroupStruct,
    library,
    stage_bytes,
)

_SMALL_BYTES = 256 << 10


class NativeRoute:
    """The native side of one process in one segment."""

    def __init__(self, place: verdicts.Place, pidfds: list[int], *, spin_seconds: float) -> None:
        opened = library()
        if opened is None:
            raise InvariantError("a native route without native code")
        self._library = opened
        self.place = place
        segment, size = place.segment, len(place.ranks)
        self._pidfds = (ctypes.c_int32 * size)(*pidfds)
        group = GroupStruct(segment=segment.address, rank=place.index, size=size)
        group.stage_bytes = stage_bytes(segment.slot_bytes, size)
        group.chunk_bytes = group.stage_bytes
        group.small_bytes = min(_SMALL_BYTES, group.stage_bytes)
        group.spin_ns = int(spin_seconds * 1e9)
        group.peers.count, group.peers.lost = size, -1
        group.peers.pidfds = ctypes.addressof(self._pidfds)
        group.peers.broken = segment.address + BROKEN
        self._group = group
        self._group_address = ctypes.addressof(group)

    def run(self, call: Call, timeout_seconds: float) -> None:
        """Carry out one call; raises PeerLost, TimedOut or MismatchError."""
        segment_call = CallStruct(
            Kind.MEET if call.is_beneath else call.kind,
            DTYPE_CODES[call.dtype],
            call.operation,
            call.root,
            call.what(),
            call.count,
            call.dtype.itemsize,
            call.factor,
            time.monotonic_ns() + int(timeout_seconds * 1e9),
        )
        kept: list[Any] = []
        if call.inputs and not call.is_beneath:
            inputs = (ctypes.c_void_p * len(call.inputs))(*[t.data_ptr() for t in call.inputs])
            segment_call.inputs = ctypes.addressof(inputs)
            kept.append(inputs)
        if call.outputs and not call.is_beneath:
            outputs = (ctypes.c_void_p * len(call.outputs))(*[t.data_ptr() for t in call.outputs])
            segment_call.outputs = ctypes.addressof(outputs)
            kept.append(outputs)
        if call.kind is Kind.ALL_TO_ALL and not call.is_beneath:
            sends = (ctypes.c_int64 * len(call.inputs))(*[t.nbytes for t in call.inputs])
            takes = (ctypes.c_int64 * len(call.outputs))(*[t.nbytes for t in call.outputs])
            segment_call.input_bytes = ctypes.addressof(sends)
            segment_call.output_bytes = ctypes.addressof(takes)
            kept += [sends, takes]
        collective, address = self._library.ag_collective, ctypes.addressof(segment_call)
        status = AGAIN
        try:
            while status == AGAIN:  # in slices, between which Python handles its signals
                status = collective(self._group_address, address)
        except BaseException:
            # A handler has raised. Whoever made the call cannot know whether it was carried out, and may repeat it: the others must neither
            # wait for this rank nor take its next call for this one.
            self.abort()
            raise
        if self._group.stalls:
            self._count_stalls()
        if status:
            verdicts.raise_for(status, self._group.peers.lost, call, self.place)

    def _count_stalls(self) -> None:
        group, counted = self._group, counters.own
        counted.stalls += group.stalls
        counted.stalled_seconds += group.stalled_ns / 1e9
        group.stalls = group.stalled_ns = 0

    def abort(self) -> None:
        """Make every rank leave what it waits for."""
        word = 1 + self.place.index | verdicts.ABORTED << REASON_SHIFT
        self._library.ag_group_break(self._group_address, word)

    def close(self) -> None:
        """Nothing of the segment is held here but its address, which nobody uses after this."""
