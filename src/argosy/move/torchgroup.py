"""The one file that touches internals of torch.distributed; a contract test names each of them.

Gives groups.py a process group with Gloo beneath, the registration of a backend, plain values out of torch's option objects, and a Work.
Knows nothing of shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api

from argosy.errors import NoRoute
from argosy.move import forks
from argosy.move.calls import Operation

Store = Any
"""A torch.distributed store; torch does not type it."""
Gloo = Any
"""A Gloo backend; torch does not type its methods as they are called."""
_UNUSED_TAG = 0x6172676F
_WATCH_SECONDS = 0.2
# The methods' signatures in torch's stubs are not those that torch calls: types stop here.
_ProcessGroup: Any = dist.ProcessGroup
_Gloo: Any = c10d.ProcessGroupGloo

AllGather: Any = _fsdp_api.AllGather
ReduceScatter: Any = _fsdp_api.ReduceScatter

_OPERATIONS = {
    dist.ReduceOp.SUM: Operation.SUM,
    dist.ReduceOp.AVG: Operation.AVG,
    dist.ReduceOp.MIN: Operation.MIN,
    dist.ReduceOp.MAX: Operation.MAX,
    dist.ReduceOp.PRODUCT: Operation.PRODUCT,
    dist.ReduceOp.PREMUL_SUM: Operation.PREMUL_SUM,
    dist.ReduceOp.BAND: Operation.BAND,
    dist.ReduceOp.BOR: Operation.BOR,
    dist.ReduceOp.BXOR: Operation.BXOR,
}


class Birth:
    """What torch tells a backend when a group is made."""

    def __init__(self, options: Any) -> None:
        self.store: Store = options.store
        self.rank = int(options.group_rank)
        self.size = int(options.group_size)
        self.ranks = list(options.global_ranks_in_group) or list(range(self.size))
        """The program's own number of each rank of the group: what people are told. Torch names none for the default group."""
        self.timeout: timedelta = options.timeout
        self.name = str(options.group_id)


def register(name: str, make: Callable[[Birth], Any]) -> None:
    """Make `init_process_group(name)` and `new_group(backend=name)` call `make`; once per process is enough, twice is harmless."""
    if name.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(
        name, lambda options, _: make(Birth(options)), extended_api=True, devices=["cpu"]
    )


def inner_store(store: Store, name: str) -> Store:
    """A part of a store that nobody else uses."""
    return c10d.PrefixStore(name, store)


def gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A Gloo backend of its own, over a part of a store that nobody else uses; its connections stay out of forked children."""
    before = forks.listening()
    options = _Gloo._Options()
    options._devices = _devices()
    options._threads, options._timeout = 2 * len(options._devices), timeout
    own = forks.listening() - before
    store.set(f"listens{rank}", json.dumps(sorted(own)))
    backend = _Gloo(store, rank, size, options)
    told = store.multi_get([f"listens{other}" for other in range(size) if other != rank])
    others = {(host, port) for text in told for host, port in json.loads(text)}
    forks.keep_to_itself(backend, forks.Ends(own, frozenset(others)))
    return backend


def _devices() -> list[Any]:
    """As torch makes them: one for each interface that the user names, or its default. Each listens from the moment it is made."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [_Gloo.create_default_device()]
    return [_Gloo.create_device(interface=name) for name in names.split(",")]


def broadcast_options(root: int, timeout_seconds: float) -> Any:
    """For a broadcast of a Gloo backend."""
    options = c10d.BroadcastOptions()
    options.rootRank = root
    options.timeout = timedelta(seconds=timeout_seconds)
    return options


def gather_options(timeout_seconds: float, *, is_async: bool = True) -> Any:
    """For an all-gather."""
    options = c10d.AllgatherOptions()
    options.asyncOp = is_async
    options.timeout = timedelta(seconds=timeout_seconds)
    return options


def exchange_options(timeout_seconds: float) -> Any:
    """For an all-to-all of a Gloo backend."""
    options = c10d.AllToAllOptions()
    options.timeout = timedelta(seconds=timeout_seconds)
    return options


def cut(backend: Gloo, peer: int) -> None:
    """Close all connections of a Gloo backend, so that whoever waits on one of them fails at once.

    Gloo has no function for it, but does so when a receive has waited too long for any `peer`.
    """
    with contextlib.suppress(RuntimeError):
        work = backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG)
        work.wait(timedelta(milliseconds=1))


def is_cut(backend: Gloo, peer: int) -> bool:
    """Whether the connection to a peer is closed: Gloo then refuses to receive from it."""
    try:
        backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG)
    except RuntimeError:
        return True
    return False


class Stuck(Exception):
    """A peer is gone, and Gloo does not notice: what it was receiving when the connection closed is never finished."""

    def __str__(self) -> str:
        return "a connection has closed in the middle of a message"


def wait_for(works: Sequence[Any], is_lost: Callable[[], bool]) -> None:
    """Wait for collectives of a Gloo backend; `Stuck` when somebody is lost and Gloo does not say so. RuntimeError is Gloo's own."""
    for work in works:
        try:
            future = work.get_future()
        except RuntimeError:  # a reduce-scatter of Gloo has none
            InThread(work.wait).wait(is_lost)
            continue
        ended = threading.Event()
        future.add_done_callback(lambda _, ended=ended: ended.set())
        _wait_watching(ended, is_lost)
        work.wait()


class InThread:
    """Something that waits for Gloo, in a thread of its own: nothing else can leave what Gloo never ends. It stays until Gloo's timeout then."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._failure: Exception | None = None
        threading.Thread(target=self._run, name="wait for Gloo", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as failure:  # noqa: BLE001 - a thread's entry point: whoever waits must not wait for ever
            self._failure = failure
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Well or not."""
        return self._ended.is_set()

    def wait(self, is_lost: Callable[[], bool], timeout: timedelta | None = None) -> bool:
        """Raise what it has raised, `Stuck` when somebody is lost; False when it has not ended in time."""
        seconds = None if timeout is None else timeout.total_seconds()
        if not _wait_watching(self._ended, is_lost, seconds):
            return False
        if self._failure is not None:
            raise self._failure
        return True


def _wait_watching(
    ended: threading.Event, is_lost: Callable[[], bool], seconds: float | None = None
) -> bool:
    """Until it is set, or for so many seconds; whether it is. `Stuck` when somebody is lost and it is not set soon after."""
    deadline = None if seconds is None else time.monotonic() + seconds
    slice_seconds = _WATCH_SECONDS if seconds is None else min(_WATCH_SECONDS, seconds)
    while not ended.wait(slice_seconds):
        if is_lost() and not ended.wait(_WATCH_SECONDS):
            raise Stuck
        if deadline is not None and time.monotonic() >= deadline:
            return False
    return True


def source_of(work: Any) -> int:
    """The rank from which a message from any has come."""
    return int(work._source_rank())


def abandon(backend: Gloo) -> None:
    """Never destroy a backend: its destructor would wait for a call that is stuck until the call's own timeout."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def is_of_wire(failure: Exception) -> bool:
    """Whether a Gloo error is one of its connections, not of its arguments."""
    return "gloo/transport" in str(failure) or has_timed_out(failure)


def has_timed_out(failure: Exception) -> bool:
    """Whether it is this side's own deadline that has passed."""
    return "Timed out waiting" in str(failure)


class GroupOverGloo(_ProcessGroup):  # type: ignore[misc]
    """A process group whose operations are Gloo's until a subclass defines them.

    Calls from Python reach any method of a subclass by name; calls from C++ only those that torch's trampoline knows. Whatever is not
    overridden goes to the Gloo backend registered here for the CPU.
    """

    def __init__(self, birth: Birth) -> None:
        super().__init__(birth.rank, birth.size)
        store = inner_store(birth.store, "gloo")
        self.gloo = gloo(store, birth.rank, birth.size, birth.timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.gloo._set_sequence_number_for_group()
        self._torch_name = birth.name
        self._torch_description = ""
        self._torch_store = birth.store

    def get_group_store(self) -> Store:
        """Where the ranks find each other. Torch has a constructor that takes the store, but not for a group written in Python."""
        return self._torch_store

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._torch_name

    @property
    def group_desc(self) -> str:
        """What the user calls the group."""
        return self._torch_description

    def _set_group_name(self, name: str) -> None:
        self._torch_name = name
        super()._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        self._torch_description = description
        super()._set_group_desc(description)


def operation_of(options: Any) -> tuple[Operation, float]:
    """The operation and its factor, out of a ReduceOp or options that hold one."""
    given = getattr(options, "reduceOp", options)
    if given is None:
        return Operation.SUM, 1.0
    operation = _OPERATIONS.get(getattr(given, "op", given))
    if operation is None:
        raise NoRoute(f"reduce operation {given} is unknown", fix="use one of torch's ReduceOp")
    if operation is not Operation.PREMUL_SUM:
        return operation, 1.0
    factor = given.factor
    if isinstance(factor, torch.Tensor):
        factor = factor.item()
    return operation, float(factor)


def is_async(options: Any) -> bool:
    """Whether the caller goes on before the work is done; callers without options wait."""
    return bool(getattr(options, "asyncOp", True))


def root_of(options: Any) -> int:
    """The root's rank in the group."""
    return int(options if isinstance(options, int) else options.rootRank)


def timeout_seconds(options: Any, default: timedelta) -> float:
    """The caller's timeout, or the group's."""
    given = getattr(options, "timeout", None)
    if isinstance(given, timedelta) and given.total_seconds() > 0:
        return given.total_seconds()
    return default.total_seconds()


_OPTIONS: dict[str, Any] = {
    "allreduce": c10d.AllreduceOptions,
    "reduce": c10d.ReduceOptions,
    "reduce_scatter": c10d.ReduceScatterOptions,
    "gather": c10d.GatherOptions,
    "scatter": c10d.ScatterOptions,
}


def options_of(method: str, given: Any) -> Any:
    """Options that Gloo takes for a method: those given, or new ones around a bare operation."""
    wanted = _OPTIONS[method]
    if isinstance(given, wanted):
        return given
    options = wanted()
    if isinstance(given, int):
        options.rootRank = given
        return options
    operation = getattr(given, "reduceOp", given)
    if operation is not None:
        options.reduceOp = operation
    return options


def sharded_modules(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """FSDP2's modules of a model with the process group that each is sharded over; those of one rank have nothing to move."""
    found = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for parameters in module._get_fsdp_state()._fsdp_param_groups:
            group = parameters._all_gather_process_group
            if group.size() > 1:
                found.append((module, group))
    return found
