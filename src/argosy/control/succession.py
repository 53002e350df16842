"""Succession: a new keeper in the place of a dead one, with the descriptors that the survivors hold.

Called by the agent, or by the controller when there is no agent left. Sweeps first; blocks, so it is called in a thread. Who holds what
before that is keeperlink.py's (agent) and blobs.py's (controller) business.
"""

from __future__ import annotations

import logging
import socket

from argosy.control.home import Cluster
from argosy.control.keeper.sweep import start_keeper, sweep_dead_keeper
from argosy.control.keeperlink import Held

logger = logging.getLogger("argosy.succession")
_HAND_OVER_SECONDS = 15.0


def replace_keeper(cluster: Cluster, held: Held) -> None:
    """Sweep what the dead keeper left, start a new one, and hand the descriptors over; OSError or ClusterError."""
    for what in sweep_dead_keeper(cluster.directory, cluster.runtime):
        logger.info("swept %s", what)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_HAND_OVER_SECONDS)
        start_keeper(cluster.directory, cluster.runtime, inherit_fd=theirs.fileno())
        theirs.close()
        try:
            count = held.hand_over(ours)
        except (BrokenPipeError, ConnectionResetError):
            # Somebody else's new keeper was faster, and this one ended at once.
            logger.info("another keeper has taken over")
            return
    logger.info("a new keeper was started and given %d descriptors", count)
