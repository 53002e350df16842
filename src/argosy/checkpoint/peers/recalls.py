"""Checkpoints in the memory of hosts, seen from outside: which can be had, and their files by byte ranges, rebuilt where a host is lost.

`PeerListing` is the `Listing` of a run, `MemoryPlace` the place of one checkpoint: loads read it like any other. A way to a part that fails is left
for the next one. Memory stays bounded: a rebuilt stretch takes one block more. No torch.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from argosy.checkpoint import manifests, names
from argosy.checkpoint.directio import BLOCK_BYTES, BLOCKS, Files
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.manifests import FileRecord
from argosy.checkpoint.peers import custody, images
from argosy.checkpoint.peers.custody import Piece, Source
from argosy.checkpoint.peers.labels import Image, Label
from argosy.checkpoint.peers.routes import Route
from argosy.errors import ArgosyError, CheckpointDamaged, NotFoundError, PeerAbsent, TimedOut

_LOG = logging.getLogger("argosy.checkpoint")
_MOST_AT_ONCE = 32
_REST_SECONDS = 60.0
"""For so long a holder that stands still is not asked again by the hops of a load."""
There = Mapping[str, Sequence[Label]]


class PeerListing(Listing):
    """The checkpoints of a run that the memory of its hosts can give back."""

    def __init__(self, route: Route, hosts: Sequence[str], run: str, owner: str) -> None:
        super().__init__(Path("peers"))
        self.where = f"the memory of {', '.join(hosts)}"
        self._route = route
        self._hosts = tuple(hosts)
        self._run = run
        self._owner = owner
        self._there: There = {}
        """What the hosts have said when all of them were asked last."""
        self._stuck: dict[str, float] = {}
        """Hosts whose holders are there and do not answer, and since when: they are waited for once and not at every hop."""

    def steps(self) -> list[int]:
        """Those of which every part can be had, rising."""
        return sorted(self.saves())

    def saves(self) -> dict[int, int]:
        """The same with the mark of the save that can be had; says of which there is too little. Asks every host."""
        self._stuck.clear()
        there = self._there = self._look()
        found = {step: self._found(there, step) for step in sorted(self._own_steps(there))}
        for step in [step for step, parts in found.items() if parts is None]:
            _LOG.warning("%s has too little of step %d of %s", self.where, step, self._owner)
        if not found:
            _LOG.info("%s has nothing of %s", self.where, self._owner)
        return {step: parts[0].mark for step, parts in found.items() if parts is not None}

    @property
    def silent(self) -> list[str]:
        """Hosts that did not answer when all of them were asked last."""
        return [host for host in self._hosts if host not in self._there]

    def check_nothing_lost(self) -> None:
        """Raises when hosts have something of this one's checkpoints, and too little, or cannot say what they have: to begin anew would be to forget them."""
        there, silent = self._there, self.silent
        steps = sorted(self._own_steps(there))
        if self._stuck and not steps:
            raise TimedOut(
                f"the memory of {', '.join(sorted(self._stuck))} may have a checkpoint and does not answer",
                fix="see why the holder stands still; to begin anew end it, or use another Peers(run=…)",
            )
        if steps:
            raise CheckpointDamaged(
                f"the memory of peers has too little of step {steps[-1]} of {self._owner}"
                + (f": {', '.join(silent)} did not answer" if silent else ""),
                fix="bring those hosts back, or another copy; to begin anew use another Peers(run=…)",
            )
        if others := _steps(there):
            _LOG.warning("peers have step %d of others and nothing of %s", max(others), self._owner)

    def directory_of(self, step: int) -> Path:
        """There is none."""
        raise NotFoundError(f"{self.where} is no directory", fix="load it, and save it again")

    def pins(self) -> dict[int, str]:
        """Nothing stays in memory for ever."""
        return {}

    def place_of(self, step: int) -> MemoryPlace:
        """What a `Folder` is made from."""
        found = self._found(self._look(), step)
        if found is None:
            raise NotFoundError(f"{self.where} has too little of step {step}")
        image, parts = found
        return MemoryPlace(step, image, parts, self.where)

    def _look(self) -> There:
        """What each host says that it has; all are asked at once, so that those who do not answer are waited for together."""
        rested = time.monotonic() - _REST_SECONDS
        asked = [host for host in self._hosts if self._stuck.get(host, rested) <= rested]
        if not asked:
            return {}
        with ThreadPoolExecutor(min(len(asked), _MOST_AT_ONCE)) as threads:
            said = dict(zip(asked, threads.map(self._ask, asked), strict=True))
        return {host: labels for host, labels in said.items() if labels is not None}

    def _ask(self, host: str) -> list[Label] | None:
        try:
            return self._route.list(host, self._run)
        except ArgosyError as failure:
            _LOG.warning("peers: %s", failure.what)
            if isinstance(failure, TimedOut) and not isinstance(failure, PeerAbsent):
                self._stuck[host] = time.monotonic()
            return None

    def _found(self, there: There, step: int) -> tuple[Image, list[_Part]] | None:
        """Of the saves of a step one whose every part can be had, and how."""
        labels = [label for found in there.values() for label in found if label.step == step]
        own = [one for one in labels if self._is_own(one)]
        for image, count in sorted({(one.image, one.share.count) for one in own}, key=str):
            parts: dict[int, _Part] = {}
            for label in own:
                is_known = label.share.index in parts or label.share.count != count
                if label.image == image and not is_known:
                    sources = custody.plan_sources(there, label)
                    if sources:
                        parts[label.share.index] = _Part(self._route, label, sources)
            if len(parts) == count:
                return image, [parts[index] for index in range(count)]
        return None

    def _own_steps(self, there: There) -> set[int]:
        return {one.step for found in there.values() for one in found if self._is_own(one)}

    def _is_own(self, label: Label) -> bool:
        """Of the checkpoints of this host, or of those that it shares."""
        return label.share.count > 1 or label.owner == self._owner


class _Part:
    """One host's part, and the ways to it that are left."""

    def __init__(self, route: Route, label: Label, sources: list[Source]) -> None:
        self.start, self.stop = label.share.range_of(label.image.num_bytes)
        self._what = f"the part of {label.owner} of step {label.step}"
        self._route = route
        self._sources = sources
        self._lock = threading.Lock()
        self._said: Source | None = None

    def read(self, start: int, into: memoryview) -> None:
        """Bytes of the part; CheckpointDamaged when no way is left."""
        while True:
            source = self._current()
            try:
                for stretch in source.stretches:
                    first = max(start, stretch.start)
                    last = min(start + len(into), stretch.stop)
                    if first < last:
                        room = into[first - start : last - start]
                        self._join(stretch.pieces, first - stretch.start, room)
                return
            except ArgosyError as failure:
                self._leave(source, failure)

    def _join(self, pieces: Sequence[Piece], start: int, into: memoryview) -> None:
        """The exclusive or of pieces, the first in place."""
        self._get(pieces[0], start, into)
        if len(pieces) == 1:
            return
        joined = np.frombuffer(into, dtype=np.uint8)
        with BLOCKS.lent() as block:
            for piece in pieces[1:]:
                for at in range(0, len(into), BLOCK_BYTES):
                    size = min(BLOCK_BYTES, len(into) - at)
                    other = block.memory[: self._get(piece, start + at, block.memory[:size])]
                    mine = joined[at : at + len(other)]
                    np.bitwise_xor(mine, np.frombuffer(other, dtype=np.uint8), out=mine)

    def _get(self, piece: Piece, start: int, into: memoryview) -> int:
        """How many bytes there are of a piece that may be shorter than others."""
        size = max(0, min(len(into), piece.stop - piece.start - start))
        if size:
            self._route.get(piece.host, piece.address, piece.start + start, into[:size])
        into[size:] = bytes(len(into) - size)
        return size

    def _leave(self, source: Source, failure: ArgosyError) -> None:
        with self._lock:
            if self._sources[0] is not source:
                return  # another thread has met it first
            if len(self._sources) == 1:
                raise CheckpointDamaged(
                    f"{self._what} cannot be had any more: {failure.what}",
                    fix="use another checkpoint",
                )
            _LOG.warning("%s: %s", self._what, failure.what)
            self._sources = self._sources[1:]

    def _current(self) -> Source:
        """The way that is taken now; said when it is taken first."""
        with self._lock:
            source, is_new = self._sources[0], self._said is not self._sources[0]
            self._said = source
        if is_new:
            self._say(source)
        return source

    def _say(self, source: Source) -> None:
        how = "rebuilt from" if any(one.pieces[1:] for one in source.stretches) else "from"
        _LOG.info("%s is read %s the memory of %s", self._what, how, ", ".join(source.hosts))


class _MemoryFiles(Files):
    """Reads an image as if its files were files."""

    is_disk = False

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._known: dict[int, tuple[int, int]] = {}
        self._numbers = itertools.count()

    def add(self, offset: int, size: int) -> int:
        """A number that stands for a file."""
        number = next(self._numbers)
        self._known[number] = offset, size
        return number

    def forget(self, number: int) -> None:
        """It is not read any more."""
        self._known.pop(number, None)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        """A stretch."""
        begin, size = self._known[descriptor]
        into = into[: max(0, min(len(into), size - offset))]
        self.read_image(begin + offset, into)
        return len(into)

    def read_image(self, start: int, into: memoryview) -> None:
        """Bytes of the image, from the parts that have them."""
        stop = start + len(into)
        for part in self._parts:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                part.read(first - part.start, into[first - start : last - start])


class MemoryPlace:
    """Where the files of one checkpoint lie in the memory of hosts."""

    def __init__(self, step: int, image: Image, parts: Sequence[_Part], where: str) -> None:
        self._image = image
        self._memory = _MemoryFiles(parts)
        self._offsets: dict[str, int] | None = None
        self.path = Path(names.step_name(step))
        self.where = where
        self.files: Files = self._memory

    def read_manifest(self) -> bytes:
        """All of it."""
        return self._read(0, self._image.manifest_bytes, names.MOST_MANIFEST_BYTES)

    def read_small(self, name: str, most_bytes: int) -> bytes | None:
        """The signature is all that no manifest lists."""
        if name == names.MANIFEST:
            return self._read(0, self._image.manifest_bytes, most_bytes)
        if name != names.SIGNATURE or not self._image.signature_bytes:
            return None
        return self._read(self._image.manifest_bytes, self._image.signature_bytes, most_bytes)

    def open(self, name: str, record: FileRecord) -> tuple[int, bool]:
        """A stretch of the image, wherever the file lay on disk."""
        if self._offsets is None:
            manifest = manifests.decode(self.read_manifest(), self.path.name)
            self._offsets = images.offsets_of(manifest, self._image)
        return self._memory.add(self._offsets[name], record.size), False

    def give_back(self, descriptor: int) -> None:
        """Forget it."""
        self._memory.forget(descriptor)

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, start: int, num_bytes: int, most_bytes: int) -> bytes:
        if num_bytes > most_bytes:
            raise CheckpointDamaged(f"{self.where}: {num_bytes} bytes, more than allowed")
        data = bytearray(num_bytes)
        self._memory.read_image(start, memoryview(data))
        return bytes(data)


def _steps(there: There) -> set[int]:
    return {label.step for labels in there.values() for label in labels}
