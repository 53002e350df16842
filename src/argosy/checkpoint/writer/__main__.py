"""`python -m argosy.checkpoint.writer STORE`: becomes the writer process of this host for a store.

The process that was started ends as soon as the socket is there; what goes on is its fork, a child of nobody, so that neither the death of the
rank that started it nor a signal to the rank's process group ends a save.
"""

from __future__ import annotations

import os
import socket
import sys

from argosy.checkpoint import names, processes, sockets
from argosy.checkpoint.writer import pacing, serving


def main() -> int:
    """0 when a writer is there, this one or another."""
    store = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = sockets.listen(store, names.socket_name(socket.gethostname()))
    if listener is None or os.fork():
        # Not sys.exit(): the fork owns everything now.
        os._exit(0)
    processes.leave_terminal()
    pacing.lower_priority()
    serving.Serving(listener, store).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
