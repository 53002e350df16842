"""Where in the user's program a collective was called: the innermost frame outside torch and this package.

Asked by groups.py when a call is handed to another thread, and by verdicts.py when something is wrong; a fault-free call that runs
in its caller's thread never pays for it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from types import FrameType, FunctionType

import torch
import torch.distributed as dist

_FOREIGN = tuple(f"{Path(name).parent}/" for name in (torch.__file__, __file__))
_THREADS = threading.__file__
# What torch's collectives are wrapped in (deprecated names, coalescing managers) stands in files outside torch.
_WRAPPERS = {contextlib.__file__} | {
    value.__code__.co_filename for value in vars(dist).values() if type(value) is FunctionType
}
NOWHERE = "C++ code of torch (no Python frame: a backward pass or a hook)"


def find(depth: int = 1) -> str:
    """`file:line in function` of whoever called; `depth` frames of the caller itself are skipped."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name == _THREADS:
            return NOWHERE
        if not name.startswith((*_FOREIGN, "<")) and name not in _WRAPPERS:
            return f"{name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return NOWHERE
