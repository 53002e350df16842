"""The exchange over torch.distributed: the bits of the local one, and typed errors when ranks differ or are lost."""

import os
import time
from datetime import timedelta

import msgspec
import pytest
import torch
import torch.distributed as dist
from benchmarks import exchangeranks
from benchmarks.exchangeranks import Job, Record, train

from argosy.errors import ConfigError, MismatchError, PeerLost, TimedOut
from argosy.move import remote
from argosy.move.rounds import Round

pytestmark = pytest.mark.multiprocess

LANES, STEPS = 5, 6


@pytest.fixture
def on_ranks(forked):
    """Run work(rank, size) in `size` forks over Gloo; what each returned."""

    def run(size, work, name="job"):
        def join(rank, directory):
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(directory / "store"), size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=30),
            )

        said = forked(size, lambda rank, _: work(rank, size), join, name)
        assert all("result" in one for one in said), said
        return [one["result"] for one in said]

    return run


def weights_of(job, rank, members):
    record = Record()
    record.target = STEPS
    train(job, record, rank, members)
    record.close()
    return bits_of(job)


def bits_of(job):
    return exchangeranks.hashlib.sha256(job.weights.numpy().tobytes()).hexdigest()


def remote_weights(rank, size):
    job = Job("remote", lanes=LANES, ranks=size, make=remote.open)
    members = dict.fromkeys(range(size), -1)
    job.exchange.enter(1, rank, members, deadline=time.monotonic() + 30)
    return weights_of(job, rank, list(members))


@pytest.fixture
def expected():
    """The weights of a run of one rank on the local exchange."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    job = Job("remote-reference", lanes=LANES, ranks=1)
    try:
        job.exchange.enter(1, 0, {0: -1}, deadline=time.monotonic() + 5)
        return weights_of(job, 0, [0])
    finally:
        job.close()
        torch.set_num_threads(before)


def test_weights_are_those_of_the_local_exchange_for_any_number_of_ranks(on_ranks, expected):
    for size in (2, 3):
        assert on_ranks(size, remote_weights, f"{size} ranks") == [expected] * size


def lose_a_rank(rank, size):
    """Other layouts are refused; then the last rank ends without a word."""
    job = Job("remote-lost", lanes=LANES, ranks=size, make=remote.open)
    exchange, said = job.exchange, []
    odd = msgspec.structs.replace(job.layout, terms=("loss", str(rank)))
    other = remote.open("remote-odd", odd)
    with pytest.raises(MismatchError, match=r"rank \d has generation 1, layout"):
        other.enter(1, rank, dict.fromkeys(range(size), -1), deadline=time.monotonic() + 20)
    exchange.enter(1, rank, dict.fromkeys(range(size), -1), deadline=time.monotonic() + 20)
    with pytest.raises(TimedOut, match=r"no rank has lanes \[0, 1, 2, 3, 4\]"):
        exchange.wait_lanes(Round(0, 0), deadline=time.monotonic() + 20)
    if rank == size - 1:
        return said
    started = time.monotonic()
    try:
        exchange.wait_read(Round(0, 0), deadline=time.monotonic() + 3)
    except (PeerLost, TimedOut) as failure:
        said.append(type(failure).__name__)
    assert time.monotonic() - started < 20
    return said


def test_a_lost_rank_ends_waits_with_a_typed_error(on_ranks):
    first, second, lost = on_ranks(3, lose_a_rank)
    assert lost == []
    assert set(first + second) <= {"PeerLost", "TimedOut"}
    assert len(first) == len(second) == 1


def go_on_without_the_last(rank, size):
    """Three ranks train, keep each other's state, begin a step; then two go on in a group of their own."""
    job = Job("remote-regrouped", lanes=LANES, ranks=size, make=remote.open)
    pair = dist.new_group(list(range(size - 1)))
    exchange, layout = job.exchange, job.layout
    exchange.enter(1, rank, dict.fromkeys(range(size), -1), deadline=time.monotonic() + 30)
    record = Record()
    record.target = STEPS // 2
    train(job, record, rank, list(range(size)))
    version, slot = exchange.state.current()
    for owner in range(size):
        for name in layout.share(owner, size):
            for start, stop in map(layout.bounds, layout.pages_of(name)):
                kept = job.states[slot, :, start:stop].contiguous()
                dist.broadcast(kept, owner)
                job.states[slot, :, start:stop].copy_(kept)
    first, stop = (LANES * (rank + i) // size for i in (0, 1))
    for block in layout.blocks(first, stop - first):
        claim = exchange.claim(Round(version, step=version), block)
        claim.zero()
        for lane in range(block.first, block.stop):
            claim.flat.add_(job.gradient(version, lane))
        exchange.publish(claim, terms={"loss": (float(block.first), float(block.size))})
    record.target = STEPS
    if rank == size - 1:
        return None
    exchange.regroup(pair)
    with pytest.raises(ConfigError, match="in a group of 2"):
        exchange.enter(2, rank, dict.fromkeys(range(size), -1), deadline=time.monotonic() + 30)
    members = dict.fromkeys(range(size - 1), -1)
    exchange.enter(2, rank, members, deadline=time.monotonic() + 30)
    train(job, record, rank, list(members))
    return bits_of(job)


def test_survivors_regroup_and_go_on_with_the_bits_of_an_undisturbed_run(on_ranks, expected):
    assert on_ranks(3, go_on_without_the_last) == [expected, expected, None]
