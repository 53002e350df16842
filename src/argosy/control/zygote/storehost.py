"""The helper of a gang: hosts the generation's TCPStore on a socket that the keeper is listening on already.

Forked before the ranks, so none of them waits for rank 0 to get there. Ends when the keeper kills it or dies.
"""

from __future__ import annotations

import signal
import socket
import sys
from typing import Any, NoReturn


def serve(listener: int | None) -> NoReturn:
    """Host the store until this process is killed."""
    if listener is None:
        raise ValueError("a store's helper was given no listening socket")
    listening = socket.socket(fileno=listener)
    host, port = listening.getsockname()[:2]
    listening.detach()  # the store closes it
    distributed: Any = sys.modules["torch.distributed"]
    store = distributed.TCPStore(
        host, port, None, True, wait_for_workers=False, master_listen_fd=listener
    )
    while store is not None:
        signal.pause()
    raise AssertionError("unreachable")
