"""What two manifests say about change, without reading a tensor: which tensors have the same bytes, which should not.

A tensor whose every chunk has the checksum it had before has not changed; one that shares a chunk with another that did is not judged. Pure; the
checkpointer asks after each save, `argosy checkpoint diff` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.checkpoint import tables
from argosy.checkpoint.checksums import Table
from argosy.checkpoint.manifests import Manifest, Part, TensorRecord


def unchanged_tensors(old: Manifest, new: Manifest) -> list[str]:
    """Tensors of both whose bytes are proven equal by the tables."""
    known: dict[tuple[int, str], Table] = {}

    def table(side: int, manifest: Manifest, file: str) -> Table:
        if (side, file) not in known:
            known[side, file] = tables.unpack(manifest.files[file].crc32c, file)
        return known[side, file]

    def is_same(record: TensorRecord, before: Part, now: Part) -> bool:
        first, second = old.files[before.file], new.files[now.file]
        chunk = first.chunk_bytes
        if (before.offset, before.box, chunk) != (now.offset, now.box, second.chunk_bytes):
            return False
        if second.size != first.size:
            return False
        low, high = now.offset // chunk, -(-(now.offset + record.bytes_of(now)) // chunk)
        here, there = table(1, new, now.file), table(0, old, before.file)
        return bool((here[low:high] == there[low:high]).all())

    found = []
    for name, record in new.tensors.items():
        before = old.tensors.get(name)
        if before is None or not record.num_bytes or len(before.parts) != len(record.parts):
            continue
        if (before.dtype, before.shape) != (record.dtype, record.shape):
            continue
        if all(map(is_same, [record] * len(record.parts), before.parts, record.parts)):
            found.append(name)
    return found


def trained_tensors(manifest: Manifest, values: Mapping[str, Any]) -> set[str]:
    """Weights that an optimizer has in its groups, whether it keeps state for them or not; `values` are the checkpoint's trees."""
    named = {
        name
        for tree in values.values()
        if isinstance(tree, dict) and tree.keys() == {"groups", "state", "tensors"}
        for group in tree["groups"]
        for name in group["parameters"]
    }
    return {
        name for name in named & manifest.tensors.keys() if manifest.tensors[name].kind == "model"
    }


def stuck_tensors(old: Manifest, new: Manifest, values: Mapping[str, Any]) -> list[str]:
    """Trained tensors that have not changed since the earlier save; `values` are the later one's."""
    if new.step <= old.step:
        return []
    trained = trained_tensors(new, values)
    return [name for name in unchanged_tensors(old, new) if name in trained]
