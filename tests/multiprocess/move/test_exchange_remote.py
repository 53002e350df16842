"""The exchange over torch.distributed: the bits of the local one, and typed errors when ranks differ or are lost."""

import json
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from benchmarks import exchangeranks
from benchmarks.exchangeranks import Job, Record, train

from argosy.errors import MismatchError, PeerLost, TimedOut
from argosy.move import remote
from argosy.move.rounds import Round

pytestmark = pytest.mark.multiprocess

LANES, STEPS = 5, 6


def on_ranks(size, work):
    """Run work(rank) in `size` forks over Gloo; what each returned."""
    with tempfile.TemporaryDirectory() as scratch:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.alarm(90)
                    torch.set_num_threads(1)
                    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                    store = dist.FileStore(f"{scratch}/store", size)
                    dist.init_process_group(
                        "gloo",
                        store=store,
                        rank=rank,
                        world_size=size,
                        timeout=timedelta(seconds=30),
                    )
                    Path(scratch, f"{rank}.json").write_text(json.dumps(work(rank, size)))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes == [0] * size
        return [json.loads(Path(scratch, f"{rank}.json").read_text()) for rank in range(size)]


def weights_of(job, rank, members):
    record = Record()
    record.target = STEPS
    train(job, record, rank, members)
    record.close()
    return (
        job.weights.numpy().tobytes().hex()[:4096]
        + exchangeranks.hashlib.sha256(job.weights.numpy().tobytes()).hexdigest()
    )


def remote_weights(rank, size):
    job = Job("remote", lanes=LANES, ranks=size, make=remote.open)
    members = dict.fromkeys(range(size), -1)
    job.exchange.enter(1, rank, members, deadline=time.monotonic() + 30)
    return weights_of(job, rank, list(members))


def test_weights_are_those_of_the_local_exchange_for_any_number_of_ranks():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    job = Job("remote-reference", lanes=LANES, ranks=1)
    try:
        job.exchange.enter(1, 0, {0: -1}, deadline=time.monotonic() + 5)
        expected = weights_of(job, 0, [0])
    finally:
        job.close()
        torch.set_num_threads(before)
    for size in (2, 3):
        assert on_ranks(size, remote_weights) == [expected] * size


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


def test_a_lost_rank_ends_waits_with_a_typed_error():
    first, second, lost = on_ranks(3, lose_a_rank)
    assert lost == []
    assert set(first + second) <= {"PeerLost", "TimedOut"}
    assert len(first) == len(second) == 1
