"""Words between real processes: wakeups, deaths, deadlines and swaps, on both paths and without torch in the children."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from argosy.errors import PeerLost, TimedOut
from argosy.move import waits

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("path")]

PRELUDE = """
import ctypes, mmap, os, sys, time
from argosy.move import waits
descriptor = int(sys.argv[1])
page = mmap.mmap(descriptor, 4096)
held = ctypes.c_char.from_buffer(page)
base = ctypes.addressof(held)
parent = waits.Peers([os.pidfd_open(os.getppid())], ranks=[0], spin_seconds=float(sys.argv[2]))
def wait(word, value):
    waits.wait(word, value, peers=parent, deadline=time.monotonic() + 60)
"""

READY, PING, PONG, DATA = 0, 64, 128, 192


@contextmanager
def child(memory, program: str, spin_seconds: float = 0.0):
    """A process that runs `program`; gives the process and its descriptor, and ends it whatever happens."""
    descriptor = memory[1]
    command = [sys.executable, "-c", PRELUDE + program, str(descriptor), str(spin_seconds)]
    process = subprocess.Popen(command, pass_fds=(descriptor,), stdin=subprocess.DEVNULL)
    pidfd = os.pidfd_open(process.pid)
    try:
        yield process, pidfd
    finally:
        process.kill()
        process.wait()
        os.close(pidfd)


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize("spin_seconds", [0.0, 20e-6])
def test_two_processes_wake_each_other_and_see_what_was_written_before(memory, spin_seconds):
    address, _ = memory
    rounds = 1000
    program = f"""
for turn in range(1, {rounds} + 1):
    wait(base + {PING}, turn)
    value = ctypes.c_uint64.from_address(base + {DATA}).value
    assert value == turn * 3, (value, turn)
    ctypes.c_uint64.from_address(base + {DATA}).value = value + 1
    waits.post(base + {PONG}, turn)
"""
    with child(memory, program, spin_seconds) as (process, pidfd):
        peers = waits.Peers([pidfd], ranks=[1], spin_seconds=spin_seconds)
        data = ctypes.c_uint64.from_address(address + DATA)
        for turn in range(1, rounds + 1):
            data.value = turn * 3
            waits.post(address + PING, turn)
            waits.wait(address + PONG, turn, peers=peers, deadline=soon())
            assert data.value == turn * 3 + 1
        assert process.wait(timeout=60) == 0


def test_the_death_of_a_peer_ends_the_wait_with_its_rank(memory):
    address, _ = memory
    program = f"""
waits.post(base + {READY}, 1)
wait(base + {PING}, 1)
"""
    with ExitStack() as stack:
        children = [stack.enter_context(child(memory, program)) for _ in range(2)]
        peers = waits.Peers([-1, *(pidfd for _, pidfd in children)], ranks=[3, 5, 7])
        waits.wait(address + READY, 1, peers=peers, deadline=soon())
        children[1][0].send_signal(signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank 7 has ended during a meeting") as failure:
            waits.wait(address + PONG, 1, peers=peers, deadline=soon(), what="a meeting")
        assert failure.value.rank == 7
        waits.post(address + PING, 1)
        assert children[0][0].wait(timeout=60) == 0


def test_what_a_peer_posted_before_it_ended_counts(memory):
    address, _ = memory
    with child(memory, f"waits.post(base + {PONG}, 1)") as (process, pidfd):
        assert process.wait(timeout=60) == 0
        waits.wait(address + PONG, 1, peers=waits.Peers([pidfd]), deadline=soon())


def test_a_stopped_peer_is_waited_for_until_the_deadline_and_no_longer(memory, halt):
    address, _ = memory
    program = f"waits.post(base + {READY}, 1); wait(base + {PING}, 1); waits.post(base + {PONG}, 1)"
    with child(memory, program) as (process, pidfd):
        peers = waits.Peers([pidfd], ranks=[1])
        waits.wait(address + READY, 1, peers=peers, deadline=soon())
        halt(process.pid)
        waits.post(address + PING, 1)
        with pytest.raises(TimedOut, match="for ranks 1"):
            waits.wait(address + PONG, 1, peers=peers, deadline=soon(0.3))
        process.send_signal(signal.SIGCONT)
        waits.wait(address + PONG, 1, peers=peers, deadline=soon())
        assert process.wait(timeout=60) == 0


def test_a_broken_word_set_by_one_process_ends_the_wait_of_another(memory):
    address, _ = memory
    program = f"""
from argosy.errors import PeerLost
waits.post(base + {READY}, 1)
try:
    waits.wait(base + {PONG}, 1, peers=waits.Peers([-1], broken=base + {PING}), deadline=time.monotonic() + 60)
except PeerLost as lost:
    sys.exit(40 + lost.rank)
"""
    with child(memory, program) as (process, pidfd):
        waits.wait(address + READY, 1, peers=waits.Peers([pidfd]), deadline=soon())
        waits.break_off(waits.Peers([pidfd], broken=address + PING), 2)
        assert process.wait(timeout=60) == 42


def test_swaps_of_several_processes_lose_no_update_though_one_is_killed(memory):
    address, _ = memory
    program = f"""
waits.post(base + {READY}, 1)
for _ in range(300):
    while not waits.compare_and_swap(base + {DATA}, seen := waits.load(base + {DATA}), seen + 1, descriptor=descriptor):
        pass
"""
    endless = program.replace("range(300)", "iter(int, 1)").replace(
        f"base + {DATA}", f"base + {DATA + 64}"
    )
    with ExitStack() as stack:
        # The victim takes the same lock for a word of its own: its death must free it.
        victim, pidfd = stack.enter_context(child(memory, endless))
        waits.wait(address + READY, 1, peers=waits.Peers([pidfd]), deadline=soon())
        children = [stack.enter_context(child(memory, program)) for _ in range(2)]
        while waits.load(address + DATA) < 100:
            time.sleep(0.001)
        victim.send_signal(signal.SIGKILL)
        assert [process.wait(timeout=60) for process, _ in children] == [0, 0]
    assert waits.load(address + DATA) == 600


def test_the_lock_of_a_killed_holder_is_free_again(memory, path):
    if path == "native":
        pytest.skip("native swaps take no lock")
    address, descriptor = memory
    program = f"""
import fcntl, signal
own = os.open(f"/proc/self/fd/{{descriptor}}", os.O_RDWR)
fcntl.flock(own, fcntl.LOCK_EX)
waits.post(base + {READY}, 1)
signal.pause()
"""
    with child(memory, program) as (process, pidfd):
        waits.wait(address + READY, 1, peers=waits.Peers([pidfd]), deadline=soon())
        probe = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(probe)
        process.send_signal(signal.SIGKILL)
        assert waits.compare_and_swap(address + DATA, 0, 9, descriptor=descriptor)
    assert waits.load(address + DATA) == 9


def test_children_that_use_words_do_not_load_torch():
    code = "import sys; from argosy.move import waits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
