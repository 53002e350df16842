"""`python -m argosy.checkpoint.peers DIRECTORY HOST BYTES KEEP SECONDS`: becomes the holder of a host's memory.

The process that was started ends as soon as the socket is there; what goes on is its fork, a child of nobody, so that nothing that happens to the
ranks ends it.
"""

from __future__ import annotations

import os
import sys

from argosy.checkpoint import names, processes, sockets
from argosy.checkpoint.peers.serving import Serving
from argosy.checkpoint.peers.shelves import Shelves
from argosy.checkpoint.writer import pacing
from argosy.move import hostmemory


def main() -> int:
    """0 when a holder is there, this one or another."""
    path, host, memory_bytes, keep, linger_seconds = sys.argv[1:]
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = sockets.listen(directory, names.holder_name(host))
    if listener is None or os.fork():
        # Not sys.exit(): the fork owns everything now.
        os._exit(0)
    processes.leave_terminal()
    pacing.lower_priority()
    most_bytes = int(memory_bytes) or hostmemory.available_bytes() // 2
    shelves = Shelves(most_bytes=most_bytes, keep=int(keep))
    serving = Serving(listener, directory, names.holder_name(host), shelves)
    serving.serve(float(linger_seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
