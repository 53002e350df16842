"""Argosy: a training runtime for PyTorch.

Importing this package is cheap and never imports torch: public names are loaded when they are first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself costs more than the rest of this import
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "checkpoint": "argosy.checkpoint",
    "data": "argosy.data",
    "models": "argosy.models",
    "schedules": "argosy.train.schedules",
}
_PUBLIC = {
    "launch": ("argosy.worker.launch", "launch"),
    "Run": ("argosy.worker.run", "Run"),
    "Trainer": ("argosy.train.trainer", "Trainer"),
    "Settings": ("argosy.train.settings", "Settings"),
    "Guard": ("argosy.train.guards", "Guard"),
    "Checkpoints": ("argosy.train.checkpoints", "Checkpoints"),
    "join": ("argosy.worker.gang", "join"),
    "Gang": ("argosy.worker.gang", "Gang"),
    "RunSpec": ("argosy.config.spec", "RunSpec"),
    "RoleSpec": ("argosy.config.spec", "RoleSpec"),
    "RunHandle": ("argosy.control.submission", "RunHandle"),
    "submit": ("argosy.control.submission", "submit"),
    "submit_array": ("argosy.control.submission", "submit_array"),
    "RunFailed": ("argosy.errors", "RunFailed"),
    "GenerationChanged": ("argosy.errors", "GenerationChanged"),
}

__all__ = [
    "Checkpoints",
    "Gang",
    "GenerationChanged",
    "Guard",
    "RoleSpec",
    "Run",
    "RunFailed",
    "RunHandle",
    "RunSpec",
    "Settings",
    "Trainer",
    "__version__",
    "checkpoint",
    "data",
    "join",
    "launch",
    "models",
    "schedules",
    "submit",
    "submit_array",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    try:
        module, attribute = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), attribute)
