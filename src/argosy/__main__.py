"""`python -m argosy` is the `argosy` command."""

from __future__ import annotations

import sys

from argosy.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
