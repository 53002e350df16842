"""What is put into the memory of a host: a stretch of one host's part of one checkpoint, and all that is needed to find and join it again.

A checkpoint's files lie one after another in its image; hosts that save into one store have a part each, a host with a store of its own has all of
it. Crosses processes and, one day, hosts. Pure.
"""

from __future__ import annotations

import msgspec

CHUNK_BYTES = 1 << 20
"""What one checksum in a holder's memory is of."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a checkpoint is a host's: number `index` of `count` equal ones."""

    index: int = 0
    count: int = 1

    def range_of(self, num_bytes: int) -> tuple[int, int]:
        """The part's stretch of an image, in whole chunks."""
        size = -(-num_bytes // self.count)
        size = -(-size // CHUNK_BYTES) * CHUNK_BYTES
        return min(num_bytes, self.index * size), min(num_bytes, (self.index + 1) * size)


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as one row of bytes: its manifest, its signature if it has one, then its files by name."""

    mark: int
    """The manifest's checksum: which save of the step it is."""
    num_bytes: int
    manifest_bytes: int
    signature_bytes: int


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch, as it is put and listed."""

    run: str
    """Whose checkpoints these are."""
    step: int
    owner: str
    """The host whose part it is."""
    members: tuple[str, ...]
    """The hosts whose parts are kept together: of a parity all of its group, else the owner alone."""
    share: Share
    image: Image
    start: int
    stop: int
    """Bytes of the owner's part."""
    is_folded: bool = False
    """Added into one parity with stretches of the other members, not kept as it is."""

    @property
    def num_bytes(self) -> int:
        """Of the stretch."""
        return self.stop - self.start

    @property
    def part_bytes(self) -> int:
        """Of all that the owner has of the checkpoint."""
        start, stop = self.share.range_of(self.image.num_bytes)
        return stop - start

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the owner's part, as it is."""
        return not self.is_folded and (self.start, self.stop) == (0, self.part_bytes)


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """What is got from a holder: the part of an owner, or the parity of a group."""

    run: str
    step: int
    members: tuple[str, ...]
    owner: str = ""
    """Nobody: the parity."""
