"""Entry of `python -m argosy.control.zygote --socket FD`.

The same module is the top of the stack of the zygote and of every process forked from it: `serve` returns here in a forked
process with its assignment, so that a user's program never runs inside the zygote's loop.
"""

from __future__ import annotations

import argparse
import socket
import sys

from argosy.control.zygote import parent, rank


def _parse(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m argosy.control.zygote")
    parser.add_argument("--socket", type=int, required=True, help="descriptor to the keeper")
    return int(parser.parse_args(arguments).socket)


assignment = parent.serve(socket.socket(fileno=_parse(sys.argv[1:])))
if assignment is not None:
    rank.become(assignment)
