"""Argosy: a training runtime for PyTorch.

Importing this package is cheap and never imports torch: public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "join": ("argosy.worker.gang", "join"),
    "Gang": ("argosy.worker.gang", "Gang"),
    "RunSpec": ("argosy.config.spec", "RunSpec"),
    "RoleSpec": ("argosy.config.spec", "RoleSpec"),
}

__all__ = ["Gang", "RoleSpec", "RunSpec", "__version__", "join"]


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), attribute)
