"""Argosy: a training runtime for PyTorch.

Importing this package is cheap and never imports torch: public names are loaded when they are first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself costs more than the rest of this import
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "join": ("argosy.worker.gang", "join"),
    "Gang": ("argosy.worker.gang", "Gang"),
    "RunSpec": ("argosy.config.spec", "RunSpec"),
    "RoleSpec": ("argosy.config.spec", "RoleSpec"),
    "RunHandle": ("argosy.control.submission", "RunHandle"),
    "submit": ("argosy.control.submission", "submit"),
    "RunFailed": ("argosy.errors", "RunFailed"),
    "GenerationChanged": ("argosy.errors", "GenerationChanged"),
}

__all__ = [
    "Gang",
    "GenerationChanged",
    "RoleSpec",
    "RunFailed",
    "RunHandle",
    "RunSpec",
    "__version__",
    "join",
    "submit",
]


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}") from None
    import importlib

    return getattr(importlib.import_module(module), attribute)
