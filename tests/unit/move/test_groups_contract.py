"""Every internal of torch that the backend relies on: a new torch that lacks one fails here, with its name."""

from __future__ import annotations

import ctypes
import inspect
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import argosy.move.groups as groups
from argosy.errors import NoRoute
from argosy.move import forks, segment, torchgroup
from argosy.move.calls import Operation


def test_the_backend_is_registered_for_the_cpu():
    assert "ARGOSY" in dist.Backend._plugins
    assert dist.Backend._plugins["ARGOSY"].extended_api is True
    assert dist.Backend.backend_capability["argosy"] == ["cpu"]
    torchgroup.register(groups.NAME, groups.ArgosyGroup)  # twice is harmless


def test_the_options_of_a_new_group_carry_what_a_birth_needs():
    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = dist.HashStore(), 1, 3
    options.timeout, options.group_id = timedelta(seconds=5), "7"
    birth = torchgroup.Birth(options)
    assert (birth.rank, birth.size, birth.name) == (1, 3, "7")
    assert birth.ranks == [0, 1, 2]  # torch names none for the default group
    options.global_ranks_in_group = [4, 5, 9]
    assert torchgroup.Birth(options).ranks == [4, 5, 9]
    assert birth.timeout == timedelta(seconds=5)


@pytest.mark.parametrize(
    "name", ["_register_backend", "_set_default_backend", "_set_group_name", "_set_group_desc"]
)
def test_process_groups_can_be_built_in_python(name):
    assert callable(getattr(dist.ProcessGroup, name))


@pytest.mark.parametrize(
    "name",
    [
        "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "all_gather_single",
        "_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter",
        "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base", "alltoall", "barrier", "abort", "shutdown",
    ],
)  # fmt: skip
def test_every_collective_of_torch_is_defined_under_its_own_name(name):
    assert hasattr(dist.ProcessGroup, name)
    assert name in vars(groups.ArgosyGroup)


@pytest.mark.parametrize(
    "name",
    [
        "allreduce", "reduce", "reduce_scatter", "allgather", "gather", "scatter", "alltoall_base", "broadcast", "send", "recv",
        "recv_anysource",
        "shutdown", "set_timeout", "_set_sequence_number_for_group",
    ],
)  # fmt: skip
def test_gloo_has_the_methods_that_calls_fall_through_to(name):
    assert callable(getattr(dist.ProcessGroupGloo, name))


def test_a_backend_is_made_of_devices_that_listen_and_stays_out_of_children():
    before = forks.listening()
    backend = torchgroup.gloo(dist.HashStore(), 0, 1, timedelta(seconds=7))
    assert backend.options._timeout == timedelta(seconds=7)
    assert backend.options._threads == 2 * len(backend.options._devices)
    ends = forks._ends[backend]
    assert ends.own == forks.listening() - before
    assert len(ends.own) == len(backend.options._devices) > 0
    assert all(not os.get_inheritable(one) for one in forks._descriptors_of(ends))


def test_options_tell_operation_root_timeout_and_whether_to_wait():
    options = c10d.AllreduceOptions()
    assert torchgroup.is_async(options) is True
    options.asyncOp = False
    assert torchgroup.is_async(options) is False
    assert torchgroup.timeout_seconds(options, timedelta(seconds=9)) == 9
    options.timeout = timedelta(seconds=3)
    assert torchgroup.timeout_seconds(options, timedelta(seconds=9)) == 3
    for given, wanted in ((dist.ReduceOp.AVG, Operation.AVG), (dist.ReduceOp.BXOR, Operation.BXOR)):
        options.reduceOp = given
        assert torchgroup.operation_of(options) == (wanted, 1.0)
    options.reduceOp = c10d._make_nccl_premul_sum(0.25)
    assert torchgroup.operation_of(options) == (Operation.PREMUL_SUM, 0.25)
    assert torchgroup.operation_of(None) == (Operation.SUM, 1.0)
    with pytest.raises(NoRoute):
        torchgroup.operation_of("sum")
    root = torchgroup.broadcast_options(4, 9.0)
    for made in (root, torchgroup.gather_options(9.0), torchgroup.exchange_options(9.0)):
        assert made.timeout == timedelta(seconds=9)
    assert torchgroup.root_of(root) == torchgroup.root_of(4) == 4
    assert torchgroup.options_of("gather", 2).rootRank == 2


def test_fsdp_asks_custom_communication_for_its_buffers():
    parameters = inspect.signature(torchgroup.AllGather.__call__).parameters
    assert list(parameters) == ["self", "output_tensor", "input_tensor", "group", "async_op"]
    parameters = inspect.signature(torchgroup.ReduceScatter.__call__).parameters
    assert list(parameters) == ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    assert hasattr(FSDPModule, "set_custom_all_gather")
    assert hasattr(FSDPModule, "set_custom_reduce_scatter")
    assert isinstance(FSDPParamGroup._all_gather_process_group, property)


def test_native_code_lays_out_the_structures_as_python_declares_them():
    opened = segment.library()
    if opened is None:
        pytest.skip("no native code")
    sizes = [opened.ag_collectives_layout(which) for which in range(4)]
    assert sizes[0] == ctypes.sizeof(segment.GroupStruct)
    assert sizes[1] == ctypes.sizeof(segment.CallStruct)
    assert max(sizes[2:]) <= segment.PAGE
    assert torch.__version__.split("+")[0].count(".") == 2


def test_a_message_from_any_rank_tells_its_source():
    assert callable(c10d.Work._source_rank)


def test_whatever_is_raised_by_a_thread_that_waits_for_gloo_reaches_whoever_waits():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        torchgroup.InThread(fail).wait(lambda: False, timedelta(seconds=20))
