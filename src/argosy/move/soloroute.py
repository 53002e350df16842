"""Collectives of a group of one rank, or inside a host that has only one rank of a group.

hosts.py takes this route where there is nobody to share memory with; hostroute.py uses it like any other for its part inside a host.
Inputs become outputs; nothing is held, nobody is waited for.
"""

from __future__ import annotations

import torch

from argosy.errors import MismatchError
from argosy.move.calls import REDUCING, Call, Kind, Operation


class SoloRoute:
    """The route of a group of one."""

    def run(self, call: Call, timeout_seconds: float) -> None:
        """Copy what is not in place already."""
        if call.is_beneath or call.kind is Kind.MEET:
            return
        with torch.inference_mode():
            for given, output in zip(call.inputs, call.outputs, strict=True):
                if given.numel() != output.numel():
                    raise MismatchError(
                        f"{call}: {given.numel()} elements for an output of {output.numel()}",
                        fix="give equal sizes",
                    )
                if given.data_ptr() != output.data_ptr():
                    output.view(-1).copy_(given.view(-1))
                if call.kind in REDUCING and call.operation is Operation.PREMUL_SUM:
                    output.mul_(call.factor)

    def abort(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""
