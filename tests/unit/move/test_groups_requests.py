"""Calls out of torch's arguments: what is refused, what is copied, how calls are described; turns and works; one rank alone."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import argosy.move.groups  # noqa: F401 - registers the backend
from argosy.errors import ArenaGone, ConfigError, NoRoute, PeerLost, ProtocolError, TimedOut
from argosy.move import (
    arguments,
    arrivals,
    callsites,
    counters,
    hosts,
    segment,
    torchgroup,
    verdicts,
    works,
)
from argosy.move.calls import Call, Kind, Operation, can_reduce, describe
from argosy.move.works import Turns
from argosy.native import loader


def test_calls_describe_themselves_for_people():
    call = Call(Kind.ALL_REDUCE, torch.bfloat16, 12, operation=Operation.AVG)
    assert str(call) == "all_reduce(avg) of 12 x bfloat16"
    assert str(Call(Kind.BROADCAST, torch.bool, 3, root=2)) == "broadcast of 3 x bool, root 2"
    assert str(Call(Kind.BROADCAST, torch.bool, 3, root=1, ranks=[4, 9])).endswith("root 9")
    assert str(Call(Kind.MEET, torch.uint8, 0)) == "barrier"
    assert str(Call(Kind.ALL_TO_ALL, torch.int8, 0)) == "all_to_all of int8"


def test_different_calls_never_look_alike():
    base = Call(Kind.ALL_REDUCE, torch.float32, 5)
    others = [
        Call(Kind.REDUCE, torch.float32, 5),
        Call(Kind.ALL_REDUCE, torch.float64, 5),
        Call(Kind.ALL_REDUCE, torch.float32, 5, operation=Operation.MAX),
        Call(Kind.ALL_REDUCE, torch.float32, 5, is_beneath=True),
        Call(Kind.ALL_REDUCE, torch.float32, 5, root=1),
    ]
    assert len({call.what() for call in [base, *others]}) == 6
    assert describe(others[3].what(), 5) == "all_reduce(sum) of 5 x float32"


def test_kernels_know_their_dtypes():
    assert can_reduce(torch.bfloat16, Operation.PREMUL_SUM)
    assert not can_reduce(torch.int32, Operation.AVG)
    assert not can_reduce(torch.int32, Operation.BOR)
    assert not can_reduce(torch.complex64, Operation.SUM)


def test_what_neither_a_kernel_nor_gloo_reduces_is_refused_before_anything_is_written():
    average, bits = (Operation.AVG, 1.0), (Operation.BAND, 1.0)
    for dtype, operation in (
        (torch.int64, average),
        (torch.bool, average),
        (torch.complex64, (Operation.MAX, 1.0)),
        (torch.uint16, (Operation.SUM, 1.0)),
        (torch.float8_e4m3fn, (Operation.SUM, 1.0)),
        (torch.float32, bits),
        (torch.int16, bits),
    ):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(ConfigError, match=f"no {operation[0].name.lower()} of {name}"):
            arguments.in_place(Kind.ALL_REDUCE, [torch.zeros(2, dtype=dtype)], operation)
        output, given = torch.zeros(2, dtype=dtype), torch.zeros(4, dtype=dtype)
        with pytest.raises(ConfigError, match=f"reduce_scatter: there is no .* of {name}"):
            arguments.scatter_single(output, given, operation, 2)
    with pytest.raises(ConfigError, match="max of sparse tensors"):
        arguments.in_place(Kind.ALL_REDUCE, [torch.eye(2).to_sparse()], (Operation.MAX, 1.0))


def test_requests_without_a_kernel_go_beneath():
    assert arguments.in_place(Kind.ALL_REDUCE, [torch.zeros(3, dtype=torch.bool)]).is_beneath
    assert arguments.in_place(Kind.ALL_REDUCE, [torch.eye(2).to_sparse()]).is_beneath
    assert not arguments.in_place(
        Kind.BROADCAST, [torch.zeros(3, dtype=torch.complex64)]
    ).is_beneath


def test_pieces_are_exchanged_in_copies_and_copied_back():
    grid = torch.zeros(4, 4)
    request = arguments.in_place(Kind.ALL_REDUCE, [grid[:, 1]])
    assert request.calls[0].inputs[0].is_contiguous()
    request.calls[0].outputs[0].fill_(7)
    assert grid.sum() == 0
    request.finish()
    assert torch.equal(grid[:, 1], torch.full((4,), 7.0))
    assert grid.sum() == 28


def test_copies_of_pieces_are_counted():
    before = counters.snapshot()
    grid = torch.zeros(4, 4)
    arguments.in_place(Kind.ALL_REDUCE, [grid])
    assert counters.own.since(before)["copies"] == 0
    arguments.in_place(Kind.ALL_REDUCE, [grid[:, 1]]).finish()
    arguments.outgoing([grid[:, 2]])
    added = counters.own.since(before)
    assert (added["copies"], added["copy_bytes"]) == (3, 48)


def test_a_lazy_negative_is_exchanged_as_what_it_says():
    memory = torch.tensor([2.0, 4.0])
    lazy = torch._neg_view(memory)  # as the imaginary part of a conjugate is
    request = arguments.in_place(Kind.ALL_REDUCE, [lazy])
    sent = request.calls[0].inputs[0]
    assert not sent.is_neg()
    assert sent.tolist() == [-2, -4]
    sent.fill_(5)
    request.finish()
    assert lazy.tolist() == [5, 5]
    assert memory.tolist() == [-5, -5]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: arguments.in_place(Kind.ALL_REDUCE, [torch.zeros(1).expand(4)]), ConfigError, "share memory"),
        (lambda: arguments.in_place(Kind.ALL_REDUCE, [torch.zeros(6).as_strided((2, 3), (2, 1))]), ConfigError, "share memory"),
        (lambda: arguments.in_place(Kind.BROADCAST, [torch.zeros(2, device="meta")]), NoRoute, "meta"),
        (lambda: arguments.gather_single(torch.zeros(5), torch.zeros(2), 2), ConfigError, "5 elements"),
        (lambda: arguments.gather_single(torch.zeros(4), torch.zeros(2).int(), 2), ConfigError, "dtypes"),
        (lambda: arguments.gather_list(Kind.GATHER, [torch.zeros(2)], torch.zeros(2), 2), ConfigError, "1 output"),
        (lambda: arguments.gather_list(Kind.ALL_GATHER, [], torch.zeros(2), 2), ConfigError, "0 output tensors for 2 ranks"),
        (lambda: arguments.gather_list(Kind.GATHER, [], torch.zeros(2), 2), ConfigError, "0 output tensors for 2 ranks"),
        (lambda: arguments.gather_list(Kind.GATHER, [torch.zeros(2, device="meta")] * 2, torch.zeros(2), 2), NoRoute, "meta"),
        (lambda: arguments.pairs([torch.zeros(2)], []), ConfigError, "0 inputs and 1 outputs"),
        (lambda: arguments.scatter_list(torch.zeros(2), [torch.zeros(3)] * 2, (Operation.SUM, 1.0), 2), ConfigError, "3 elements"),
        (lambda: arguments.scatter(torch.zeros(2), [], root=0, is_root=True, size=2), ConfigError, "0 input tensors"),
        (lambda: arguments.exchange_single(torch.zeros(3), torch.zeros(3), ([], []), 2), ConfigError, "3 rows"),
        (lambda: arguments.exchange_single(torch.zeros(3), torch.zeros(3), ([1, 2], [-1, 4]), 2), ConfigError, "split sizes"),
        (lambda: arguments.exchange_list([torch.zeros(1)], [torch.zeros(1)], 2), ConfigError, "1 inputs"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_with_their_values(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    "cut",
    [
        lambda memory: [memory[0:4], memory[2:6]],
        lambda memory: [memory[0:8:2], memory[1:5]],
    ],
)
def test_outputs_that_share_some_memory_are_refused(cut):
    with pytest.raises(ConfigError, match="output 1 shares memory"):
        arguments.gather_list(Kind.ALL_GATHER, cut(torch.zeros(16)), torch.zeros(4), 2)


def test_outputs_that_lie_between_each_other_are_taken():
    columns = list(torch.zeros(4, 3).unbind(1))
    request = arguments.gather_list(Kind.ALL_GATHER, columns, torch.zeros(4), 3)
    assert len(request.copies_back) == 3


def test_the_call_site_is_outside_torch_and_this_package():
    assert "test_groups_requests.py" in callsites.find()
    assert "in test_the_call_site" in callsites.find()


def test_a_deprecated_name_of_a_collective_is_not_its_call_site(alone, monkeypatch):
    seen = []
    plain = alone.__class__.all_gather_single
    monkeypatch.setattr(
        alone.__class__,
        "all_gather_single",
        lambda *given, **more: seen.append(callsites.find(2)) or plain(*given, **more),
    )
    with pytest.warns(FutureWarning):
        dist.all_gather_into_tensor(torch.zeros(2), torch.ones(2))
    assert seen[0].endswith("in test_a_deprecated_name_of_a_collective_is_not_its_call_site"), seen


def test_a_thread_without_a_frame_of_the_program_has_no_call_site():
    seen = []

    thread = threading.Thread(target=lambda: seen.append(callsites.find(2)))
    thread.start()
    thread.join()
    assert seen == [callsites.NOWHERE]


def test_turns_keep_the_order_of_waiting_and_going_on():
    turns, seen = Turns("test"), []
    gate = threading.Event()
    first = turns.take(lambda: gate.wait(10) and seen.append(1), [], is_async=True)
    second = turns.take(lambda: seen.append(2), ["tensors"], is_async=True)
    assert not second.is_completed()
    with pytest.raises(TimedOut):
        second.wait(timedelta(milliseconds=1))
    threading.Timer(0.01, gate.set).start()
    third = turns.take(lambda: seen.append(3), [], is_async=False)
    assert seen == [1, 2, 3]
    assert first.is_success()
    assert third.is_success()
    assert second.get_future().wait() == ["tensors"]
    assert turns.close() is True
    with pytest.raises(ConfigError, match="shut down"):
        turns.take(lambda: None, [], is_async=False)


def test_closing_waits_for_a_call_in_its_callers_thread(monkeypatch):
    monkeypatch.setattr(works, "_CLOSE_SECONDS", 0.05)
    turns, begun, gate = Turns("test"), threading.Event(), threading.Event()

    def job():
        begun.set()
        gate.wait(10)

    caller = threading.Thread(target=lambda: turns.take(job, [], is_async=False))
    caller.start()
    assert begun.wait(10)
    assert turns.is_busy
    assert turns.close() is False
    gate.set()
    caller.join()
    assert turns.close() is True
    assert not turns.is_busy


def test_failures_reach_whoever_waits_and_the_next_job_runs():
    turns = Turns("test")

    def fail():
        raise PeerLost(3)

    work = turns.take(fail, [], is_async=True)
    with pytest.raises(PeerLost):
        work.wait()
    assert isinstance(work.exception(), PeerLost)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match="rank 3"):
        work.get_future().wait()
    with pytest.raises(PeerLost):
        turns.take(fail, [], is_async=False)
    assert turns.take(lambda: None, [], is_async=False).is_success()
    turns.close()


def test_segments_of_other_versions_and_groups_are_refused():
    made = segment.Segment.create(3, 8192, is_native=True)
    with pytest.raises(ArenaGone, match="3 ranks"):
        segment.Segment.open(os.dup(made.descriptor), num_ranks=2, is_native=True)
    made.memory[8:12] = (99).to_bytes(4, "little")
    with pytest.raises(ArenaGone, match="version 99"):
        segment.Segment.open(os.dup(made.descriptor), num_ranks=3, is_native=True)
    made.close()
    with pytest.raises(ArenaGone):
        _ = made.memory


def test_more_ranks_of_a_host_than_a_segment_holds_are_refused_when_the_group_is_made():
    hosts.check_sizes([list(range(256)), [256]], "7")
    with pytest.raises(ConfigError, match="group 7 has 257 ranks on one host, of at most 256"):
        hosts.check_sizes([[0], list(range(1, 258))], "7")


def test_the_verdict_names_the_missing_rank_with_its_last_call():
    made = segment.Segment.create(2, 8192, is_native=True)
    place = verdicts.Place(made, 0, [4, 9], "g")
    call = Call(Kind.ALL_REDUCE, torch.float32, 5)
    with pytest.raises(
        TimedOut, match=r"rank 9 did not come in time; its last call here: none yet"
    ):
        verdicts.raise_for(loader.TIMEOUT, 1, call, place)
    with pytest.raises(PeerLost, match="rank 9"):
        verdicts.raise_for(loader.PEER_LOST, 1, call, place)
    made.close()


def test_a_rank_that_came_just_too_late_leaves_a_time_out_without_a_name():
    made = segment.Segment.create(2, 8192, is_native=True)
    place = verdicts.Place(made, 0, [4, 9], "g")
    with pytest.raises(TimedOut, match="not all ranks came in time"):
        verdicts.raise_for(loader.TIMEOUT, -1, Call(Kind.ALL_REDUCE, torch.float32, 5), place)
    made.close()


def test_the_text_of_an_earlier_mismatch_is_not_taken_for_this_one():
    made = segment.Segment.create(2, 8192, is_native=True)
    made.write_text(1, 3, "all_reduce of the third call")
    assert made.read_text(1, 3) == "all_reduce of the third call"
    assert made.read_text(1, 4) == ""
    made.write_text(1, 4, "x" * 10000)
    assert set(made.read_text(1, 4)) == {"x"}
    made.close()


def test_a_group_of_one_rank_needs_nobody():
    dist.init_process_group("argosy", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.arange(4.0)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        output = torch.empty(4)
        dist.reduce_scatter_single(output, tensor)
        assert torch.equal(output, torch.arange(4.0))
        dist.all_to_all_single(output.zero_(), tensor)
        assert torch.equal(output, tensor)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone():
    dist.init_process_group("argosy", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_futures_give_a_flat_list_of_tensors_as_other_backends_do(alone):
    output = torch.zeros(2)
    for work in (
        alone.allgather([[output]], [torch.ones(2)]),
        alone.gather([[output]], [torch.ones(2)]),
        alone.alltoall([output], [torch.ones(2)]),
    ):
        (found,) = work.get_future().wait()
        assert found is output
        assert work.result() == [output]


def test_tensors_of_a_coalesced_call_stay_apart_when_gloo_does_it(alone):
    first, second = torch.tensor([1, 6]), torch.tensor([8, 0])
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.BOR
    alone.allreduce_coalesced([first, second], options).wait()
    assert (first.tolist(), second.tolist()) == ([1, 6], [8, 0])


def test_a_call_that_is_refused_for_one_tensor_writes_to_none(alone):
    grid = torch.arange(4.0).view(2, 2)
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = c10d._make_nccl_premul_sum(2.0)
    with pytest.raises(ConfigError, match="no premul_sum of int64"):
        alone.allreduce_coalesced([grid, torch.tensor([3])], options).wait()
    assert grid.tolist() == [[0, 1], [2, 3]]


def test_tensors_of_inference_mode_are_filled_by_the_groups_thread(alone):
    with torch.inference_mode():
        grid = torch.ones(3, 3)
        alone.allreduce([grid[:, 1]]).wait()
    assert grid.sum() == 9


def test_a_group_that_was_shut_down_may_be_aborted_and_shut_down_again(alone):
    dist.destroy_process_group()
    alone.abort()
    alone.shutdown()
    with pytest.raises(ConfigError, match="shut down"):
        alone.barrier()


def test_an_all_to_all_in_place_sends_a_copy():
    memory = torch.arange(6.0)
    request = arguments.exchange_single(memory, memory, ([2, 4], [4, 2]), 2)
    (call,) = request.calls
    assert [part.tolist() for part in call.inputs] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    memory.zero_()
    assert call.inputs[1].tolist() == [4.0, 5.0]


@pytest.mark.parametrize("start", [0, 3, 4])
def test_an_input_that_shares_a_part_of_its_memory_with_an_output_is_copied(start):
    memory = torch.arange(12.0)
    given, plus = memory[start : start + 4], (Operation.SUM, 1.0)
    rows = list(memory.view(3, 4))
    shared = start % 4 == 0
    for request, index in (
        (arguments.gather_single(memory, given, 3), 0),
        (arguments.gather_list(Kind.GATHER, rows, given, 3), 0),
        (arguments.scatter_single(given, memory, plus, 3), start // 4),
        (arguments.scatter_list(given, rows, plus, 3), start // 4),
        (arguments.scatter(given, rows, root=start // 4, is_root=True, size=3), start // 4),
    ):
        sent = request.calls[0].inputs[index]
        wanted = given if request.calls[0].kind in (Kind.ALL_GATHER, Kind.GATHER) else rows[index]
        assert torch.equal(sent, wanted)
        assert (sent.data_ptr() == wanted.data_ptr()) is shared
    (call,) = arguments.scatter(rows[1], rows, root=0, is_root=True, size=3).calls
    assert call.inputs[1].data_ptr() != rows[1].data_ptr()


def test_a_rank_of_another_version_is_refused_when_a_group_is_made():
    store = dist.HashStore()
    torchgroup.inner_store(store, "arrivals").set("card1", json.dumps({"version": 999}))
    birth = SimpleNamespace(
        store=store, rank=0, size=2, ranks=[4, 7], timeout=timedelta(seconds=5), name="two"
    )
    with pytest.raises(ProtocolError, match="rank 7 speaks version 999 of the collectives, rank 4"):
        arrivals.gather(birth)
