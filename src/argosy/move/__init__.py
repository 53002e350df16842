"""Data movement: arenas, exchange, collectives, boxes and plans.

Public names are loaded when they are first used: importing this package imports neither torch nor its own modules. What shares its name with
a module is imported from there: `from argosy.move.reshard import reshard`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PUBLIC = {
    "Arena": "arenas",
    "BundleTransfer": "commits",
    "Committed": "commits",
    "Layout": "layout",
    "Parameter": "layout",
    "Pieces": "placements",
    "Plan": "plans",
    "Pool": "pools",
    "Round": "rounds",
    "discover": "bundles",
    "flatten": "bundles",
    "fsdp_fast_path": "fsdp",
    "plan": "plans",
    "prepare": "reshard",
    "prove": "locality",
    "spec_of": "placements",
}

__all__ = [
    "Arena",
    "BundleTransfer",
    "Committed",
    "Layout",
    "Parameter",
    "Pieces",
    "Plan",
    "Pool",
    "Round",
    "discover",
    "flatten",
    "fsdp_fast_path",
    "plan",
    "prepare",
    "prove",
    "spec_of",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'argosy.move' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"argosy.move.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
