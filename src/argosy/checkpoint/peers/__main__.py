"""`python -m argosy.checkpoint.peers DIRECTORY HOST`: becomes the holder of a host's memory.

The process that was started ends as soon as the socket is there; what goes on is its fork, a child of nobody, so that nothing that happens to the
ranks ends it. With `--stay` it goes on itself: for whoever supervises it.
"""

from __future__ import annotations

import argparse
import os
import sys

from argosy.checkpoint import names, processes, sockets
from argosy.checkpoint.peers.serving import Serving
from argosy.checkpoint.peers.shelves import Shelves
from argosy.checkpoint.writer import pacing
from argosy.errors import ConfigError
from argosy.move import hostmemory


def main() -> int:
    """0 when a holder is there, this one or another."""
    told = _arguments()
    name = names.holder_name(told.host)
    os.makedirs(told.directory, mode=0o700, exist_ok=True)
    directory = os.open(told.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = sockets.listen(directory, name)
    if told.stay and listener is None:
        print(f"another holder answers for {told.host}", file=sys.stderr)
        return ConfigError.exit_code
    if listener is None or (not told.stay and os.fork()):
        # Not sys.exit(): the fork owns everything now.
        os._exit(0)
    if not told.stay:
        processes.leave_terminal()
    pacing.lower_priority()
    most_bytes = told.memory_bytes or hostmemory.available_bytes() // 2
    shelves = Shelves(most_bytes=most_bytes, keep=told.keep)
    Serving(listener, directory, name, shelves).serve(told.linger_seconds)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m argosy.checkpoint.peers")
    parser.add_argument("directory", help="where the holders' sockets lie")
    parser.add_argument("host", help="whose memory it holds")
    parser.add_argument("--memory-bytes", type=int, default=0, help="0: half of what is free")
    parser.add_argument("--keep", type=int, default=2, help="whole steps that stay")
    parser.add_argument(
        "--linger-seconds", type=float, default=3600.0, help="how long it waits for anybody"
    )
    parser.add_argument("--stay", action="store_true", help="do not go into the background")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
