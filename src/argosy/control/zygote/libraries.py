"""What preloaded libraries must be told around a fork: new seeds, thread counts, and where temporary files go.

Looked through by the zygote once they are loaded, told by the rank. Looks only at modules that are loaded already and never
imports one, so a program that does not use torch pays nothing for it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_OPENBLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def reseed() -> None:
    """Two ranks forked from one zygote must not draw the same numbers."""
    for name, seed in (("random", "seed"), ("numpy.random", "seed")):
        module: Any = sys.modules.get(name)
        if module is not None:
            getattr(module, seed)()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def follow_environment() -> None:
    """Forget what was derived from the zygote's environment and directory."""
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.path.abspath(os.getcwd())


@dataclass(frozen=True)
class Libraries:
    """What the zygote found out about its preloads before a fork, because every rank would have to."""

    openblas_setters: tuple[Callable[[ctypes.c_int], object], ...] = ()

    @classmethod
    def find(cls) -> Libraries:
        """Look at the loaded libraries."""
        return cls(tuple(_find_openblas_setters()) if "numpy" in sys.modules else ())

    def set_threads(self, threads: int | None, affinity_at_load: frozenset[int]) -> None:
        """Set by call what these libraries read from the environment only when they are loaded."""
        own = os.sched_getaffinity(0)
        num_blas = threads or _read_count("OPENBLAS_NUM_THREADS") or _read_count("OMP_NUM_THREADS")
        if num_blas is None:
            num_blas = len(own)
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            if threads is not None:
                torch.set_num_threads(threads)
            elif own != affinity_at_load and _read_count("OMP_NUM_THREADS") is None:
                torch.set_num_threads(len(own))
        # The zygote loaded OpenBLAS with one thread; for one there is nothing to undo.
        if num_blas > 1:
            for setter in self.openblas_setters:
                setter(ctypes.c_int(num_blas))


def keep_finalizers_at_home() -> None:
    """Have `weakref.finalize` objects of the preloads not run when a rank exits.

    They clean up after the zygote: a rank that ran them would remove the zygote's temporary directories, and would spend
    45 ms of its exit on taking torch's operator libraries apart.
    """
    registry: Any = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        finalizer.atexit = False


def _read_count(name: str) -> int | None:
    value = os.environ.get(name, "").partition(",")[0].strip()
    return int(value) if value.isdigit() and int(value) > 0 else None


def _find_openblas_setters() -> Iterator[Callable[[ctypes.c_int], object]]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(None, 5)[5].rstrip("\n") for line in file if "openblas" in line}
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        setters = (getattr(library, name, None) for name in _OPENBLAS_SETTERS)
        yield from [setter for setter in setters if setter is not None][:1]
