"""Collectives of a group whose ranks are on several hosts: shared memory inside each, Gloo between their first ranks.

Every call is agreed upon first, inside each host and then between the hosts (agreements.py). Most then go in three parts: inside the host,
between the leaders, inside the host again; gather, scatter and all-to-all go to Gloo as they are. Additions happen in rank order inside a
host, then in host order, on every host alike: equal bits everywhere. Made by groups.py, which knows Gloo.
"""

from __future__ import annotations

import torch

from argosy.errors import ArgosyError, ConfigError, MismatchError, NoRoute
from argosy.move import counters, kernels, leaders, torchgroup
from argosy.move.agreements import Agreement
from argosy.move.calls import Call, Kind, Operation
from argosy.move.hosts import Host, Route
from argosy.move.leaders import Leaders, Notes, Reason
from argosy.move.messages import as_bytes

LAYERED = frozenset(
    {
        Kind.MEET,
        Kind.ALL_REDUCE,
        Kind.BROADCAST,
        Kind.ALL_GATHER,
        Kind.REDUCE_SCATTER,
        Kind.REDUCE,
    }
)
_GRACE_SECONDS = 3.0
"""The others of a host wait for their leader longer than it waits for other hosts: it then tells them who did not come."""
_LOST_SECONDS = 0.25
"""A connection may close a moment before its process has ended; the other hosts wait for what is found here."""
_HALVES = (torch.bfloat16, torch.float16)


class HostRoute:
    """The route of one process among several hosts; only the first rank of each host has connections to others."""

    def __init__(self, host: Host, birth: torchgroup.Birth, whole: torchgroup.Gloo) -> None:
        self._host = host
        self._inside: Route = host.route
        self._group = birth.name
        self._rank, self._ranks = birth.rank, birth.ranks
        self._name = birth.ranks[birth.rank]
        self._home = {rank: index for index, group in enumerate(host.groups) for rank in group}
        self._here = self._home[birth.rank]
        self._whole = whole
        self._notes = Notes(birth.store)
        self._leaders: Leaders | None = None
        if host.index == 0:
            firsts = [birth.ranks[group[0]] for group in host.groups]
            store = torchgroup.inner_store(birth.store, "leaders")
            gloo = torchgroup.gloo(store, self._here, len(firsts), birth.timeout)
            self._leaders = Leaders(gloo, self._notes, firsts, self._here, self._inside.abort)
        self._agreement = Agreement(host, birth, whole, self._leaders)

    def run(self, call: Call, timeout_seconds: float) -> None:
        """Carry out one call; raises PeerLost, TimedOut or MismatchError."""
        if self._leaders is not None and self._leaders.reason is not None:
            raise self._leaders.reason.error(str(call), self._group)
        # In whichever thread this runs: the caller's tensors may be of its inference mode.
        with torch.inference_mode():
            try:
                self._agreement.reach(call, timeout_seconds, timeout_seconds + _GRACE_SECONDS)
                self._carry_out(call, timeout_seconds)
                self._count(call)
            except MismatchError:
                raise  # the group is as it was before the call
            except leaders.Failed:
                raise self._reason(str(call))
            except RuntimeError as failure:
                raise self.failed(str(call), failure)
            except ConfigError as failure:
                # A leader that leaves ends the waits of its host.
                raise self._ended(str(call), failure)
            except BaseException as failure:
                self._leave(failure)
                raise

    def failed(self, what: str, failure: Exception) -> ArgosyError:
        """The error of a call that Gloo was to carry out and could not."""
        lost = self._host.lost_rank(_LOST_SECONDS)
        torchgroup.cut(self._whole, int(self._rank == 0))  # the others wait for this rank
        reason: Reason | None = None if lost is None else Reason("lost", self._ranks[lost])
        if reason is not None:
            if self._leaders is not None:
                self._leaders.leave(reason)
        elif self._leaders is not None:
            own = Reason("failed", self._name, str(failure))
            reason = self._leaders.fail(own, is_late=torchgroup.has_timed_out(failure))
        else:
            self._inside.abort()  # the leader may have its part and be in the next call
            reason = self._notes.wait_for(leaders.verdict_key(self._here), _GRACE_SECONDS)
        if reason is None:
            return NoRoute(f"{what}: Gloo has failed: {failure}", fix="make a new process group")
        return reason.error(what, self._group)

    def _ended(self, what: str, failure: ConfigError) -> ArgosyError:
        """This host's segment was broken off: by its leader, who says why, or by another rank, and the leader finds out why."""
        if self._leaders is not None:
            own = Reason.of(failure, self._name)
            return self._leaders.fail(own, is_late=False).error(what, self._group)
        reason = self._notes.wait_for(leaders.verdict_key(self._here), _GRACE_SECONDS)
        return failure if reason is None else reason.error(what, self._group)

    def _reason(self, what: str) -> ArgosyError:
        assert self._leaders is not None
        assert self._leaders.reason is not None
        return self._leaders.reason.error(what, self._group)

    def _leave(self, failure: BaseException) -> None:
        if self._leaders is not None:
            self._leaders.leave(Reason.of(failure, self._name))
        else:
            self._inside.abort()

    def _count(self, call: Call) -> None:
        """Bytes are counted where they go; a call beneath is counted by groups.py."""
        if len(self._host.ranks) > 1:
            counters.own.shared_memory_calls += 1
        if self._leaders is not None and not call.is_beneath:
            counters.own.gloo_calls += 1

    def _carry_out(self, call: Call, timeout_seconds: float) -> None:
        if call.is_beneath or call.kind is Kind.MEET:
            return  # the agreement was the meeting; Gloo does the rest
        if call.kind is Kind.ALL_REDUCE:
            self._all_reduce(call, timeout_seconds)
        elif call.kind is Kind.BROADCAST:
            self._broadcast(call, timeout_seconds)
        elif call.kind is Kind.ALL_GATHER:
            self._all_gather(call, timeout_seconds)
        elif call.kind is Kind.REDUCE_SCATTER:
            self._reduce_scatter(call, timeout_seconds)
        else:
            self._reduce(call, timeout_seconds)

    def _all_reduce(self, call: Call, timeout_seconds: float) -> None:
        out = call.outputs[0]
        total = self._reduced_inside(call, call.inputs[0], out, timeout_seconds)
        if self._leaders is not None:
            self._add_up(call, total, self._leaders.gather(total, timeout_seconds))
        if total is not out:
            out.copy_(total)
        self._spread(call, out, 0, timeout_seconds)

    def _reduce(self, call: Call, timeout_seconds: float) -> None:
        """Only the root's tensor is written: the others' sums are in memory of their own."""
        home, is_root = self._home[call.root], call.root == self._rank
        given = call.inputs[0]
        room = torch.empty_like(given)
        total = self._reduced_inside(call, given, room, timeout_seconds)
        if self._leaders is not None:
            self._add_up(call, total, self._leaders.gather(total, timeout_seconds))
        if home == self._here:
            if total is not room:
                room.copy_(total)
            self._spread(call, room, 0, timeout_seconds)
            if is_root:
                call.outputs[0].copy_(room)

    def _reduce_scatter(self, call: Call, timeout_seconds: float) -> None:
        """Each leader sends every host the sums of its own for that host's ranks, and adds up what it gets."""
        order = [rank for group in self._host.groups for rank in group]
        whole = torch.cat([call.inputs[rank].reshape(-1) for rank in order])
        total = self._reduced_inside(call, whole, whole, timeout_seconds)
        num_here, num_hosts = len(self._host.ranks), len(self._host.groups)
        rows: list[torch.Tensor] = []
        if self._leaders is not None:
            parts = torch.empty((num_hosts, num_here * call.count), dtype=total.dtype)
            counts = [len(group) * call.count for group in self._host.groups]
            self._leaders.exchange(parts, total, counts, timeout_seconds)
            sums = torch.empty_like(parts[0])
            self._add_up(call, sums, list(parts))
            rows = list(sums.to(call.dtype).view(num_here, call.count))
        inner = Call(Kind.SCATTER, call.dtype, call.count, rows, [call.outputs[0]])
        self._run_inside(inner, call, timeout_seconds)

    def _all_gather(self, call: Call, timeout_seconds: float) -> None:
        """Each host's part once over the wire; hosts of fewer ranks fill theirs up."""
        most = max(map(len, self._host.groups))
        whole = torch.empty((len(self._host.groups), most, call.count), dtype=call.dtype)
        mine = torch.empty_like(whole[0])
        as_bytes(mine).zero_()  # what fills up is sent too
        rows = [] if self._leaders is None else list(mine[: len(self._host.ranks)])
        inner = Call(Kind.GATHER, call.dtype, call.count, call.inputs, rows)
        self._run_inside(inner, call, timeout_seconds)
        if self._leaders is not None:
            self._leaders.gather(mine, timeout_seconds, list(whole))
        self._spread(call, whole, 0, timeout_seconds)
        for index, group in enumerate(self._host.groups):
            for row, rank in zip(whole[index], group, strict=False):
                call.outputs[rank].view(-1).copy_(row)

    def _broadcast(self, call: Call, timeout_seconds: float) -> None:
        home, out = self._home[call.root], call.outputs[0]
        if home == self._here:
            self._spread(call, out, self._host.ranks.index(call.root), timeout_seconds)
        if self._leaders is not None:
            self._leaders.broadcast(out, home, timeout_seconds)
        if home != self._here:
            self._spread(call, out, 0, timeout_seconds)

    def _reduced_inside(
        self, call: Call, given: torch.Tensor, room: torch.Tensor, timeout_seconds: float
    ) -> torch.Tensor:
        """This host's sums, at its leader: in `room`, or for halves in single precision, to be rounded once at the end."""
        total = given.float() if call.dtype in _HALVES else room
        source = total if call.dtype in _HALVES else given
        inner = Call(Kind.REDUCE, total.dtype, total.numel(), [source], [total])
        inner.operation, inner.factor = call.operation, call.factor
        if call.operation is Operation.AVG:
            inner.operation = Operation.SUM
        self._run_inside(inner, call, timeout_seconds)
        return total

    def _add_up(self, call: Call, total: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """The hosts' sums in host order, the same on every leader."""
        operation = call.operation
        if operation in (Operation.AVG, Operation.PREMUL_SUM):
            operation = Operation.SUM
        if total.numel():
            kernels.reduce(total, parts, operation.name.lower())
        if call.operation is Operation.AVG:
            total.div_(len(self._home))

    def _spread(self, call: Call, tensor: torch.Tensor, index: int, timeout_seconds: float) -> None:
        inner = Call(Kind.BROADCAST, tensor.dtype, tensor.numel(), [tensor], [tensor], root=index)
        self._run_inside(inner, call, timeout_seconds)

    def _run_inside(self, inner: Call, call: Call, timeout_seconds: float) -> None:
        inner.site, inner.label = call.site, str(call)
        if len(self._host.ranks) > 1:
            counters.own.shared_memory_bytes += inner.moved_bytes
        self._inside.run(inner, timeout_seconds + _GRACE_SECONDS)

    def abort(self) -> None:
        """Make every rank leave what it waits for, on all hosts."""
        if self._leaders is not None:
            text = f"rank {self._name} has aborted it"
            self._leaders.leave(Reason("ended", self._name, text))
        self._inside.abort()

    def close(self) -> None:
        """Let go of shared memory and of the connections between leaders."""
        self._inside.close()
        if self._leaders is not None:
            self._leaders.close()
