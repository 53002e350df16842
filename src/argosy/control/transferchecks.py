"""Which route each pair of processes on this host would use: runs the probe in a child process and reads its report.

Called by `argosy doctor --transfer`. The probe needs torch, so it is started by command line and never imported here.
"""

from __future__ import annotations

import os
import sys

import msgspec

from argosy.control.hostchecks import run_child
from argosy.errors import ClusterError
from argosy.native import isa

_SECONDS = 150.0


class Pair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Two processes: the route they would use and why, and what else would work."""

    first: int
    second: int
    route: str
    why: str
    shared_memory: bool
    process_vm_readv: bool
    gloo: bool
    process_vm_readv_why: str = ""
    gloo_why: str = ""
    copy_gb_per_second: float | None = None
    latency_us: float | None = None
    gloo_gb_per_second: float | None = None
    gloo_latency_us: float | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the probe that did not come through."""

    rank: int
    why: str


class Routes(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report."""

    processes: int
    kernels: str
    pairs: list[Pair]
    failed: list[Failure]

    @property
    def is_broken(self) -> bool:
        """Whether some pair could not work together."""
        return bool(self.failed) or any(pair.route == "none" for pair in self.pairs)


def probe_routes(num_processes: int) -> Routes:
    """Start the probe's processes and wait for their report; ClusterError when there is none."""
    environment = {**os.environ, **isa.environment(os.environ)}
    # The probe stands for itself: inside a run it must not speak as one of its members.
    for name in ("ARGOSY_ATTEMPT", "ARGOSY_KEEPER_SOCKET", "ARGOSY_RUN"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "argosy.move.routeprobe", str(num_processes)]
    code, output, error, _ = run_child(command, timeout_seconds=_SECONDS, environment=environment)
    try:
        return msgspec.json.decode(output, type=Routes)
    except msgspec.DecodeError:
        last = (error.strip().splitlines() or ["nothing"])[-1]
        ending = f"was late ({_SECONDS:g} s)" if code is None else f"ended with {code}"
        raise ClusterError(
            f"the transfer probe {ending} and said: {last}",
            fix="`argosy doctor` names what is broken first, torch above all",
        )
