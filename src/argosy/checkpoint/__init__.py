"""State at rest: checkpoints that are never torn, checked to the last byte, and load into any layout.

Public names are loaded when they are first used: importing this package imports neither torch nor its own modules.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PUBLIC = {
    "Checkpointer": "checkpointer",
    "Keep": "retention",
    "Objects": "tiers.settings",
    "Opened": "opened",
    "Peers": "peers.settings",
    "PerRank": "registry",
    "Rules": "loading",
    "SaveHandle": "handles",
    "Writing": "deliveries",
}

__all__ = [
    "Checkpointer",
    "Keep",
    "Objects",
    "Opened",
    "Peers",
    "PerRank",
    "Rules",
    "SaveHandle",
    "Writing",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _PUBLIC:
        raise AttributeError(f"module 'argosy.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"argosy.checkpoint.{_PUBLIC[name]}"), name)
