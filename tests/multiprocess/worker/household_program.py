"""A household that does one small thing, named on the command line: `household_program.py CASE DIRECTORY`; no torch in it."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from argosy.errors import ConfigError
from argosy.move import broker
from argosy.worker import births, gang, stops
from argosy.worker.household import keep_house

SECONDS = 30.0
DIRECTORY = Path(sys.argv[2])


def wait_until(is_so, what):
    deadline = time.monotonic() + SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.002)


def numbers(name="numbers"):
    """One shared byte for each rank."""
    return broker.create(name, 4096, scope="run").descriptor


def mark_and_wait(descriptor, rank, value, world_size=3):
    """Until all have come so far; who was quick may be further."""
    os.pwrite(descriptor, bytes([value]), rank)
    wait_until(
        lambda: min(os.pread(descriptor, world_size, 0)) >= value,
        f"{value} of all ranks, have {os.pread(descriptor, world_size, 0)}",
    )


def share():
    own = gang.join()
    mark_and_wait(numbers(), own.rank, 7)
    print(f"rank {own.rank} of {own.world_size} in {own.generation}", flush=True)
    assert os.environ["MASTER_PORT"] != "0"


def reform():
    own = gang.join()
    shared = numbers()
    if own.generation == 1:
        mark_and_wait(shared, own.rank, 1)
        if own.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: own.lost() == {1}, "the loss of rank 1")
        wait_until(lambda: own.coming() is not None, "generation 2")
        own.take()
        assert own.lost() == frozenset()
    mark_and_wait(shared, own.rank, 2)
    print(f"rank {own.rank} in {own.generation}", flush=True)


def quick_deaths():
    """Two die at once, and one of the newcomers before it has joined."""
    own = None
    first = broker.create("first", 4096, scope="run").descriptor
    if os.environ["RANK"] == "1" and os.environ["ARGOSY_GENERATION"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    own = gang.join()
    if own.generation == 1:
        mark_and_wait(first, own.rank, 1)
        if own.rank in (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
    last = broker.create("last", 4096, scope="run").descriptor
    deadline = time.monotonic() + SECONDS
    while True:
        if own.coming() is not None:
            own.take()
        os.pwrite(last, bytes([own.generation]), own.rank)
        seen = set(os.pread(last, 3, 0))
        if seen == {own.generation} and own.generation >= 3:
            break
        assert time.monotonic() < deadline, seen
        time.sleep(0.002)
    print(f"rank {own.rank} done", flush=True)


def sleep():
    (DIRECTORY / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)


def save():
    stops.watch()
    own = gang.join()
    assert not own.stopping
    sleep_marker(own)
    wait_until(lambda: own.stopping, "SIGTERM")
    (DIRECTORY / f"saved-{own.rank}").write_text("saved")


def save_slowly():
    """Still at it when everything that a closed terminal sends has come."""
    stops.watch()
    own = gang.join()
    assert not own.stopping
    sleep_marker(own)
    wait_until(lambda: own.stopping, "SIGTERM")
    wait_until(lambda: not Path(f"/proc/{os.getsid(0)}").exists(), "the end of the shell")
    time.sleep(0.3)  # what a save takes
    (DIRECTORY / f"saved-{own.rank}").write_text("saved")


def stubborn():
    stops.watch()
    own = gang.join()
    assert not own.stopping
    sleep_marker(own)
    wait_until(lambda: own.stopping, "SIGTERM")
    (DIRECTORY / f"saved-{own.rank}").write_text("never mind")
    time.sleep(600)


def sleep_marker(own):
    (DIRECTORY / f"pid-{own.rank}").write_text(str(os.getpid()))


def broken():
    own = gang.join()
    if own.rank == 1:
        raise ValueError("boom")
    time.sleep(600)


def broken_once():
    own = gang.join()
    if own.rank == 1 and own.generation == 1:
        raise ValueError("boom")
    if own.rank != 1:
        wait_until(lambda: own.coming() is not None, "generation 2")


def hang():
    own = gang.join()
    shared = numbers()
    if own.generation == 1:
        mark_and_wait(shared, own.rank, 1)
        if own.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        own.suspect(2, "no sign of it")
        wait_until(lambda: own.lost() == {2}, "the loss of rank 2")
        wait_until(lambda: own.coming() is not None, "generation 2")
        own.take()
    mark_and_wait(shared, own.rank, 2)


def hopeless():
    own = gang.join()
    own.fail("the loss is not finite")
    time.sleep(600)


def plain():
    """A program that knows nothing of re-forming: all are started again."""
    generation = int(os.environ["ARGOSY_GENERATION"])
    if generation == 1:
        mark_and_wait(numbers(), int(os.environ["RANK"]), 1)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    print(f"rank {os.environ['RANK']} in {generation}", flush=True)


def refusing():
    raise ConfigError("batch_size = 100 is not divisible by lanes = 8", fix="use 96 or 104")


def leaving_children():
    child = subprocess.Popen(["sleep", "600"])
    (DIRECTORY / f"pid-{os.environ['RANK']}").write_text(str(child.pid))


def lacking():
    """Nothing can be written, and the first replacement cannot be forked."""
    hang()


def fail_to_fork_once():
    fork, calls = births.fork, []

    def scarce(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork(*arguments)

    births.fork = scarce


if __name__ == "__main__":
    name = sys.argv[1]
    body = globals()[name]
    directory = DIRECTORY
    if name == "lacking":
        directory = DIRECTORY / "missing"
        fail_to_fork_once()
    end = keep_house(body, num_ranks=3, directory=str(directory), environment={})
    # The parent itself is as it was: no rank, no descriptors of the household's.
    assert births.PARENT not in os.environ
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if int(number) > 2 and os.path.lexists(path):
            what = os.readlink(path)
            assert not any(word in what for word in ("socket", "memfd", "pidfd")), what
    sys.exit(end.code)
