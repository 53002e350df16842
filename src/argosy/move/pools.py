"""Pools: tensors from a few large mappings whose pages are taken once and used again.

A fresh page costs several times a copy into a warm one, so a block goes back to the pool when its storage dies and serves the next request.
Blocks are known to this process; a peer finds one by the name of its mapping and its offset (`locate`). Never returns memory to the host
before `close`.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from argosy.errors import ArgosyError, ConfigError
from argosy.move import broker, hostmemory
from argosy.move.broker import Grant, Scope
from argosy.move.directory import Directory, Request, file_bytes
from argosy.move.hostmemory import PAGE, round_up
from argosy.move.mapping import Mapping, request_for

_GROWTH_BYTES = 64 << 20
_numbers = itertools.count()


class Pool:
    """Anonymous tensors in shared memory; safe to use from several threads."""

    def __init__(
        self, *, scope: Scope = "process", prefix: str = "pool", growth_bytes: int = _GROWTH_BYTES
    ) -> None:
        if growth_bytes <= 0:
            raise ConfigError(f"a pool that grows by {growth_bytes} bytes", fix="use 64 MiB")
        self._scope: Scope = scope
        self._growth_bytes = growth_bytes
        self._prefix = prefix
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._regions: list[_Region] = []
        self._returned: collections.deque[tuple[_Region, int, int]] = collections.deque()
        """Blocks whose storages have died: a finalizer may run anywhere, so it takes no lock."""
        self._in_use = self._peak = self._num_allocations = self._num_reuses = 0

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A tensor with whatever bytes lie there; its block is used again when its storage has died."""
        request = request_for(shape, dtype, "", strides)
        if request.num_bytes == 0:
            return torch.empty_strided(request.shape, request.strides, dtype=dtype)
        num_bytes = round_up(request.num_bytes)
        if self._pid != os.getpid():
            self._forget_parent()
        with self._lock:
            region, offset = self._take(num_bytes)
            self._num_allocations += 1
            self._in_use += num_bytes
            self._peak = max(self._peak, self._in_use)
        give_back = _returner(self._returned, region, offset, num_bytes)
        return region.mapping.tensor(
            offset, request.shape, dtype, request.strides, when_freed=give_back
        )

    def is_inside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the pool's mappings."""
        return any(region.mapping.contains(tensor) for region in self._regions)

    def locate(self, tensor: torch.Tensor) -> tuple[str, int]:
        """Name of the mapping and offset in it: with `arenas.open(name).at(offset, …)` a peer has the same bytes."""
        for region in self._regions:
            if region.mapping.contains(tensor):
                return region.grant.name, region.mapping.offset_of(tensor)
        raise ConfigError("the tensor does not lie in this pool", fix="make it with pool.empty()")

    def descriptors(self) -> dict[str, int]:
        """Descriptors of the mappings by name, for handing them to peers outside a run."""
        return {region.grant.name: region.grant.descriptor for region in self._regions}

    def statistics(self) -> dict[str, int]:
        """Bytes reserved, in use and at the peak; mappings, free fragments, allocations, reuses."""
        with self._lock:
            self._drain()
            return {
                "reserved": sum(region.size for region in self._regions),
                "in_use": self._in_use,
                "peak": self._peak,
                "mappings": len(self._regions),
                "fragments": sum(len(region.free) for region in self._regions),
                "allocations": self._num_allocations,
                "reuses": self._num_reuses,
            }

    def trim(self) -> int:
        """Give mappings without a living tensor back to the host; how many bytes."""
        with self._lock:
            self._drain()
            unused = [region for region in self._regions if region.is_unused()]
            self._regions = [region for region in self._regions if not region.is_unused()]
        for region in unused:
            region.close()
        return sum(region.size for region in unused)

    def close(self) -> None:
        """Give everything up; tensors that live keep their mapping until they die. Again is fine."""
        with self._lock:
            regions, self._regions = self._regions, []
        for region in regions:
            region.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self, num_bytes: int) -> tuple[_Region, int]:
        self._drain()
        fitting = [
            (length, index, offset)
            for index, region in enumerate(self._regions)
            for offset, length in region.free
            if length >= num_bytes
        ]
        if fitting:
            _, index, offset = min(fitting)
            region = self._regions[index]
            self._num_reuses += offset < region.high
        else:
            region = _Region(self._next_name(), max(self._growth_bytes, num_bytes), self._scope)
            self._regions.append(region)
            offset = region.free[0][0]
        region.take(offset, num_bytes)
        return region, offset

    def _next_name(self) -> str:
        # Ranks of one run may use the same prefix: a mapping's name says which process made it.
        return f"{self._prefix}/{os.environ.get('ARGOSY_ATTEMPT', '')}-{self._pid}-{next(_numbers)}"

    def _forget_parent(self) -> None:
        """In a forked child: the free ranges are the parent's to give out."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._regions, self._returned = [], collections.deque()
        self._in_use = self._peak = self._num_allocations = self._num_reuses = 0

    def _drain(self) -> None:
        while self._returned:
            region, offset, num_bytes = self._returned.popleft()
            region.put(offset, num_bytes)
            self._in_use -= num_bytes


class _Region:
    """One large mapping and the free ranges in it, in order and never touching each other."""

    def __init__(self, name: str, size: int, scope: Scope) -> None:
        self.size = round_up(size)
        self.grant = broker.create(name, file_bytes(self.size), scope=scope)
        try:
            hostmemory.reserve(self.grant.descriptor, self.grant.size, f"a pool's mapping {name!r}")
            self.mapping = _prepare(self.grant, self.size)
        except (ArgosyError, OSError):
            broker.close(self.grant)
            raise
        self.free: list[tuple[int, int]] = [(PAGE, self.size)]
        self.high = PAGE
        """Everything below was handed out before: its pages are warm in caches, too."""
        self._finalizer = weakref.finalize(self, broker.abandon, self.grant)
        self._finalizer.atexit = False

    def is_unused(self) -> bool:
        return self.free == [(PAGE, self.size)]

    def take(self, offset: int, num_bytes: int) -> None:
        index = bisect.bisect_left(self.free, (offset, 0))
        start, length = self.free.pop(index)
        if length > num_bytes:
            self.free.insert(index, (start + num_bytes, length - num_bytes))
        self.high = max(self.high, offset + num_bytes)

    def put(self, offset: int, num_bytes: int) -> None:
        """Take a range back and join it with its free neighbours."""
        index = bisect.bisect_left(self.free, (offset, 0))
        if index < len(self.free) and self.free[index][0] == offset + num_bytes:
            num_bytes += self.free.pop(index)[1]
        if index > 0 and sum(self.free[index - 1]) == offset:
            index -= 1
            offset, before = self.free.pop(index)
            num_bytes += before
        self.free.insert(index, (offset, num_bytes))

    def close(self) -> None:
        if self._finalizer.detach() is not None:
            broker.close(self.grant)


def _prepare(grant: Grant, size: int) -> Mapping:
    """Map it with an arena's header, so that a peer opens it as one; its room is taken by the pool."""
    mapping = Mapping(grant.descriptor, grant.size, is_private=False, is_prefaulted=True)
    directory = Directory(mapping.memory, grant.descriptor)
    directory.initialise(grant.name, grant.run)
    directory.append([Request(num_bytes=size, kind="pool")])
    return mapping


def _returner(
    returned: collections.deque[tuple[_Region, int, int]], region: _Region, offset: int, size: int
) -> Callable[[], None]:
    """What a dying storage calls; it holds the queue and the region, not the pool."""
    return lambda: returned.append((region, offset, size))
