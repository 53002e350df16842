"""Writers of an arena are killed at random moments: what others find is always whole."""

import os
import random
import signal
import time

import pytest

torch = pytest.importorskip("torch")

from argosy.move import arenas  # noqa: E402

pytestmark = pytest.mark.faults
TRIALS = 30


def test_a_killed_writer_leaves_a_whole_directory_and_no_lock():
    """Each child appends as fast as it can and is killed; the next one, and we, go on at once."""
    chooser = random.Random(3)
    with arenas.create("victim", 64 << 20) as arena:
        for trial in range(TRIALS):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(write, b"x")
                number = 0
                while True:
                    arena.empty((16,), torch.int32, name=f"{trial}/{number}").fill_(trial)
                    number += 1
            os.read(read, 1)
            os.close(read)
            os.close(write)
            deadline = time.monotonic() + chooser.uniform(0.0, 0.02)
            while time.monotonic() < deadline:
                pass
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            mine = arena.empty((16,), torch.int32, name=f"own/{trial}").fill_(1000 + trial)
            assert int(mine[0]) == 1000 + trial
        offsets = []
        with arenas.open("victim") as other:
            for name in other.names():
                tensor = other.tensor(name)
                offsets.append(other.offset_of(tensor))
                owner, number = name.split("/")
                # Made and not yet filled: zeros; never another's bytes.
                wanted = 1000 + int(number) if owner == "own" else int(owner)
                assert set(tensor.tolist()) <= {0, wanted}
        assert len(offsets) == len(set(offsets)) > TRIALS


def test_pools_of_killed_processes_leave_no_memory():
    def shared():
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Shmem:"))

    before = shared()
    for _ in range(6):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            pool = arenas.Pool(growth_bytes=64 << 20)
            held = [pool.empty((1 << 20,)) for _ in range(4)]
            os.write(write, bytes([len(held)]))
            signal.pause()
        os.read(read, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
    deadline = time.monotonic() + 20
    while shared() - before > 128 << 20:
        assert time.monotonic() < deadline, "six killed pools of 64 MiB are still there"
        os.sched_yield()
