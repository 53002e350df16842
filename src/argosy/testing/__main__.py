"""`python -m argosy.testing`: the simulator's campaign; see campaign.py."""

from __future__ import annotations

from argosy.testing.campaign import main

# Workers of the campaign import this module too.
if __name__ == "__main__":
    raise SystemExit(main())
