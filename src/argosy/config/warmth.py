"""What warm parents import unless a role says otherwise; one place for the spec, the command line and a cluster that starts.

Imports nothing: the command line pays for it. A name that ends with `?` is left out where it cannot be imported.
"""

from __future__ import annotations

DEFAULT_PRELOAD = (
    "torch",
    "torch.distributed",
    # What `ar.launch` and a trainer use; the packages themselves are lazy.
    "argosy.worker.launch?",
    "argosy.train.trainer?",
    "argosy.models.transformer?",
    "argosy.data.mixtures?",
    "argosy.data.prefetch?",
)
