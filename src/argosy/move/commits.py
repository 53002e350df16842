"""Bundles that arrive whole: two slots for each, and a version word that flips when all members of all ranks are there.

A reader sees the old bundle or the new one, never a mix, also when a process dies in the middle of a transfer: the slot being filled is not the
committed one. Used by whoever receives parameters with their optimizer states; `reshard` does the copying.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from argosy.errors import ArenaGone, ArgosyError, ConfigError, MismatchError, TimedOut
from argosy.move import reshard, waits
from argosy.move.arenas import Arena
from argosy.move.bundles import Bundle, check_alike, flatten, joined, wires
from argosy.move.placements import buffers, like
from argosy.move.plans import Plan

_WORDS = "versions"


class Committed:
    """The two slots of this rank's bundles in an arena; other processes read them through the same arena."""

    def __init__(self, arena: Arena, bundles: Mapping[str, Bundle]) -> None:
        if arena.find(_WORDS) is not None:
            raise ConfigError(
                f"arena {arena.name!r} has committed bundles already",
                fix="take them over with Committed.reopen, or use a new arena",
            )
        self.names = list(bundles)
        self._slots = [_slot(arena, bundles, number) for number in (0, 1)]
        self._scalars = [_scalars(arena, bundles, number) for number in (0, 1)]
        # Last: where there are words, everything else is there too.
        self._words = arena.words(_WORDS, max(1, len(self.names)))

    @classmethod
    def reopen(cls, arena: Arena, bundles: Mapping[str, Bundle]) -> Committed:
        """What another process has made in this arena of like bundles, at its version: for one that replaces it.

        Only names, shapes, dtypes and layouts of `bundles` count; no value is written.
        """
        if arena.find(_WORDS) is None:
            raise ArenaGone(
                f"arena {arena.name!r} has no committed bundles",
                fix="make them with Committed(arena, bundles); one that ended while making them left nothing to take over",
            )
        found = cls.__new__(cls)
        found.names = list(bundles)
        found._words = arena.words(_WORDS, max(1, len(found.names)))
        found._slots = [_found_slot(arena, bundles, number) for number in (0, 1)]
        found._scalars = [_found_scalars(arena, bundles, number) for number in (0, 1)]
        return found

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
            scalars = self._read_scalars(version % 2, name)
            # The slot of a version is written again only after the next one is committed. What was read is read before the word is read
            # again: loading it orders only what comes after, waking its waiters is a full fence.
            waits.wake(self._words[self._index(name)])
            if self.version(name) == version:
                return version, Bundle(name, tensors, scalars)
        raise TimedOut(
            f"{name} changed during every copy for {timeout:g} s", fix="commit less often"
        )

    def slot(self, number: int) -> dict[str, Bundle]:
        """The bundles of a slot, for filling."""
        return self._slots[number]

    def scalars(self, number: int) -> dict[str, torch.Tensor]:
        """The scalars of a slot by bundle, each in the order of their names."""
        return self._scalars[number]

    def commit(self, version: int) -> None:
        """Flip every bundle to this version, whose slot is complete."""
        for index in range(len(self.names)):
            waits.post(self._words[index], version)

    def _read_scalars(self, number: int, name: str) -> dict[str, float]:
        keys = sorted(self._slots[number][name].scalars)
        return dict(zip(keys, self._scalars[number][name].tolist(), strict=True))

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
        self._source = source
        self._destination = destination
        self._scalars = {name: _pack(bundle) for name, bundle in source.items()}
        given = flatten(source) | _named(source, self._scalars)
        by_name: dict[str, torch.dtype] = {}
        refusal = None
        try:
            check_alike(source.values(), destination.slot(0).values())
            by_name = wires({**source, **destination.slot(0)}, wire or {})
        except ArgosyError as found_wrong:
            refusal = found_wrong  # the other ranks are on their way into `prepare`
        self._ways: list[reshard.Reshard] = []
        try:
            for number in (0, 1):
                slot = destination.slot(number)
                wanted = flatten(slot) | _named(slot, destination.scalars(number))
                way = reshard.prepare(
                    given, wanted, group, wire=by_name, timeout=timeout, refusal=refusal
                )
                self._ways.append(way)
            self._version = self._agree_on_version()
        except BaseException:
            self.close()
            raise

    @property
    def plan(self) -> Plan:
        """What each `run` moves: `plan.bytes`, `plan.lower_bound`, `plan.explain()`."""
        return self._ways[0].plan

    def statistics(self) -> dict[str, int | float]:
        """Of both slots together, as `Reshard.statistics` of one."""
        both = [way.statistics() for way in self._ways]
        return {name: sum(one[name] for one in both) for name in both[0]}

    def _agree_on_version(self) -> int:
        """The newest of any rank: all fill the same slot. Whoever is behind has that version complete and only missed its flip."""
        own = max(map(self._destination.version, self._destination.names), default=0)
        newest = self._ways[0].agree_all_done(own)
        if own < newest:
            self._destination.commit(newest)
        return newest

    def run(self) -> int:
        """Move everything, and commit it when every rank has all of it; the new version."""
        version = self._version + 1
        way = self._ways[version % 2]
        for name, bundle in self._source.items():
            self._scalars[name].copy_(_pack(bundle))
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

    def __enter__(self) -> BundleTransfer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _slot(arena: Arena, bundles: Mapping[str, Bundle], number: int) -> dict[str, Bundle]:
    def make(name: str, local: torch.Tensor) -> torch.Tensor:
        room = arena.empty(local.shape, local.dtype, name=name)
        return room.copy_(local)

    return _laid_out(bundles, number, make)


def _found_slot(arena: Arena, bundles: Mapping[str, Bundle], number: int) -> dict[str, Bundle]:
    return _laid_out(bundles, number, lambda name, local: _found(arena, name, local))


def _laid_out(
    bundles: Mapping[str, Bundle],
    number: int,
    room_for: Callable[[str, torch.Tensor], torch.Tensor],
) -> dict[str, Bundle]:
    found = {}
    for name, bundle in bundles.items():
        tensors = {}
        for key, tensor in bundle.tensors.items():
            (local,) = buffers(tensor)
            tensors[key] = like(tensor, room_for(f"{number}/{name}//{key}", local))
        found[name] = Bundle(name, tensors, dict(bundle.scalars))
    return found


def _scalars(arena: Arena, bundles: Mapping[str, Bundle], number: int) -> dict[str, torch.Tensor]:
    """Room for the scalars of all bundles in one allocation."""
    like_them = _packed(bundles)
    room = arena.empty(like_them.shape, torch.float64, name=f"{number}//scalars")
    return _divided(bundles, room.copy_(like_them))


def _found_scalars(
    arena: Arena, bundles: Mapping[str, Bundle], number: int
) -> dict[str, torch.Tensor]:
    return _divided(bundles, _found(arena, f"{number}//scalars", _packed(bundles)))


def _packed(bundles: Mapping[str, Bundle]) -> torch.Tensor:
    """The scalars of all bundles, one after the other; an allocation is never empty."""
    packed = [_pack(bundle) for bundle in bundles.values()]
    numbers = torch.cat(packed) if packed else torch.empty(0, dtype=torch.float64)
    return numbers if len(numbers) else torch.zeros(1, dtype=torch.float64)


def _divided(bundles: Mapping[str, Bundle], room: torch.Tensor) -> dict[str, torch.Tensor]:
    found, start = {}, 0
    for name, bundle in bundles.items():
        found[name] = room[start : start + len(bundle.scalars)]
        start += len(bundle.scalars)
    return found


def _found(arena: Arena, name: str, local: torch.Tensor) -> torch.Tensor:
    """The tensor of that name, which must be like the given one."""
    if arena.find(name) is None:
        raise MismatchError(
            f"arena {arena.name!r} has committed bundles, but none with {name.partition('/')[2]!r}",
            fix="reopen with the bundles of the process that made them: same names, members and scalars",
        )
    there = arena.tensor(name)
    if (there.shape, there.dtype) != (local.shape, local.dtype):
        raise MismatchError(
            f"{name.partition('/')[2]} in arena {arena.name!r} is {tuple(there.shape)} of {there.dtype}, "
            f"here it is {tuple(local.shape)} of {local.dtype}",
            fix="reopen with the bundles of the process that made them",
        )
    return there


def _pack(bundle: Bundle) -> torch.Tensor:
    return torch.tensor(
        [float(bundle.scalars[key]) for key in sorted(bundle.scalars)], dtype=torch.float64
    )


def _named(
    bundles: Mapping[str, Bundle], scalars: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Scalars as tensors of a state; their keys are in the name, so that other keys are another tensor."""
    return {
        joined(name, f"scalars {' '.join(sorted(bundles[name].scalars))}"): numbers
        for name, numbers in scalars.items()
        if len(numbers)
    }
