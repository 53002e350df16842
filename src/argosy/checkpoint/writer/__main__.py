"""`python -m argosy.checkpoint.writer STORE`: becomes the writer process of this host for a store.

The process that was started ends as soon as the socket is there; what goes on is its fork, a child of nobody, so that neither the death of the
rank that started it nor a signal to the rank's process group ends a save. With `--stay` it goes on itself: as a run of a cluster.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

from argosy.checkpoint import names, processes, sockets
from argosy.checkpoint.writer import pacing, serving


def main() -> int:
    """0 when a writer is there, this one or another."""
    told = _arguments()
    store = os.open(told.store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = sockets.listen(store, names.socket_name(socket.gethostname()))
    if listener is None or (not told.stay and os.fork()):
        # Not sys.exit(): the fork owns everything now.
        os._exit(0)
    if told.stay:
        # It ends by itself when nobody is left, and not before: ranks that are stopped beside it still have something to save.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        sockets.inherit(listener)
        processes.leave_terminal()
    pacing.lower_priority()
    serving.Serving(listener, store).serve()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m argosy.checkpoint.writer")
    parser.add_argument("store", help="the directory of the checkpoints")
    parser.add_argument("--stay", action="store_true", help="do not go into the background")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
