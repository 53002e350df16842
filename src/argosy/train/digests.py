"""SHA-256 of the state: equal bits have equal digests, whatever the world size and the history of deaths. And a quicker one of a tensor, for ranks that compare what they begin with.

Read by tests, the demo and people who compare runs; the bytes of every field of a version count, in the order of its plan, with names, shapes and dtypes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from argosy.move import kernels
from argosy.train.memories import Version
from argosy.train.seeds import mix
from argosy.train.stateplan import AVERAGE, VALUE, Field


def of_version(version: Version) -> str:
    """The digest of parameters, optimizer state and buffers."""
    total = hashlib.sha256()
    for field, tensor in zip(version.plan.fields, version.tensors, strict=True):
        total.update(_title(field).encode())
        if version.has_begun(field.name) or field.key in (VALUE, AVERAGE):
            total.update(_bytes(tensor))
    image = version.image
    if image is not None:
        total.update(_bytes(image))
    return total.hexdigest()


def of_tensor(tensor: torch.Tensor) -> int:
    """63 bits of one tensor, at the speed of memory: every rank waits for those of its whole model before it can begin.

    A checksum, which misses no difference in a single element, and the sum of the words. Against chance, not against somebody who wants to be mistaken.
    """
    flat = _flat(tensor)
    words = flat.numpy()[: flat.numel() // 8 * 8].view(np.uint64)
    return mix(kernels.copy_crc32c(None, flat), int(words.sum(dtype=np.uint64))) >> 1 | 1


def _title(field: Field) -> str:
    return f"{field.name}\0{field.key}\0{field.dtype}\0{field.shape}\0"


def _bytes(tensor: torch.Tensor) -> Any:
    return _flat(tensor).numpy()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
