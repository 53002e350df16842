"""A checkpoint as one row of bytes: where each of its files lies in it, and its bytes from a folder, verified on the way.

Called by copies.py on the way into memory and by recalls.py on the way back. No torch.
"""

from __future__ import annotations

from argosy.checkpoint import fetches, manifests, names
from argosy.checkpoint.directio import BLOCKS
from argosy.checkpoint.fetches import STRETCH_BYTES
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.manifests import Manifest
from argosy.checkpoint.peers.labels import Image
from argosy.errors import CheckpointDamaged

_MOST_SIGNATURE_BYTES = 4096


def offsets_of(manifest: Manifest, image: Image) -> dict[str, int]:
    """Where each file begins; CheckpointDamaged when they would not fill the image."""
    found, at = {}, image.manifest_bytes + image.signature_bytes
    for name in sorted(manifest.files):
        found[name] = at
        at += manifest.files[name].size
    if at != image.num_bytes:
        raise CheckpointDamaged(
            f"the files of step {manifest.step} have {at} bytes in memory, not {image.num_bytes}",
            fix="use another checkpoint",
        )
    return found


class Row:
    """The bytes of a folder in the order of its image."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        signature = folder.place.read_small(names.SIGNATURE, _MOST_SIGNATURE_BYTES) or b""
        self._head = folder.manifest_bytes + signature
        sizes = [record.size for record in folder.manifest.files.values()]
        self.image = Image(
            mark=manifests.crc_of(folder.manifest_bytes),
            num_bytes=len(self._head) + sum(sizes),
            manifest_bytes=len(folder.manifest_bytes),
            signature_bytes=len(signature),
        )
        self._offsets = offsets_of(folder.manifest, self.image)
        # Open before anything is read: whoever removes the checkpoint from the disk meanwhile does no harm.
        for name in self._offsets:
            folder.stored(name)

    def fill(self, start: int, into: memoryview) -> None:
        """Bytes from a place on."""
        stop = start + len(into)
        head = self._head[start:stop]
        into[: len(head)] = head
        for name, offset in self._offsets.items():
            first, last = max(start, offset), min(stop, offset + self._folder.stored(name).size)
            if first < last:
                self._read(name, first - offset, into[first - start : last - start])

    def _read(self, name: str, start: int, into: memoryview) -> None:
        """Whole chunks into a block, of it what is wanted."""
        stored = self._folder.stored(name)
        chunk, stop = stored.chunk_bytes, start + len(into)
        low, high = start // chunk * chunk, min(stored.size, -(-stop // chunk) * chunk)
        with self._folder.naming_tensors(), BLOCKS.lent() as block:
            for at in range(low, high, STRETCH_BYTES):
                end = min(high, at + STRETCH_BYTES)
                fetches.fetch(stored, at, end, block, self._folder.files)
                first, last = max(start, at), min(stop, end)
                into[first - start : last - start] = block.memory[first - at : last - at]
