"""Cases of test_collectives.py: every collective of the backend, its results against what they must be, on each rank."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from argosy.errors import ConfigError, MismatchError, NoRoute

COUNTS = (0, 1, 5, 1000, 70_001, 1_300_000)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.int16,
)


def ours(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank has: small whole numbers, exact in every dtype here when added up."""
    return ((torch.arange(count) % 7) + rank).to(dtype)


def summed(size: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum(ours(rank, count, torch.float64) for rank in range(size)).to(dtype)


def case_all_reduce_adds_up_every_size_and_dtype(rank, size):
    for count in COUNTS:
        tensor = ours(rank, count)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, summed(size, count)), count
    for dtype in DTYPES:
        tensor = ours(rank, 3001, dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, summed(size, 3001, dtype)), dtype


def case_all_reduce_knows_every_operation(rank, size):
    parts = torch.stack([ours(r, 100_000) + 1 for r in range(size)])
    wanted = {
        dist.ReduceOp.AVG: parts.sum(0) / size,
        dist.ReduceOp.MIN: parts.min(0).values,
        dist.ReduceOp.MAX: parts.max(0).values,
        dist.ReduceOp.PRODUCT: parts.prod(0),
    }
    for operation, value in wanted.items():
        tensor = parts[rank].clone()
        dist.all_reduce(tensor, operation)
        assert torch.equal(tensor, value), operation
    tensor = parts[rank].clone()
    dist.all_reduce(tensor, torch.distributed._make_nccl_premul_sum(0.5))
    assert torch.equal(tensor, parts.sum(0) * 0.5)


def case_halves_are_added_in_single_precision_with_equal_bits_on_all_ranks(rank, size):
    generator = torch.Generator().manual_seed(7)
    for dtype in (torch.bfloat16, torch.float16):
        for count in (1000, 400_000):
            parts = torch.randn(size, count, generator=generator).to(dtype)
            tensor = parts[rank].clone()
            dist.all_reduce(tensor)
            total = parts[0].float()
            for r in range(1, size):
                total = total + parts[r].float()
            assert torch.equal(tensor, total.to(dtype))


def case_integers_have_no_average_and_bits_go_to_gloo(rank, size):
    tensor = torch.tensor([1 << rank])
    dist.all_reduce(tensor, dist.ReduceOp.BOR)
    assert tensor.item() == (1 << size) - 1
    flags = torch.tensor([rank == 0])
    dist.broadcast(flags, 0)
    assert flags.item() is True


def case_reductions_without_a_kernel_are_those_of_gloo(rank, size):
    for dtype, operation, wanted in (
        (torch.complex64, dist.ReduceOp.SUM, torch.full((3,), size + 0j)),
        (torch.int64, dist.ReduceOp.BOR, torch.full((3,), (1 << size) - 1)),
        (torch.bool, dist.ReduceOp.SUM, torch.tensor([True] * 3)),
    ):
        own = 1 << rank if operation == dist.ReduceOp.BOR else 1
        given = torch.full((3 * size,), own, dtype=dtype)
        output = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter_single(output, given, operation)
        assert torch.equal(output, wanted), dtype
        column = torch.zeros(3, 2, dtype=dtype)[:, 1]
        dist.reduce_scatter(column, list(given.chunk(size)), operation)
        assert torch.equal(column, wanted), dtype
        column = torch.full((3, 2), own, dtype=dtype)[:, 1]
        dist.reduce(column, size - 1, operation)
        assert rank != size - 1 or torch.equal(column, wanted), dtype


def case_broadcast_and_reduce_serve_every_root(rank, size):
    for root in range(size):
        for count in (0, 3, 900_000):
            tensor = ours(rank, count)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, ours(root, count))
            tensor = ours(rank, count)
            dist.reduce(tensor, root)
            assert torch.equal(tensor, summed(size, count) if rank == root else ours(rank, count))


def case_gather_and_scatter_serve_every_root(rank, size):
    for root in range(size):
        for count in (0, 3, 500_000):
            outputs = [torch.empty(count) for _ in range(size)] if rank == root else None
            dist.gather(ours(rank, count), outputs, root)
            assert rank != root or all(
                torch.equal(o, ours(r, count)) for r, o in enumerate(outputs)
            )
            inputs = [ours(r + root, count) for r in range(size)] if rank == root else None
            output = torch.empty(count)
            dist.scatter(output, inputs, root)
            assert torch.equal(output, ours(rank + root, count))


def case_all_gather_takes_tensors_and_lists(rank, size):
    for count in COUNTS:
        outputs = [torch.empty(count) for _ in range(size)]
        dist.all_gather(outputs, ours(rank, count))
        assert all(torch.equal(o, ours(r, count)) for r, o in enumerate(outputs))
        output = torch.empty(count * size)
        dist.all_gather_single(output, ours(rank, count))
        assert torch.equal(output, torch.cat([ours(r, count) for r in range(size)]))
    for count in (1000, 1_500_000):
        together = torch.zeros(size, count)
        together[rank] = rank
        dist.all_gather_single(together, together[rank])  # in place, as FSDP does
        assert torch.equal(together, torch.arange(size).float()[:, None].expand(size, count))
    # Several chunks that begin and end anywhere in a cache line.
    odd = [(torch.arange(2_500_003 + r) % 251 + r).to(torch.uint8)[r:] for r in range(size)]
    room = torch.zeros(size * 2_500_003 + 2, dtype=torch.uint8)
    dist.all_gather_single(room[1:-1], odd[rank])
    assert torch.equal(room[1:-1], torch.cat(odd))
    assert room[0] == room[-1] == 0


def case_reduce_scatter_takes_tensors_and_lists(rank, size):
    for count in COUNTS:
        given = torch.cat([ours(rank + part, count) for part in range(size)])
        wanted = sum(ours(r + rank, count) for r in range(size))
        output = torch.empty(count)
        dist.reduce_scatter_single(output, given)
        assert torch.equal(output, wanted)
        dist.reduce_scatter(output.zero_(), [ours(rank + part, count) for part in range(size)])
        assert torch.equal(output, wanted)
        dist.reduce_scatter_single(given[rank * count : (rank + 1) * count], given)  # in place
        assert torch.equal(given[rank * count : (rank + 1) * count], wanted)
    output = torch.empty(100)
    dist.reduce_scatter_single(output, torch.ones(100 * size), dist.ReduceOp.AVG)
    assert torch.equal(output, torch.ones(100))


def case_all_to_all_takes_equal_and_unequal_parts(rank, size):
    for count in (0, 3, 450_000):
        given = torch.cat([ours(rank + 10 * part, count) for part in range(size)])
        output = torch.empty_like(given)
        dist.all_to_all_single(output, given)
        assert torch.equal(output, torch.cat([ours(r + 10 * rank, count) for r in range(size)]))
    rows = [
        [(a * size + b) % 5 + {(0, 0): 40_000, (1, 0): 200_001}.get((a, b), 0) for b in range(size)]
        for a in range(size)
    ]
    given = torch.cat([torch.full((rows[rank][b], 3), float(10 * rank + b)) for b in range(size)])
    takes = [rows[a][rank] for a in range(size)]
    output = torch.empty(sum(takes), 3)
    dist.all_to_all_single(output, given, takes, rows[rank])
    assert torch.equal(
        output, torch.cat([torch.full((takes[a], 3), float(10 * a + rank)) for a in range(size)])
    )
    for dtype in (torch.float32, torch.uint16, torch.complex64):
        outputs = [torch.empty(1 + a, dtype=dtype) for a in range(size)]
        given = [torch.full((1 + rank,), 10 * rank + b).to(dtype) for b in range(size)]
        dist.all_to_all(outputs, given)
        assert all(
            torch.equal(o, torch.full((1 + a,), 10 * a + rank).to(dtype))
            for a, o in enumerate(outputs)
        )


def case_an_input_may_share_memory_with_outputs(rank, size):
    for count in (5, 600_000):
        wanted = torch.cat([ours(r, count) for r in range(size)])
        for start in (0, count, 3):
            memory = torch.zeros(size * count)
            given = memory[start : start + count].copy_(ours(rank, count))
            dist.all_gather_single(memory, given)
            assert torch.equal(memory, wanted), (count, start)
            for root in (0, size - 1):
                given.copy_(ours(rank, count))
                dist.gather(given, list(memory.view(size, count)) if rank == root else None, root)
                assert rank != root or torch.equal(memory, wanted), (count, start, root)
                given = memory[start : start + count]
                memory.copy_(wanted)
                dist.scatter(given, list(memory.view(size, count)) if rank == root else None, root)
                assert torch.equal(given, ours(rank, count)), (count, start, root)
            memory.copy_(wanted)
            dist.reduce_scatter_single(given, memory)
            assert torch.equal(given, size * ours(rank, count)), (count, start)


def case_asynchronous_calls_keep_their_order_and_fulfil_futures(rank, size):
    tensors = [torch.full((1000 * (i + 1),), float(rank + i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    total = torch.ones(5)
    dist.all_reduce(total)  # after the queued ones
    for index, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert torch.equal(tensor, torch.full_like(tensor, float(sum(range(size)) + index * size)))
        (given,) = work.get_future().wait()
        assert given is tensor or torch.equal(given, tensor)
    seen = []
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.get_future().then(lambda future: seen.append(future.value()[0].sum().item())).wait()
    assert seen == [3.0 * size]
    dist.barrier(async_op=True).wait()


def case_calls_of_several_threads_take_turns(rank, size):
    group = dist.new_group()
    failures = []

    def add(times):
        try:
            for _ in range(times):
                tensor = torch.ones(100)
                dist.all_reduce(tensor, group=group)
                assert torch.equal(tensor, torch.full((100,), float(size)))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=add, args=(20,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    dist.destroy_process_group(group)


def case_coalesced_forms_do_several_at_once(rank, size):
    tensors = [ours(rank, count) for count in (1, 10, 1000)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(torch.equal(t, summed(size, t.numel())) for t in tensors)
    pairs = [(torch.empty(10 * size), ours(rank, 10)), (torch.empty(7 * size), ours(rank, 7))]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output, given in pairs:
            dist.all_gather_single(output, given)
    manager.wait()
    for output, given in pairs:
        assert torch.equal(output, torch.cat([ours(r, given.numel()) for r in range(size)]))


def case_objects_and_messages_pass(rank, size):
    everything = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * (rank * 1000)})
    assert [entry["rank"] for entry in everything] == list(range(size))
    told = [{"root": rank}]
    dist.broadcast_object_list(told, size - 1)
    assert told == [{"root": size - 1}]
    tensor = torch.full((1000,), float(rank))
    if rank == 0:
        dist.send(tensor, size - 1)
    elif rank == size - 1:
        dist.recv(tensor, 0)
        assert tensor[0] == 0
    got = torch.zeros(4)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
    )
    for request in requests:
        request.wait()
    assert got[0] == (rank - 1) % size


def case_subgroups_work_and_leave_nothing(rank, size):
    for members in ([0], [0, size - 1], list(range(size))):
        group = dist.new_group(members)
        if rank in members:
            tensor = ours(rank, 5000)
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, sum(ours(r, 5000) for r in members))
            root = members[-1]
            dist.broadcast(tensor.fill_(rank), root, group=group)
            assert (tensor == root).all()
            dist.destroy_process_group(group)
    dist.barrier()


def case_a_mismatch_in_a_subgroup_names_ranks_as_the_program_does(rank, size):
    first, second = size - 2, size - 1
    group = dist.new_group([first, second])
    if rank in (first, second):
        with pytest.raises(MismatchError) as caught:
            dist.broadcast(torch.zeros(2 if rank == first else 3), second, group=group)
        for member, count in ((first, 2), (second, 3)):
            line = f"rank {member}: broadcast of {count} x float32, root {second}, shape ({count},)"
            assert line in str(caught.value), caught.value
        dist.destroy_process_group(group)
    dist.barrier()


def case_tensors_in_pieces_are_copied_and_bad_ones_refused(rank, size):
    grid = torch.zeros(50, 40)
    column = grid[:, ::2]
    column.fill_(rank)
    dist.all_reduce(column)
    assert (column == sum(range(size))).all()
    assert (grid[:, 1::2] == 0).all()
    column = torch.zeros(size, 2)[:, 1]
    dist.all_to_all_single(column, torch.full((size, 2), float(rank))[:, 0])
    assert column.tolist() == list(range(size))
    columns = list(torch.zeros(3, size).unbind(1)) if rank == 0 else None
    dist.gather(torch.full((3, 2), float(rank))[:, 1], columns, 0)
    assert rank != 0 or all(columns[r].tolist() == [r] * 3 for r in range(size))
    column = torch.zeros(3, 2)[:, 1]
    dist.scatter(column, columns, 0)
    assert column.tolist() == [rank] * 3
    images = ours(rank, 2 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    assert torch.equal(images, summed(size, 120).view(2, 3, 4, 5))
    with pytest.raises(ConfigError, match="share memory"):
        dist.all_reduce(torch.zeros(1).expand(10))
    with pytest.raises(ConfigError, match="own memory"):
        dist.all_gather([torch.zeros(3)[:]] * size, torch.zeros(3))
    with pytest.raises(ConfigError, match="0 output tensors"):
        dist.all_gather([], torch.zeros(3))
    whole = torch.tensor([2, 3])
    with pytest.raises(ConfigError, match="no avg of int64"):
        dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.tolist() == [2, 3]
    with pytest.raises(ConfigError, match="elements"):
        dist.all_gather_single(torch.zeros(3 * size + 1), torch.zeros(3))
    with pytest.raises(ConfigError, match="split sizes"):
        dist.all_to_all_single(torch.zeros(2 * size), torch.zeros(2 * size), [1] * size, [2] * size)
    with pytest.raises(NoRoute, match="sparse"):
        dist.broadcast(torch.eye(3).to_sparse(), 0)
    with pytest.raises(NoRoute, match="meta"):
        dist.all_reduce(torch.zeros(3, device="meta"))
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.eye(3) * size)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert (tensor == size).all()  # the group goes on after refusals
