"""The numerics fingerprint: everything outside the program that decides the last bit of a sum.

Taken at the start of a run and kept with its saves; a resume under another one is refused unless drift is allowed. Equal fingerprints promise equal bits, different ones promise nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from typing import Any

import torch

from argosy.move import kernels

_VARIABLES = (
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
)


def take(*, mode: str, threads: int, compiled: bool = False) -> dict[str, Any]:
    """The facts, as JSON."""
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "matmul": torch.get_float32_matmul_precision(),
        "threads": threads,
        "kernels": kernels.path(),
        "mode": mode,
        "compiled": compiled,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def digest(facts: dict[str, Any]) -> str:
    """A short name of a fingerprint."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs, one line each."""
    names = sorted(old.keys() | new.keys())
    return [
        f"{name}: {old.get(name)!r} then, {new.get(name)!r} now"
        for name in names
        if old.get(name) != new.get(name)
    ]
