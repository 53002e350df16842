"""`python -m argosy.checkpoint.tiers`: the process that uploads; started by the checkpointer, told what to do on stdin."""

from __future__ import annotations

import sys

from argosy.checkpoint.tiers import serving

if __name__ == "__main__":
    sys.exit(serving.main())
