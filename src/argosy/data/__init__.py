"""Batches: token files, other data sets, mixtures of them, and the order in which they are read.

`ar.data.Tokens`, `ar.data.Mixture` and `ar.data.as_source` describe data; `.feed(batch_size, lanes, seed)` of each gives
`batch(index, lane)`, a pure function: where a run stands in its data is its step number. Importing this package imports
neither torch nor numpy: names are loaded when they are first used, so the command line can use its torch-free parts.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argosy.data.batches import Batch
    from argosy.data.corpus import stdlib_corpus
    from argosy.data.datasets import as_source
    from argosy.data.feeds import Feed
    from argosy.data.mixtures import Mixture
    from argosy.data.packing import pack
    from argosy.data.prefetch import Ahead
    from argosy.data.tokens import Tokens

__all__ = ["Ahead", "Batch", "Feed", "Mixture", "Tokens", "as_source", "pack", "stdlib_corpus"]

_PUBLIC = {
    "Ahead": "argosy.data.prefetch",
    "Batch": "argosy.data.batches",
    "Feed": "argosy.data.feeds",
    "Mixture": "argosy.data.mixtures",
    "Tokens": "argosy.data.tokens",
    "as_source": "argosy.data.datasets",
    "pack": "argosy.data.packing",
    "stdlib_corpus": "argosy.data.corpus",
}


def __getattr__(name: str) -> object:
    import importlib

    if name not in _PUBLIC:
        raise AttributeError(f"module 'argosy.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
