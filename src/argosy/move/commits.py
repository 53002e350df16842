"""Bundles that arrive whole: two slots for each, and a version word that flips when all members of all ranks are there.

A reader sees the old bundle or the new one, never a mix, also when a process dies in the middle of a transfer: the slot being filled is not the
committed one. Used by whoever receives parameters with their optimizer states; `reshard` does the copying.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from argosy.errors import ConfigError, TimedOut
from argosy.move import reshard, waits
from argosy.move.arenas import Arena
from argosy.move.bundles import Bundle, check_alike, flatten, wires
from argosy.move.placements import buffers, like

SCALARS = "//scalars"


class Committed:
    """The two slots of this rank's bundles in an arena; other processes read them through the same arena."""

    def __init__(self, arena: Arena, bundles: Mapping[str, Bundle]) -> None:
        self.names = list(bundles)
        self._scalars = {name: sorted(bundle.scalars) for name, bundle in bundles.items()}
        self._words = arena.words("versions", max(1, len(self.names)))
        self._slots = [_slot(arena, bundles, number) for number in (0, 1)]
        count = sum(map(len, self._scalars.values()))
        self._numbers = [
            arena.empty((max(1, count),), torch.float64, name=f"{number}{SCALARS}")
            for number in (0, 1)
        ]

    def version(self, name: str) -> int:
        """Of the committed bundle; 0 before the first."""
        return waits.peek(self._words[self._index(name)])

    def snapshot(self, name: str, *, timeout: float = 10.0) -> tuple[int, Bundle]:
        """(version, a copy of the committed bundle); copied again when a commit came in between."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            version = self.version(name)
            slot = self._slots[version % 2][name]
            tensors = {key: buffers(value)[0].clone() for key, value in slot.tensors.items()}
            scalars = self._read_scalars(version % 2)[name]
            # The slot of a version is written again only after the next one is committed.
            if self.version(name) == version:
                return version, Bundle(name, tensors, scalars)
        raise TimedOut(
            f"{name} changed during every copy for {timeout:g} s", fix="commit less often"
        )

    def slot(self, number: int) -> dict[str, Bundle]:
        """The bundles of a slot, for filling."""
        return self._slots[number]

    def numbers(self, number: int) -> torch.Tensor:
        """All scalars of a slot."""
        return self._numbers[number]

    def pack(self, bundles: Mapping[str, Bundle]) -> torch.Tensor:
        """The scalars of a source in the order of `numbers`."""
        found = [
            float(bundles[name].scalars[key]) for name in self.names for key in self._scalars[name]
        ]
        return torch.tensor(found or [0.0], dtype=torch.float64)

    def commit(self, version: int) -> None:
        """Flip every bundle to this version, whose slot is complete."""
        for index in range(len(self.names)):
            waits.post(self._words[index], version)

    def _read_scalars(self, number: int) -> dict[str, dict[str, float]]:
        values = iter(self._numbers[number].tolist())
        return {name: {key: next(values) for key in keys} for name, keys in self._scalars.items()}

    def _index(self, name: str) -> int:
        if name not in self._slots[0]:
            raise ConfigError(
                f"no bundle is called {name!r}", fix=f"there are {', '.join(self.names[:5])}"
            )
        return self.names.index(name)


class BundleTransfer:
    """Moves bundles of a source into `Committed` slots of a destination, again and again; all ranks call `run` alike."""

    def __init__(
        self,
        source: Mapping[str, Bundle],
        destination: Committed,
        group: dist.ProcessGroup | None = None,
        *,
        wire: Mapping[str, torch.dtype] | None = None,
        timeout: float = reshard.SECONDS,
    ) -> None:
        check_alike(source.values(), destination.slot(0).values())
        self._source = source
        self._destination = destination
        self._scalars = destination.pack(source) if source else torch.zeros(0)
        self._version = max(map(destination.version, destination.names), default=0)
        given = flatten(source) | ({SCALARS: self._scalars} if source else {})
        by_name = wires(destination.slot(0), wire or {})
        self._ways: list[reshard.Reshard] = []
        try:
            for number in (0, 1):
                wanted = flatten(destination.slot(number)) | {SCALARS: destination.numbers(number)}
                way = reshard.prepare(given, wanted, group, wire=by_name, timeout=timeout)
                self._ways.append(way)
        except BaseException:
            self.close()
            raise

    def run(self) -> int:
        """Move everything, and commit it when every rank has all of it; the new version."""
        version = self._version + 1
        way = self._ways[version % 2]
        if self._source:
            self._scalars.copy_(self._destination.pack(self._source))
        way.run()
        for bundle in self._destination.slot(version % 2).values():
            bundle.derive()
        way.agree_all_done()
        self._destination.commit(version)
        self._version = version
        return version

    def close(self) -> None:
        """Again is fine."""
        for way in self._ways:
            way.close()


def _slot(arena: Arena, bundles: Mapping[str, Bundle], number: int) -> dict[str, Bundle]:
    found = {}
    for name, bundle in bundles.items():
        tensors = {}
        for key, tensor in bundle.tensors.items():
            (local,) = buffers(tensor)
            room = arena.empty(local.shape, local.dtype, name=f"{number}/{name}//{key}")
            room.copy_(local)
            tensors[key] = like(tensor, room)
        found[name] = Bundle(name, tensors, bundle.scalars)
    return found
