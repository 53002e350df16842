"""Finds and opens the shared object of the native kernels, and declares its functions for ctypes.

`move/kernels.py`, `move/waits.py` and the collectives call what is opened here; nobody else does. The object is built when the package
is installed; where it is missing, of another version or turned off by `ARGOSY_NATIVE=0`, `library()` is None and `state()` says why.
Never raises for a missing object: the callers have torch operations for that case.
"""

from __future__ import annotations

import ctypes
import functools
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

ABI = 5
SWITCH = "ARGOSY_NATIVE"
WITHOUT = "torch operations"

REBUILD = "install a C compiler (Debian: apt-get install gcc libc6-dev), then argosy again (in a checkout: make setup)"
OUTDATED = "build them again: `make setup` in a checkout, else `pip install --force-reinstall --no-deps argosy`"
"""There was a compiler once: the object is there, but of another version or another machine."""

_HERE = Path(__file__).parent

OK, TIMEOUT, PEER_LOST, BROKEN, MISMATCH, BAD = range(6)


class CPeers(ctypes.Structure):
    """`ag_peers` of kernels.h."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("lost", ctypes.c_int32),
        ("pidfds", ctypes.c_void_p),
        ("broken", ctypes.c_void_p),
    )


class State(NamedTuple):
    """What the loader found: the path in force, and the mend when that is not the native one."""

    path: str
    detail: str
    mend: str = ""


_POINTER = ctypes.c_void_p
_I32, _I64, _U32, _U64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64

# Addresses travel as plain integers: the caller keeps alive what they point to.
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ag_abi": (_I32, ()),
    "ag_path": (ctypes.c_char_p, ()),
    "ag_force_path": (_I32, (ctypes.c_char_p,)),
    "ag_now": (_I64, ()),
    "ag_wait": (_I32, (_POINTER, _U32, _I64, _POINTER, _I64)),
    "ag_post": (None, (_POINTER, _U32)),
    "ag_wake": (None, (_POINTER,)),
    "ag_peek": (_U32, (_POINTER,)),
    "ag_reduce": (_I32, (_POINTER, _POINTER, _I32, _I64, _I32, _I32, ctypes.c_double)),
    "ag_reduce_tree": (_I32, (_POINTER, _POINTER, _I32, _POINTER, _I32, _I64, _I32)),
    "ag_reduce_pages": (
        _I32,
        (_POINTER, _POINTER, _I32, _POINTER, _I32, _POINTER, _I32, _POINTER),
    ),
    "ag_copy_crc32c": (_U32, (_POINTER, _POINTER, _I64, _U32)),
    "ag_crc32c_cells": (None, (_POINTER, _I64, _I64, _I32, _I64, _POINTER)),
    "ag_gather_crc32c": (
        None,
        (_POINTER, _POINTER, _I32, _I64, _POINTER, _POINTER, _I32, _POINTER),
    ),
    "ag_changed": (_I64, (_POINTER, _POINTER, _I64, _I32, _POINTER, _I64)),
    "ag_compare_and_swap": (_I32, (_POINTER, _U64, _U64)),
    "ag_store": (None, (_POINTER, _U64)),
    "ag_load": (_U64, (_POINTER,)),
}


def library() -> ctypes.CDLL | None:
    """The opened kernels (their calls release the GIL), or None: then `state()` says why."""
    return _find()[0]


def quick() -> ctypes.PyDLL | None:
    """The same functions with the GIL kept: for calls that never wait and are shorter than a switch of threads."""
    return _find()[1]


def state() -> State:
    """Which path is in force and why, for people."""
    opened, _, found = _find()
    if opened is None:
        return found
    return found._replace(path=path())


def describe() -> str:
    """The state in a line or two."""
    found = state()
    return f"{found.path} ({found.detail})" + (f"\n  fix: {found.mend}" if found.mend else "")


def path() -> str:
    """The path's name, part of the numerics fingerprint: "avx2", "baseline", … or "torch operations"."""
    opened = library()
    return WITHOUT if opened is None else str(opened.ag_path().decode())


def file() -> Path | None:
    """The shared object beside this file, if one was built."""
    names = (_HERE / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((name for name in names if name.is_file()), None)


@functools.cache
def _find() -> tuple[ctypes.CDLL | None, ctypes.PyDLL | None, State]:
    if os.environ.get(SWITCH, "") == "0":
        detail = f"turned off by {SWITCH}=0"
        return None, None, State(WITHOUT, detail, f"unset {SWITCH}")
    found = file()
    if found is None:
        return None, None, State(WITHOUT, "no native kernels were built", REBUILD)
    try:
        opened, held = ctypes.CDLL(str(found)), ctypes.PyDLL(str(found))
        abi = opened.ag_abi()
        if abi != ABI:
            detail = f"{found.name} has interface {abi}, this version needs {ABI}"
            return None, None, State(WITHOUT, detail, OUTDATED)
        for handle in (opened, held):
            declare(handle, _FUNCTIONS)
    except (OSError, AttributeError) as failure:
        return None, None, State(WITHOUT, f"{found.name} cannot be used: {failure}", OUTDATED)
    return opened, held, State("", found.name)


def forget() -> None:
    """Look again at the next call: for whoever has changed the switch or the object since the first one."""
    _find.cache_clear()


def declare(
    handle: ctypes.CDLL, functions: dict[str, tuple[type | None, tuple[type, ...]]]
) -> None:
    """Set result and argument types of `functions`; AttributeError when the object lacks one."""
    for name, (result, arguments) in functions.items():
        function = getattr(handle, name)
        function.restype = result
        function.argtypes = arguments
