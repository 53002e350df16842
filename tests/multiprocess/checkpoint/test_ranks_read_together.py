"""What several ranks of a host load comes from the disk once; a rank that dies, comes late or stands still costs the others nothing but time."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from argosy.checkpoint import Checkpointer, Rules, Writing, groups, neighbours, windows
from argosy.checkpoint.directio import Files
from argosy.checkpoint.tiers.chain import Hop

pytestmark = pytest.mark.multiprocess

ROWS = 3072
"""With 1,024 columns of float32: 12 MiB."""


def values(seed, rows=ROWS):
    return torch.arange(rows * 1024, dtype=torch.float32).mul(seed).reshape(rows, 1024)


@pytest.fixture
def path(tmp_path):
    """Three tensors: 12 MiB each."""
    where = tmp_path / "store"
    with Checkpointer(where, group=groups.Group()) as checkpointer:
        checkpointer.save(1, {"all": values(1), "pair": values(2), "own": values(3)})
    return where


def disk_bytes():
    """What the kernel says this process has read from disks."""
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("read_bytes")).split()[1])


def test_replicas_read_from_the_disk_once_and_shards_what_is_theirs(ranks, path):
    def body(rank):
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False)

        def laid(placements, part):
            return DTensor.from_local(
                part, mesh, placements, run_check=False, shape=(ROWS, 1024), stride=(1024, 1)
            )

        half, quarter = ROWS // 2, ROWS // 4
        found = []
        for threads, is_alone in ((4, False), (1, False), (4, True)):
            state = {
                "all": torch.zeros(ROWS, 1024),
                "pair": laid([Shard(0), Replicate()], torch.zeros(half, 1024)),
                "own": laid([Shard(0), Shard(0)], torch.zeros(quarter, 1024)),
            }
            group = patient(groups.of_process(seconds=20))
            if is_alone:
                group._met = group.met()._replace(neighbours=None)
            before = disk_bytes()
            loaded = Checkpointer(path, group=group).load(
                state, rules=Rules(threads=threads), streams=False
            )
            from_disk = disk_bytes() - before
            first = rank // 2 * half
            right = (
                torch.equal(state["all"], values(1)),
                torch.equal(state["pair"].to_local(), values(2)[first : first + half]),
                torch.equal(
                    state["own"].to_local(), values(3)[rank * quarter : (rank + 1) * quarter]
                ),
            )
            numbers = loaded.statistics
            found.append(
                (
                    all(right),
                    loaded.how,
                    numbers.bytes_read + numbers.bytes_taken,
                    numbers.bytes_read,
                    numbers.bytes_given,
                    from_disk,
                )
            )
        return found

    results = ranks(4, body)
    assert [one["leaked"] for one in results] == [0] * 4, results
    together, one_by_one, alone = zip(*(one["result"] for one in results), strict=True)
    assert all(one[0] for one in [*together, *one_by_one, *alone])
    for number in (3, 4):  # whoever comes first reads for the others
        totals = [sum(one[number] for one in ranks) for ranks in (one_by_one, together)]
        assert totals[0] == totals[1]
    assert {one[1] for one in together} == {"shared"}
    assert {one[1] for one in alone} == {"alone"}
    # Everybody has got as much as by itself; of the chunks at the borders of shards some are read by two.
    mebibyte = 1 << 20
    assert [one[2] for one in together] == [one[2] for one in alone]
    assert sum(one[3] for one in together) <= 36.3 * mebibyte
    assert sum(one[3] for one in alone) >= (4 * 12 + 2 * 12 + 12) * mebibyte
    assert sum(one[4] for one in together) >= 23 * mebibyte
    if all(one[5] for one in alone):  # not on a file system in memory
        assert sum(one[5] for one in together) <= 37 * mebibyte


def patient(group):
    """On a busy machine ranks that begin together may come seconds apart."""
    group.met().neighbours.patience_seconds = 20.0
    return group


def seated(rank, seat):
    """A group in which rank 0 has the first place of its host: it reads the first stretch. All have come when it returns."""

    def enlisted(*given):
        if rank:
            wait_for(seat)
        found = neighbours.Neighbours(*given)
        seat.touch()
        return found

    groups.Neighbours = enlisted
    group = groups.of_process(seconds=20)
    own = group.met().neighbours
    while own.roll.enlisted(own.host) < dist.get_world_size():
        time.sleep(0.005)
    return group


def loaded_right(path, group, files=None):
    """Load all of it; whether it is right, how it was read, and the bytes that this rank has read."""
    writing = Writing(files=files) if files is not None else None
    wanted = {"all": values(1), "pair": values(2), "own": values(3)}
    state = {name: torch.zeros(ROWS, 1024) for name in wanted}
    checkpointer = Checkpointer(path, group=group, writing=writing)
    # Without the agreement after it: here ranks come, go and die as they like.
    loaded = checkpointer._load_one(Hop(1), state, None, False)
    is_right = all(torch.equal(state[name], wanted[name]) for name in wanted)
    return is_right, loaded.how, loaded.statistics.bytes_read


class Halting(Files):
    """Does something before its second large read."""

    def __init__(self, halt):
        self.halt, self.left = halt, 2

    def read(self, descriptor, into, offset):
        if len(into) > 1 << 20:
            self.left -= 1
            if self.left == 0:
                self.halt()
        return super().read(descriptor, into, offset)


def wait_for(file):
    """A file that another rank makes; the alarm of the fork is the deadline."""
    while not file.exists():
        time.sleep(0.005)


def test_a_reader_that_dies_or_stands_still_and_a_rank_that_is_late(ranks, path, tmp_path):
    def dies(rank):
        def die():
            os.kill(os.getpid(), signal.SIGKILL)

        group = seated(rank, tmp_path / "seat-1")
        return loaded_right(path, group, Halting(die) if rank == 0 else None)

    results = ranks(3, dies, "dies")
    assert results[0] == {"status": signal.SIGKILL}
    assert [one["result"][0] for one in results[1:]] == [True, True]

    def stands_still(rank):
        windows.STILL_SECONDS = 0.2
        group, gone_on = seated(rank, tmp_path / "seat-2"), tmp_path / "gone-on"
        if rank == 0:
            return loaded_right(path, group, Halting(lambda: wait_for(gone_on)))
        found = loaded_right(path, group)
        gone_on.touch()
        return found

    results = ranks(2, stands_still, "stands-still")
    assert [one["result"][0] for one in results] == [True, True]
    assert results[1]["result"][2] > 0

    def comes_late(rank):
        group = seated(rank, tmp_path / "seat-3")
        if rank == 0:  # it has the first place
            wait_for(tmp_path / "loaded")
        found = loaded_right(path, group)
        (tmp_path / "loaded").touch()
        return found

    for one in ranks(2, comes_late, "comes-late"):
        assert one["result"][:2] == [True, "alone"]


def test_a_taker_that_stands_still_notices_that_its_bytes_were_overwritten(ranks, path, tmp_path):
    def body(rank):
        windows.STILL_SECONDS = 0.2
        neighbours.NUM_BLOCKS = 1
        group, gone_on = patient(seated(rank, tmp_path / "seat")), tmp_path / "gone-on"
        find = windows.Window.find

        def slow(window, index, reader):
            address = find(window, index, reader)
            if index == 0 and rank == 1:
                wait_for(gone_on)
            return address

        windows.Window.find = slow
        found = loaded_right(path, group)
        gone_on.touch()
        return found

    first, second = (one["result"] for one in ranks(2, body))
    assert first[:2] == second[:2] == [True, "shared"]
    assert second[2] >= 23 << 20  # of 36 MiB: its turns, and what it had to read again


def test_damage_is_found_by_all_and_all_go_back_together(ranks, path):
    with Checkpointer(path, group=groups.Group()) as checkpointer:
        checkpointer.save(2, {"all": values(4), "pair": values(5), "own": values(6)})
    file = path / "step-000000002" / "extra-00001-of-00001.safetensors"
    with open(file, "r+b") as opened:
        opened.seek(20 << 20)
        opened.write(b"?")

    def body(rank):
        state = {name: torch.zeros(ROWS, 1024) for name in ("all", "pair", "own")}
        group = groups.of_process(seconds=20)
        loaded = Checkpointer(path, group=group).load(state, streams=False)
        return loaded.step, torch.equal(state["pair"], values(2)), loaded.skipped

    for one in ranks(2, body):
        step, is_right, skipped = one["result"]
        assert (step, is_right) == (1, True)
        assert "do not have their checksum" in skipped[0]
