"""`fsdp_fast_path(model)`: FSDP2's all-gather and reduce-scatter in memory that all ranks of the host share, without staging copies.

FSDP asks for its buffers before it fills them: here they lie in rings of common slots. An all-gather is then one meeting (every rank has
written its shard where all read it), a reduce-scatter one meeting and one pass that reads all ranks' inputs. Where a slot is not free on
some rank, or ranks are on several hosts, the group's ordinary collective does the same work: all ranks decide alike, in the meeting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from argosy.errors import ConfigError
from argosy.move import counters, hostmemory, kernels, mapping, torchgroup, waits
from argosy.move.groups import ArgosyGroup

NUM_SLOTS = 3
"""As many as FSDP has under way: one filled, one in use, one that a slower rank is about to free. More would only cool the caches."""


def fsdp_fast_path(model: torch.nn.Module) -> int:
    """Put the buffers of all FSDP2 modules of `model` into shared memory; how many modules that were.

    Every rank calls it after `fully_shard`, on models sharded over process groups of the `argosy` backend.
    """
    comms: dict[int, tuple[SharedAllGather, SharedReduceScatter]] = {}
    modules = torchgroup.sharded_modules(model)
    if not modules:
        raise ConfigError(
            f"{type(model).__name__} has no module that was given to fully_shard",
            fix="call fsdp_fast_path after fully_shard, on the same model",
        )
    for module, group in modules:
        if not isinstance(group, ArgosyGroup):
            raise ConfigError(
                f"{type(module).__name__} is sharded over a process group of another backend ({type(group).__name__})",
                fix='use dist.init_process_group("argosy") or DeviceMesh.from_group(new_group(backend="argosy"), "cpu")',
            )
        if id(group) not in comms:
            comms[id(group)] = (SharedAllGather(group), SharedReduceScatter(group))
        gather, scatter = comms[id(group)]
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
    return len(modules)


class _Ring:
    """Slots in memory that all ranks of the group map: one area for all ranks, or one of each rank.

    A turn uses slot turn % NUM_SLOTS. `released` words, one per rank and slot, say up to which turn a rank holds nothing there.
    """

    def __init__(self, group: ArgosyGroup, slot_bytes: int, num_areas: int) -> None:
        self._size, self._rank = group.size(), group.rank()
        self.slot_bytes = hostmemory.round_up(slot_bytes)
        self._words_bytes = hostmemory.round_up(
            self._size * NUM_SLOTS * mapping.WORD_BYTES,
        )
        total = self._words_bytes + num_areas * NUM_SLOTS * self.slot_bytes
        self._map = group.common_memory(total)
        self._turn = 0
        self._held = [False] * NUM_SLOTS
        self._passed = [0] * NUM_SLOTS

    def take(self, count: int, dtype: torch.dtype, area: int) -> torch.Tensor | None:
        """This turn's slot, or None when a rank may still read what was in it before."""
        turn, slot = self._turn, self._turn % NUM_SLOTS
        self._turn += 1
        if self._held[slot]:
            self._passed[slot] = turn
            return None
        is_free = turn < NUM_SLOTS or all(
            waits.peek(self._word(rank, slot)) > turn - NUM_SLOTS for rank in range(self._size)
        )
        if not is_free:
            self._tell_released(turn)
            return None
        self._held[slot] = True
        return self._map.tensor(
            self._offset(area, slot),
            (count,),
            dtype,
            when_freed=lambda: self._release(turn),
        )

    def _release(self, turn: int) -> None:
        """Runs when a tensor dies: at any moment, also in the middle of `take`, so it speaks only of turns that are over here."""
        slot = turn % NUM_SLOTS
        self._tell_released(max(turn, self._passed[slot]))
        self._held[slot] = False

    def _tell_released(self, turn: int) -> None:
        waits.post(self._word(self._rank, turn % NUM_SLOTS), turn + 1)

    def slot_of(self, tensor: torch.Tensor) -> int:
        """1 + the turn's slot when the tensor lies in the ring, else 0."""
        if tensor.numel() == 0 or not self._map.contains(tensor):
            return 0
        offset = self._map.offset_of(tensor) - self._words_bytes
        return 1 + offset // self.slot_bytes % NUM_SLOTS

    def view(
        self, area: int, slot: int, start: int, count: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """A stretch of some rank's slot."""
        offset = self._offset(area, slot) + start * dtype.itemsize
        return self._map.tensor(offset, (count,), dtype)

    def _offset(self, area: int, slot: int) -> int:
        return self._words_bytes + (area * NUM_SLOTS + slot) * self.slot_bytes

    def _word(self, rank: int, slot: int) -> int:
        return self._map.address + (rank * NUM_SLOTS + slot) * mapping.WORD_BYTES


class _Slots:
    """A ring that grows to the largest buffer that was asked for, when all ranks are in the same call."""

    def __init__(self, group: ArgosyGroup, num_areas: int, area: int) -> None:
        self._group = group
        self._num_areas, self._area = num_areas, area
        self._ring: _Ring | None = None
        self._flags = torch.zeros(group.size(), dtype=torch.int64)
        self.num_shared = self.num_ordinary = 0

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(int(length) for length in size)
        found = None
        if self._ring is not None and 0 < count * dtype.itemsize <= self._ring.slot_bytes:
            found = self._ring.take(count, dtype, self._area)
        return torch.empty(tuple(size), dtype=dtype) if found is None else found.view(tuple(size))

    def meet(self, tensor: torch.Tensor, call: str) -> _Ring | None:
        """The ring, when every rank's buffer lies in the same of its slots; after this all can read them."""
        if not self._group.is_on_one_host:
            return None
        own = 0 if self._ring is None else self._ring.slot_of(tensor)
        what = f"FSDP's {call} of {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"
        self._group.tell_all(own, self._flags, what)
        if own and bool((self._flags == own).all()):
            self.num_shared += 1
            return self._ring
        self.num_ordinary += 1
        self._grow(tensor.nbytes)
        return None

    def _grow(self, num_bytes: int) -> None:
        if num_bytes > (0 if self._ring is None else self._ring.slot_bytes):
            self._ring = _Ring(self._group, num_bytes, self._num_areas)

    def slot_of(self, tensor: torch.Tensor) -> int:
        """Which slot a buffer of the ring has."""
        return 0 if self._ring is None else self._ring.slot_of(tensor) - 1


class SharedAllGather(torchgroup.AllGather):  # type: ignore[misc]
    """FSDP's all-gather: all ranks' outputs are one buffer, so that writing the own shard is all the moving there is."""

    def __init__(self, group: ArgosyGroup) -> None:
        self.slots = _Slots(group, 1, 0)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The output; its own part is what FSDP fills."""
        return self.slots.allocate(size, dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """Meet; nothing is left to move when all wrote into one slot."""
        if not async_op and self.slots.meet(output_tensor, "all_gather") is not None:
            counters.own.shared_memory_bytes += input_tensor.nbytes
            return None
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class SharedReduceScatter(torchgroup.ReduceScatter):  # type: ignore[misc]
    """FSDP's reduce-scatter: each rank reads its part of all ranks' inputs where they were written."""

    def __init__(self, group: ArgosyGroup) -> None:
        self._size, self._rank = group.size(), group.rank()
        self.slots = _Slots(group, self._size, self._rank)
        self._is_output_next = False

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The input in shared memory; the output, which becomes the sharded gradient and lives long, outside of it."""
        is_output, self._is_output_next = self._is_output_next, not self._is_output_next
        return (
            torch.empty(tuple(size), dtype=dtype) if is_output else self.slots.allocate(size, dtype)
        )

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Meet, then add up in rank order. A slot is written again only after a later meeting: all have read it by then."""
        self._is_output_next = False
        ring = None if async_op else self.slots.meet(input_tensor, "reduce_scatter")
        if ring is None:
            return dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        operation, factor = torchgroup.operation_of(op)
        count, slot = output_tensor.numel(), self.slots.slot_of(input_tensor)
        inputs = [
            ring.view(rank, slot, self._rank * count, count, input_tensor.dtype)
            for rank in range(self._size)
        ]
        kernels.reduce(output_tensor, inputs, operation.name.lower(), factor)
        counters.own.shared_memory_bytes += input_tensor.nbytes
        return None
