"""Order of roles: start order from the spec's order and its dependencies, and the cycle if there is one.

Called by the spec's checks, by the supervisor and by placement; pure.
"""

from __future__ import annotations

from argosy.config.checks import start_order

__all__ = ["start_order"]
