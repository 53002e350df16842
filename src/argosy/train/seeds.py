"""Seeds: every default random generator as a function of (seed, step, lane).

Called by the launcher before `main()` and by lanes.py before each lane. Private generators cannot be seen from here; the audit of the first step finds what they change.
"""

from __future__ import annotations

import random

import torch

_MASK = (1 << 64) - 1


def seed_all(*numbers: int) -> None:
    """Seed torch's, Python's and numpy's default generators."""
    seed = mix(*numbers)
    # torch.manual_seed asks every device module; the CPU's generator alone takes a hundredth of that.
    torch.default_generator.manual_seed(seed)
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(seed)  # untested: no accelerator here
    random.seed(seed)
    _seed_numpy(seed & 0xFFFFFFFF)


def mix(*numbers: int) -> int:
    """64 bits of which each depends on every number."""
    value = len(numbers) & _MASK
    for number in numbers:
        value = (value ^ (number & _MASK)) * 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value


def _seed_numpy(seed: int) -> None:
    import numpy as np

    np.random.seed(seed)
