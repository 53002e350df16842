"""Cases of test_messages.py: what ranks send each other arrives as it was sent, and what does not fit is refused by name."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from argosy.errors import ConfigError, MismatchError, NoRoute, TimedOut
from argosy.move import counters

LARGE = 300_000


def prepare(rank, size):
    if os.environ.get("SPLIT"):
        os.environ["ARGOSY_LOCALITY"] = "left" if rank < (size + 1) // 2 else "right"


def between(rank, size, send, receive):
    """The first rank sends, the last one receives, the others wait."""
    if rank == 0:
        send(size - 1)
    elif rank == size - 1:
        receive(0)
    dist.barrier()


def numbers(count, dtype=torch.float32):
    return (torch.arange(count) % 100).to(dtype)


def case_every_size_and_dtype_arrives(rank, size):
    for count in (0, 1, 3000, 5000, LARGE):
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.uint16, torch.int64):
            room = torch.zeros(count, dtype=dtype)
            wanted = numbers(count, dtype)
            between(
                rank,
                size,
                lambda peer, wanted=wanted: dist.send(wanted, peer),
                lambda peer, room=room: dist.recv(room, peer),
            )
            assert rank != size - 1 or torch.equal(room, wanted), (count, dtype)


def case_pieces_are_sent_and_filled(rank, size):
    for count in (3, LARGE):
        grid = torch.zeros(count, 2)
        between(
            rank,
            size,
            lambda peer, count=count: dist.send(numbers(2 * count).view(count, 2)[:, 1], peer),
            lambda peer, grid=grid: dist.recv(grid[:, 1], peer),
        )
        if rank == size - 1:
            assert torch.equal(grid[:, 1], numbers(2 * count).view(count, 2)[:, 1])
            assert not grid[:, 0].any()


def case_what_does_not_fit_is_refused_with_both_call_sites_and_the_next_message_arrives(rank, size):
    for sent, room in (
        (numbers(8), torch.full((4,), 7.0)),
        (numbers(4), torch.full((8,), 7.0)),
        (numbers(4).double(), torch.full((4,), 7.0)),
        (numbers(4).double(), torch.full((8,), 7.0)),
        (numbers(LARGE), torch.full((4,), 7.0)),
        (numbers(4), torch.full((LARGE,), 7.0)),
        (numbers(2 * LARGE), torch.full((LARGE,), 7.0)),
        (numbers(LARGE).double(), torch.full((LARGE,), 7.0)),
    ):
        if rank == 0:
            dist.send(sent, size - 1)
            dist.send(numbers(5), size - 1)
        elif rank == size - 1:
            with pytest.raises(MismatchError) as caught:
                dist.recv(room, 0)
            dtype = str(sent.dtype).removeprefix("torch.")
            theirs = f"rank 0: send of {sent.numel()} x {dtype}, shape ({sent.numel()},) at "
            mine = f"rank {rank}: recv of {room.numel()} x float32, shape ({room.numel()},) at "
            text = str(caught.value)
            assert theirs in text, text
            assert mine in text, text
            assert text.count("message_cases.py") == 2, text
            assert (room == 7.0).all()
            following = torch.zeros(5)
            dist.recv(following, 0)
            assert torch.equal(following, numbers(5))
    dist.barrier()


def case_batches_are_refused_alike(rank, size):
    messages = []
    if rank == 0:
        messages = [dist.P2POp(dist.isend, numbers(8), size - 1)]
    elif rank == size - 1:
        messages = [dist.P2POp(dist.irecv, torch.zeros(4), 0)]
    works = dist.batch_isend_irecv(messages) if messages else []
    for work in works:
        if rank == 0:
            work.wait()
        else:
            with pytest.raises(MismatchError, match="send of 8 x float32"):
                work.wait()
            with pytest.raises(MismatchError):
                work.wait()
            assert not work.is_success()
    dist.barrier()


def case_bad_arguments_are_refused_and_leave_the_connection_as_it_was(rank, size):
    peer = (rank + 1) % size
    for call, error, text in (
        (lambda: dist.send(torch.zeros(3, device="meta"), peer), NoRoute, "meta"),
        (lambda: dist.recv(torch.zeros(3, device="meta"), peer), NoRoute, "meta"),
        (lambda: dist.send(torch.eye(3).to_sparse(), peer), NoRoute, "sparse"),
        (lambda: dist.recv(torch.zeros(1).expand(4), peer), ConfigError, "share memory"),
        (lambda: dist.send(torch.zeros(3), peer, tag=1 << 30), ConfigError, "tag"),
        (lambda: dist.group.WORLD.send([torch.zeros(1)] * 2, peer, 0), ConfigError, "2 tensors"),
    ):
        with pytest.raises(error, match=text):
            call()
    room = torch.zeros(4)
    between(
        rank, size, lambda peer: dist.send(numbers(4), peer), lambda peer: dist.recv(room, peer)
    )
    assert rank != size - 1 or torch.equal(room, numbers(4))


def case_any_source_is_told(rank, size):
    for count in (4, LARGE):
        if rank == 0:
            room = torch.zeros(count)
            sources = []
            for _ in range(size - 1):
                sources.append(dist.recv(room))
                assert (room == sources[-1]).all()
            assert sorted(sources) == list(range(1, size))
        else:
            dist.send(torch.full((count,), float(rank)), 0)
        dist.barrier()
    if rank == 0:
        work = dist.irecv(torch.zeros(2))
        with pytest.raises(MismatchError, match="rank 1: send of 3 x float32"):
            work.wait()
    elif rank == 1:
        dist.send(torch.zeros(3), 0)
    dist.barrier()


def case_large_messages_cross_while_both_sides_send(rank, size):
    if rank < 2:
        room = torch.zeros(LARGE)
        coming = dist.irecv(room, 1 - rank)
        dist.send(torch.full((LARGE,), float(rank)), 1 - rank)
        assert coming.wait()
        assert coming.is_completed()
        assert coming.is_success()
        assert (room == 1 - rank).all()
    dist.barrier()


def case_order_is_kept_for_a_tag_and_only_for_it(rank, size):
    counts = (5, LARGE, 6, LARGE + 1)
    if rank == 0:
        works = [dist.isend(numbers(count), size - 1, tag=1) for count in counts]
        works += [dist.isend(numbers(7), size - 1, tag=2)]
        for work in works:
            work.wait()
    elif rank == size - 1:
        first = torch.zeros(7)
        dist.recv(first, 0, tag=2)
        rooms = [torch.zeros(count) for count in counts]
        works = [dist.irecv(room, 0, tag=1) for room in rooms]
        for work in reversed(works):
            work.wait()
        assert all(torch.equal(room, numbers(len(room))) for room in (first, *rooms))
    dist.barrier()


def case_messages_are_counted(rank, size):
    before = counters.snapshot()
    room = torch.zeros(LARGE)
    between(
        rank, size, lambda peer: dist.send(numbers(LARGE), peer), lambda peer: dist.recv(room, peer)
    )
    added = counters.own.since(before)
    if rank in (0, size - 1):
        assert added["gloo_bytes"] >= 4 * LARGE
        assert added["gloo_calls"] >= 1


def case_a_wait_that_is_given_up_leaves_the_message_and_the_group_as_they_were(rank, size):
    soon = timedelta(milliseconds=20)
    for count in (4, LARGE):
        if rank == 0:
            dist.barrier()
            dist.send(numbers(count), size - 1)
        elif rank == size - 1:
            room = torch.zeros(count)
            coming = dist.irecv(room, 0)
            for _ in range(2):
                with pytest.raises(
                    TimedOut, match=r"recv from rank 0 in group .*: not over in 0\.02 s"
                ):
                    coming.wait(soon)
            assert not coming.is_completed()
            dist.barrier()
            assert coming.wait(timedelta(seconds=20))
            assert torch.equal(room, numbers(count))
        else:
            dist.barrier()
    if rank == 0:
        going = dist.isend(numbers(LARGE), size - 1)
        with pytest.raises(TimedOut, match="send to"):
            going.wait(soon)
        dist.barrier()
        assert going.wait()
    else:
        dist.barrier()
        if rank == size - 1:
            room = torch.zeros(LARGE)
            dist.recv(room, 0)
            assert torch.equal(room, numbers(LARGE))
    dist.barrier()
