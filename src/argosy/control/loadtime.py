"""Load-time variables: those that an interpreter and its libraries read once, when they are loaded.

They decide which warm parent a process may be forked from. Used by the agent for every launch, and by whoever warms a parent up before
the first launch: equal variables give the same parent. Standard library alone, quick to import.
"""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = (
    "PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LC_", "MALLOC_", "TORCH", "PYTORCH_",
    "CUDA", "ONEDNN_", "DNNL_", "GLIBC_",
)  # fmt: skip
_NAMES = frozenset(("LANG", "LANGUAGE"))
_PER_PROCESS_PREFIXES = ("TORCHELASTIC_",)
_PER_PROCESS_NAMES = frozenset(("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"))
"""Of a launch's own variables: set by a call in the forked process, or read only when a process group is made, so one parent
serves every thread count, gangs and single processes alike."""


def load_time(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter when an interpreter and its libraries are loaded."""
    return {
        name: value
        for name, value in environment.items()
        if name in _NAMES
        or (name.startswith(_PREFIXES) and not name.startswith(_PER_PROCESS_PREFIXES))
    }


def own_load_time(environment: Mapping[str, str]) -> dict[str, str]:
    """The same of a launch's own variables, without those that differ from process to process."""
    found = load_time(environment)
    return {name: value for name, value in found.items() if name not in _PER_PROCESS_NAMES}
