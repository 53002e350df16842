"""Collectives of a group whose ranks are on several hosts: shared memory inside each, Gloo between their first ranks.

All-reduce, broadcast and meetings go in three parts: inside the host, between the leaders, inside the host again. Additions happen in
rank order inside a host, then in host order, on every host alike: equal bits everywhere. What else there is goes to Gloo as it is.
Made by groups.py, which knows Gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from argosy.errors import NoRoute
from argosy.move import kernels, torchgroup
from argosy.move.calls import Call, Kind, Operation
from argosy.move.hosts import Host, Route

LAYERED = frozenset({Kind.MEET, Kind.ALL_REDUCE, Kind.BROADCAST})


class HostRoute:
    """The route of one process among several hosts; `leaders` is Gloo between the first ranks, None elsewhere."""

    def __init__(self, host: Host, inside: Route, leaders: Any) -> None:
        self._host = host
        self._inside = inside
        self._leaders = leaders
        self._home = {rank: index for index, group in enumerate(host.groups) for rank in group}

    def run(self, call: Call, timeout_seconds: float) -> None:
        """Carry out one call."""
        # In whichever thread this runs: the caller's tensors may be of its inference mode.
        with torch.inference_mode():
            self._run(call, timeout_seconds)

    def _run(self, call: Call, timeout_seconds: float) -> None:
        if call.is_beneath or call.kind not in LAYERED:
            self._meet_inside(call, timeout_seconds)
        elif call.kind is Kind.ALL_REDUCE:
            self._all_reduce(call, timeout_seconds)
        elif call.kind is Kind.BROADCAST:
            self._broadcast(call, timeout_seconds)
        else:
            self._meet_inside(call, timeout_seconds)
            if self._leaders is not None:
                self._between(call, self._leaders.barrier)
            self._meet_inside(call, timeout_seconds)

    def _meet_inside(self, call: Call, timeout_seconds: float) -> None:
        """All ranks of this host must have made the same call before it leaves the host."""
        said = Call(call.kind, call.dtype, call.count, operation=call.operation, root=call.root)
        said.factor, said.site, said.is_beneath = call.factor, call.site, call.kind is not Kind.MEET
        self._inside.run(said, timeout_seconds)

    def _all_reduce(self, call: Call, timeout_seconds: float) -> None:
        # The parts below no longer tell an average from a sum, nor halves from singles.
        self._meet_inside(call, timeout_seconds)
        given, out = call.inputs[0], call.outputs[0]
        is_half = call.dtype in (torch.bfloat16, torch.float16)
        # Halves travel in single precision and are rounded once, at the end.
        total = given.float() if is_half else out
        operation = Operation.SUM if call.operation is Operation.AVG else call.operation
        inner = Call(Kind.REDUCE, total.dtype, call.count, [total if is_half else given], [total])
        inner.operation, inner.factor, inner.site = operation, call.factor, call.site
        self._inside.run(inner, timeout_seconds)
        if self._leaders is not None:
            parts = [torch.empty_like(total) for _ in self._host.groups]
            self._between(
                call, lambda: self._leaders.allgather([list(map(_bytes, parts))], [_bytes(total)])
            )
            between = Operation.SUM if operation is Operation.PREMUL_SUM else operation
            if total.numel():
                kernels.reduce(total, parts, between.name.lower())
            if call.operation is Operation.AVG:
                total.div_(sum(len(group) for group in self._host.groups))
        if is_half:
            out.copy_(total)
        self._spread(call, 0, timeout_seconds)

    def _broadcast(self, call: Call, timeout_seconds: float) -> None:
        home = self._home[call.root]
        is_home = home == self._home[self._host.ranks[self._host.index]]
        self._meet_inside(call, timeout_seconds)
        if is_home:
            self._spread(call, self._host.ranks.index(call.root), timeout_seconds)
        if self._leaders is not None:
            options = torchgroup.broadcast_options(home)
            memory = _bytes(call.outputs[0])
            self._between(call, lambda: self._leaders.broadcast([memory], options))
        if not is_home:
            self._spread(call, 0, timeout_seconds)

    def _spread(self, call: Call, index: int, timeout_seconds: float) -> None:
        out = call.outputs[0]
        inner = Call(Kind.BROADCAST, call.dtype, call.count, [out], [out], root=index)
        inner.site = call.site
        self._inside.run(inner, timeout_seconds)

    def _between(self, call: Call, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as failure:
            # The others of this host wait for this rank: they must not do so until their deadline.
            self._inside.abort()
            raise NoRoute(
                f"{call}: Gloo between the hosts has failed: {failure}",
                fix="see the first failure on the other hosts",
            )

    def abort(self) -> None:
        """Make every rank of this host leave what it waits for; Gloo's end tells the other hosts."""
        self._inside.abort()
        if self._leaders is not None:
            self._leaders.abort()

    def close(self) -> None:
        """Let go of shared memory and of the connections between leaders."""
        self._inside.close()
        if self._leaders is not None:
            self._leaders.shutdown()
            self._leaders = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Gloo does not know all dtypes; bytes it does."""
    return tensor.view(-1).view(torch.uint8)
