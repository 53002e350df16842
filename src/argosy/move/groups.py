"""The `argosy` backend of torch.distributed: shared memory inside a host, Gloo across hosts and for what has no kernel.

Importing this module registers it: `import argosy.move.groups`, then `dist.init_process_group("argosy")`. Every collective becomes a
`Request` (arguments.py), waits for its turn (works.py) and goes over the group's route (hosts.py). Names of methods are torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from argosy.errors import ArgosyError
from argosy.move import (
    arguments,
    arrivals,
    callsites,
    counters,
    hosts,
    mapping,
    messages,
    torchgroup,
)
from argosy.move.arguments import Request
from argosy.move.calls import Call, Kind
from argosy.move.hostroute import LAYERED, HostRoute
from argosy.move.messages import as_bytes
from argosy.move.works import ArgosyWork, Turns

NAME = "argosy"
_LOST_SECONDS = 0.8
"""A connection may close a moment before its process has ended."""
Tensors = Sequence[torch.Tensor]


class ArgosyGroup(torchgroup.GroupOverGloo):
    """A process group over shared memory with Gloo beneath."""

    def __init__(self, birth: torchgroup.Birth) -> None:
        cards = arrivals.gather(birth)
        with arrivals.explaining(birth):
            super().__init__(birth)
            self._host = hosts.settle(birth, cards)
            self._route: hosts.Route = self._host.route
            self._is_spread = len(self._host.groups) > 1
            if self._is_spread:
                self._route = HostRoute(self._host, birth, self.gloo)
        self._timeout = birth.timeout
        self._rank, self._size = birth.rank, birth.size
        self._ranks = birth.ranks
        self._mail = messages.Mail(self.gloo, birth, self._is_peer_lost, self._lost_peer)
        self._turns = Turns(birth.name)
        self._is_shut = False
        self._shutting = threading.RLock()

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """This process's rank in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """Ranks in the group."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name of the registration."""
        return NAME

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks share memory."""
        return not self._is_spread

    def tell_all(self, number: int, into: torch.Tensor, what: str) -> None:
        """Everybody's number, by rank, into a tensor of 64-bit integers. `what` says in errors of which call this is a part."""
        request = arguments.gather_single(into, torch.tensor([number]), self._size)
        request.calls[0].label = what
        self._submit(request, torchgroup.gather_options(0, is_async=False), self._no_gloo)

    def common_memory(self, size: int) -> mapping.Mapping:
        """New memory that all ranks of this host map; every rank calls it, in the same order. It lives as long as its tensors."""
        return self._host.common_memory(size, self._timeout.total_seconds())

    def _submit(self, request: Request, options: Any, beneath: Callable[[], Any]) -> ArgosyWork:
        is_async = torchgroup.is_async(options)
        timeout = torchgroup.timeout_seconds(options, self._timeout)
        # Asked here where another thread will make the call: there it cannot be found.
        site = callsites.find(2) if is_async or self._turns.is_busy else ""
        for call in request.calls:
            call.site, call.ranks = site, self._ranks
            call.is_beneath |= self._is_spread and call.kind not in LAYERED

        def job() -> None:
            for call in request.calls:
                self._route.run(call, timeout)
            if request.is_beneath:
                counters.own.gloo_calls += 1
                counters.own.gloo_bytes += sum(call.moved_bytes for call in request.beneath)
                with counters.own.waiting():
                    self._wait_for_gloo(str(request.calls[0]), beneath)
            elif not self._is_spread:  # a route between hosts counts by itself what goes where
                counters.own.shared_memory_calls += 1
                moved = sum(call.moved_bytes for call in request.calls)
                counters.own.shared_memory_bytes += moved
            request.finish()

        return self._turns.take(job, request.result, is_async=is_async)

    def _wait_for_gloo(self, what: str, beneath: Callable[[], Any]) -> None:
        try:
            started = beneath()
            works = started if isinstance(started, list) else [started]
            torchgroup.wait_for(works, lambda: any(map(self._is_lost, range(self._size))))
        except torchgroup.Stuck as stuck:
            torchgroup.abandon(self.gloo)
            raise self._gloo_failure(what, stuck)
        except RuntimeError as failure:
            if not torchgroup.is_of_wire(failure):
                raise  # of the arguments, on all ranks alike
            raise self._gloo_failure(what, failure)
        except BaseException:
            self._route.abort()  # a signal's handler has raised: this rank leaves in the middle of a call
            raise

    def _gloo_failure(self, what: str, failure: Exception) -> ArgosyError:
        if isinstance(self._route, HostRoute):
            return self._route.failed(what, failure)
        lost = self._host.lost_rank(_LOST_SECONDS)
        torchgroup.cut(self.gloo, int(self._rank == 0))  # the others wait for this rank
        name = None if lost is None else self._ranks[lost]
        return messages.explained(f"{what} in group {self.group_name}", failure, name)

    def _is_lost(self, peer: int) -> bool:
        """Whether a process of this host has ended, or the connection to one of another is closed."""
        if peer in self._host.ranks:
            return self._host.lost_rank(0, peer) is not None
        return torchgroup.is_cut(self.gloo, peer)

    def _is_peer_lost(self, peer: int | None) -> bool:
        """Whether a message cannot come: its peer is lost, or everybody is."""
        return all(map(self._is_lost, self._others if peer is None else [peer]))

    def _lost_peer(self, failure: Exception, peer: int | None) -> int | None:
        """The rank whose end is the reason of a message's failure."""
        if peer is not None and peer not in self._host.ranks:
            return None if torchgroup.has_timed_out(failure) else peer
        lost = self._host.lost_rank(_LOST_SECONDS, peer)
        if lost is None and self._is_peer_lost(peer):
            return self._others[0] if peer is None else peer
        return lost

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def send(self, tensors: Tensors, peer: int, tag: int) -> messages.Message:
        """To one rank."""
        return self._mail.send(tensors, peer, tag)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> messages.Message:
        """From one rank."""
        return self._mail.receive(tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> messages.Message:
        """From whichever rank sends first."""
        return self._mail.receive(tensors, None, tag)

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, **_: Any) -> ArgosyWork:
        """Each tensor becomes the reduction of all ranks' tensors, in rank order."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        operation = torchgroup.operation_of(opts)
        request = arguments.in_place(Kind.ALL_REDUCE, tensors, operation)
        options = torchgroup.options_of("allreduce", opts)
        return self._submit(
            request,
            opts,
            lambda: [self.gloo.allreduce(call.outputs, options) for call in request.beneath],
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = 0, **_: Any) -> ArgosyWork:
        """Each tensor becomes the root's."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        request = arguments.in_place(Kind.BROADCAST, tensors, root=torchgroup.root_of(opts))
        return self._submit(request, opts, self._no_gloo)

    def reduce(self, tensors: Tensors | torch.Tensor, opts: Any = 0, *more: Any) -> ArgosyWork:
        """The root's tensors become the reduction."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        operation = torchgroup.operation_of(more[0] if more else getattr(opts, "reduceOp", None))
        root = torchgroup.root_of(opts)
        request = arguments.in_place(Kind.REDUCE, tensors, operation, root)
        options = torchgroup.options_of("reduce", opts)

        # Gloo writes partial sums into the tensors of other ranks than the root: those get copies.
        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if self._rank == root else tensor.clone()

        return self._submit(
            request,
            opts,
            lambda: [self.gloo.reduce([own(*call.outputs)], options) for call in request.beneath],
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> ArgosyWork:
        """Each output list becomes all ranks' inputs."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        requests = [
            arguments.gather_list(Kind.ALL_GATHER, list(into), given, self._size)
            for into, given in arguments.pairs(outputs, inputs)
        ]
        return self._submit(_joined(requests), opts, self._no_gloo)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> ArgosyWork:
        """Several all-gathers into lists."""
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **_: Any
    ) -> ArgosyWork:
        """The output becomes all ranks' inputs, one after the other."""
        request = arguments.gather_single(output, given, self._size)
        return self._submit(request, opts, self._no_gloo)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> ArgosyWork:
        """Several all-gathers at once."""
        requests = [
            arguments.gather_single(output, given, self._size)
            for output, given in arguments.pairs(outputs, inputs)
        ]
        return self._submit(_joined(requests), opts, self._no_gloo)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0, **_: Any) -> ArgosyWork:
        """The root's output list becomes all ranks' inputs."""
        root = torchgroup.root_of(opts)
        given = inputs if isinstance(inputs, torch.Tensor) else inputs[0]
        into: Any = outputs if isinstance(inputs, torch.Tensor) else (outputs or [[]])[0]
        into = list(into) if self._rank == root else []
        num_outputs = self._size if self._rank == root else 0
        request = arguments.gather_list(Kind.GATHER, into, given, num_outputs, root)
        options = torchgroup.options_of("gather", opts)

        def beneath() -> Any:
            (call,) = request.calls
            into = [list(map(as_bytes, call.outputs))] if self._rank == root else []
            return self.gloo.gather(into, list(map(as_bytes, call.inputs)), options)

        return self._submit(request, opts, beneath)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0, **_: Any) -> ArgosyWork:
        """Each output becomes its part of the root's list."""
        root = torchgroup.root_of(opts)
        output = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        given: Any = inputs if isinstance(outputs, torch.Tensor) else (inputs or [[]])[0]
        request = arguments.scatter(
            output,
            list(given) if self._rank == root else [],
            root=root,
            is_root=self._rank == root,
            size=self._size,
        )
        options = torchgroup.options_of("scatter", opts)

        def beneath() -> Any:
            (call,) = request.calls
            given = [list(map(as_bytes, call.inputs))] if self._rank == root else []
            return self.gloo.scatter(list(map(as_bytes, call.outputs)), given, options)

        return self._submit(request, opts, beneath)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> ArgosyWork:
        """Each output becomes the reduction of all ranks' inputs for this rank."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        operation = torchgroup.operation_of(opts)
        requests = [
            arguments.scatter_list(output, list(given), operation, self._size)
            for output, given in arguments.pairs(outputs, inputs)
        ]
        return self._reduce_scatter(_joined(requests), opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **_: Any
    ) -> ArgosyWork:
        """The output becomes this rank's part of the reduction."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> ArgosyWork:
        """Several reduce-scatters at once."""
        operation = torchgroup.operation_of(opts)
        requests = [
            arguments.scatter_single(output, given, operation, self._size)
            for output, given in arguments.pairs(outputs, inputs)
        ]
        return self._reduce_scatter(_joined(requests), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, request: Request, opts: Any) -> ArgosyWork:
        options = torchgroup.options_of("reduce_scatter", opts)
        return self._submit(
            request,
            opts,
            lambda: [
                self.gloo.reduce_scatter(call.outputs, [call.inputs], options)
                for call in request.beneath
            ],
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        **_: Any,
    ) -> ArgosyWork:
        """Part r of the output becomes rank r's part for this rank."""
        splits = (list(output_split_sizes or ()), list(input_split_sizes or ()))
        return self._exchange(arguments.exchange_single(output, given, splits, self._size), opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ArgosyWork:
        """The same with lists."""
        return self._exchange(
            arguments.exchange_list(list(outputs), list(inputs), self._size), opts
        )

    def _exchange(self, request: Request, opts: Any) -> ArgosyWork:
        def beneath() -> Any:
            (call,) = request.calls
            takes, sends = [
                [part.nbytes for part in parts] for parts in (call.outputs, call.inputs)
            ]
            into, given = arguments.room_for(call.outputs, request), arguments.in_one(call.inputs)
            return self.gloo.alltoall_base(as_bytes(into), as_bytes(given), takes, sends)

        return self._submit(request, opts, beneath)

    def barrier(self, opts: Any = None, **_: Any) -> ArgosyWork:
        """Until all ranks are here."""
        call = Call(Kind.MEET, torch.uint8, 0)
        return self._submit(Request([call], []), opts, self._no_gloo)

    def _no_gloo(self) -> Any:
        raise AssertionError("only requests that are beneath reach Gloo")

    def abort(self) -> None:
        """Make every rank leave its waits with an error, and end this group."""
        if not self._is_shut:
            self._route.abort()
        self.shutdown()

    def shutdown(self) -> None:
        """End the group's thread and give its memory back; what others still wait for ends by itself."""
        with self._shutting:  # whoever comes second returns when all is given back
            if self._is_shut:
                return
            if not self._turns.close():
                self._route.abort()
            self.gloo.shutdown()
            # A call that is still under way (this may be a signal's handler inside it) keeps its memory: it goes with the group.
            if self._turns.close():
                self._is_shut = True
                self._route.close()
                self._host.close()

    def set_timeout(self, timeout: Any) -> None:
        """For calls from now on."""
        self._timeout = timeout
        self.gloo.set_timeout(timeout)


def _joined(requests: Sequence[Request]) -> Request:
    """One request of several."""
    return Request(
        [call for request in requests for call in request.calls],
        [entry for request in requests for entry in request.result],
        [pair for request in requests for pair in request.copies_back],
    )


torchgroup.register(NAME, ArgosyGroup)
