"""One rank of test_collective_deaths.py: runs a named fate over the argosy backend and prints what became of it as one JSON line.

`python doomed_rank.py FATE RANK SIZE STORE`; forks the ranks itself when RANK is "all" so that torch is imported once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import argosy.move.groups  # noqa: F401 - registers the backend
from argosy.errors import PeerLost
from argosy.move.fsdp import fsdp_fast_path

VICTIM = int(os.environ.get("DOOMED_RANK", "1"))
PROGRAM_LIVES = os.pipe()
SPLIT_AT = int(os.environ.get("DOOMED_SPLIT_AT", "0"))
"""From this rank on ranks count as being on a second host; 0: all are on one."""


def killed_in_the_middle(rank, size):
    """The victim is killed from outside while everybody is in a loop of large calls."""
    tensor = torch.zeros(3_000_000)
    if rank == VICTIM:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        dist.all_reduce(tensor)


def killed_before_it_comes(rank, size):
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(10))


def killed_while_others_wait_in_the_background(rank, size):
    if rank == VICTIM:
        time.sleep(
            0.2
        )  # the others are in their call by then; the outcome is the same if they are not
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_gather([torch.zeros(10) for _ in range(size)], torch.zeros(10), async_op=True)
    work.wait()


def killed_before_its_message(rank, size):
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(10), VICTIM)


def killed_before_it_takes_a_message(rank, size):
    """Larger than what sockets hold."""
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(torch.zeros(5_000_000), VICTIM)


def killed_in_the_middle_of_a_message(rank, size):
    """So large that only a part of it has come."""
    dist.barrier()
    tensor = torch.zeros(30_000_000)
    if rank == VICTIM:
        works = [dist.isend(tensor, other) for other in range(size) if other != VICTIM]
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
        del works
    while True:
        dist.recv(tensor, VICTIM)


def killed_in_a_batch_of_messages(rank, size):
    """As pipelining has them: the others wait in it when the victim ends."""
    dist.barrier()
    if rank == VICTIM:
        time.sleep(0.2)  # the outcome is the same if the others are not there yet
        os.kill(os.getpid(), signal.SIGKILL)
    messages = [
        dist.P2POp(dist.irecv, torch.zeros(4), VICTIM),
        dist.P2POp(dist.isend, torch.zeros(4), VICTIM),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def killed_while_gloo_does_the_work(rank, size):
    """An operation without a kernel here: everybody is in Gloo when the victim ends."""
    tensor = torch.zeros(3_000_000, dtype=torch.int64)
    if rank == VICTIM:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        dist.all_reduce(tensor, dist.ReduceOp.BOR)


def killed_in_a_group_of_some(rank, size):
    """Whose ranks have other numbers in it: the victim's own is told, of a message and of a collective."""
    members = sorted({VICTIM, 1 if VICTIM == 2 else 2})
    group = dist.new_group(members)
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank in members:
        for call in (
            lambda: dist.recv(torch.zeros(3), VICTIM, group=group),
            lambda: dist.recv(torch.zeros(3), group=group),
            lambda: dist.all_reduce(torch.zeros(3), group=group),
        ):
            with pytest.raises(PeerLost, match=f"rank {VICTIM} has ended") as caught:
                call()
            assert caught.value.rank == VICTIM
    dist.all_reduce(torch.zeros(10))


def killed_while_a_child_of_it_lives(rank, size):
    """As a worker of a DataLoader may: it has copies of all descriptors of its parent."""
    dist.barrier()
    if rank == VICTIM:
        leave_a_child()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(10))


def killed_before_its_message_while_a_child_of_it_lives(rank, size):
    dist.barrier()
    if rank == VICTIM:
        leave_a_child()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(10), VICTIM)


def leave_a_child():
    """It ends with this program, when nobody has the other end of the pipe any more."""
    if os.fork() == 0:
        os.close(PROGRAM_LIVES[1])
        os.read(PROGRAM_LIVES[0], 1)
        os._exit(0)


def killed_under_ddp(rank, size):
    """The error comes out of backward(), through torch's C++ code."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
    for index in range(5):
        if rank == VICTIM and index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 50)).sum().backward()


def killed_under_fsdp(rank, size):
    """In the fast path: what is told is FSDP's call, not how its ranks meet."""
    model = torch.nn.Linear(50, 50)
    fully_shard(model)
    fsdp_fast_path(model)
    for index in range(5):
        if rank == VICTIM and index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 50)).sum().backward()


def stopped_rank(rank, size):
    if rank == VICTIM:
        dist.barrier()
        threading.Event().wait(60)  # ended by the parent
    dist.barrier()
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=0.7))
    dist.reduce(torch.zeros(10), 0)


def different_operations(rank, size):
    if rank == VICTIM:
        dist.all_gather([torch.zeros(3) for _ in range(size)], torch.zeros(3))
    else:
        dist.all_reduce(torch.zeros(7, 3))


def different_sizes(rank, size):
    tensor = torch.full((8 if rank == VICTIM else 4,), 5.0)
    try:
        dist.all_reduce(tensor)
    finally:
        assert (tensor == 5.0).all(), "a refused call has written"


def different_dtypes_in_the_background(rank, size):
    tensor = torch.zeros(4, dtype=torch.float64 if rank == VICTIM else torch.float32)
    dist.broadcast(tensor, 0, async_op=True).wait()


def different_splits(rank, size):
    given = torch.zeros(2 * size)
    sends = [2] * size
    takes = [2] * size
    if rank == VICTIM:
        given, sends = torch.zeros(2 * size + 1), [3] + [2] * (size - 1)
    dist.all_to_all_single(torch.zeros(2 * size), given, takes, sends)


def one_goes_to_gloo(rank, size):
    if rank == VICTIM:
        dist.all_reduce(torch.tensor([1]), dist.ReduceOp.BOR)
    else:
        dist.all_reduce(torch.tensor([1]))


def aborted(rank, size):
    if rank == VICTIM:
        dist.barrier()
        dist.distributed_c10d._abort_process_group()
        return
    dist.barrier()
    dist.all_reduce(torch.zeros(10))


def aborted_from_another_thread(rank, size):
    """As a watchdog does: its own process is in a call, whose memory must not go."""
    group = dist.distributed_c10d._get_default_group()

    def abort():
        while not group._turns.is_busy:
            time.sleep(0.001)
        group.abort()

    if rank == VICTIM:
        threading.Thread(target=abort).start()
    elif rank == 0:
        threading.Event().wait(60)  # never comes; ended by the parent
    dist.all_reduce(torch.zeros(10))


def ctrl_c_in_the_call(seconds):
    """KeyboardInterrupt after so long, or as soon after it as this thread is inside a collective: before that nobody knows of the call."""

    def once_inside(signum, frame):
        if is_in_a_call(frame):
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    signal.signal(signal.SIGALRM, once_inside)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def is_in_a_call(frame):
    """Whether one of the routes has begun to carry out a call here."""
    while frame is not None:
        name = frame.f_code.co_qualname
        if name == "TorchRoute._carry_out" or (
            name == "NativeRoute.run" and "status" in frame.f_locals
        ):
            return True
        frame = frame.f_back
    return False


def interrupted(rank, size):
    """Ctrl-C reaches Python although the rank waits in native code; the others learn it."""
    if rank == VICTIM:
        ctrl_c_in_the_call(0.3)
        dist.all_reduce(torch.zeros(10), group=dist.group.WORLD)
    elif rank == 0:
        threading.Event().wait(60)  # never comes; ended by the parent
    else:
        dist.all_reduce(torch.zeros(10))


def interrupted_early(rank, size):
    """Ctrl-C in the first moments of a wait; the call is made once more, as if it had not been begun."""
    store, tensor = dist.group.WORLD.get_group_store(), torch.ones(10)
    if rank == VICTIM:
        ctrl_c_in_the_call(0.001)
        try:
            dist.all_reduce(tensor)
        except KeyboardInterrupt:
            store.set("interrupted", "1")
    elif rank == 0:
        store.wait(["interrupted"])
    dist.all_reduce(tensor)


def killed_before_a_group_is_made(rank, size):
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.new_group(list(range(size)))


def absent_when_a_group_is_made(rank, size):
    if rank == VICTIM:
        threading.Event().wait(60)  # ended by the parent
    dist.new_group(list(range(size)), timeout=timedelta(seconds=0.7))


def member(fate, rank, size, store):
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    said = {"rank": rank, "error": None}
    if SPLIT_AT:
        os.environ["ARGOSY_LOCALITY"] = "left" if rank < SPLIT_AT else "right"
    dist.init_process_group(
        "argosy",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    group = dist.distributed_c10d._get_default_group()
    try:
        globals()[fate](rank, size)
    except BaseException as failure:
        said |= {"error": type(failure).__name__, "text": str(failure), "at": time.monotonic()}
        said["lost"] = getattr(failure, "rank", None)
    if dist.is_initialized() and fate != "absent_when_a_group_is_made":
        try:
            group.allreduce([torch.zeros(1)]).wait()
        except Exception as failure:
            said["again"] = type(failure).__name__
        dist.destroy_process_group()
    said["left"] = [link for link in descriptors() if "argosy" in link or "pidfd" in link]
    said["left"] += [t.name for t in threading.enumerate() if t.name.startswith("argosy")]
    said["left"] += [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:argosy" in line
    ]
    os.write(1, (json.dumps(said) + "\n").encode())  # in one piece: the others write too


def descriptors():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # Gloo's threads still close theirs
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def main() -> int:
    size, scratch = int(sys.argv[1]), sys.argv[2]
    if "killed_under_ddp" in sys.argv:
        importlib.import_module("torch._dynamo")  # DDP does at first use: once instead of per fork
    for fate in sys.argv[3:]:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                try:
                    member(fate, rank, size, f"{scratch}/{fate}")
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            pids.append(pid)
        needed = [p for r, p in enumerate(pids) if not waits_for_ever(fate, r)]
        deadline = time.monotonic() + 60  # none takes a second on an idle machine
        ends = {}
        while len(ends) < len(needed) and time.monotonic() < deadline:
            for pid in needed:
                if pid not in ends and os.waitpid(pid, os.WNOHANG)[0]:
                    ends[pid] = time.monotonic()
            time.sleep(0.002)
        for pid in pids:
            if pid not in ends:
                if pid in needed:
                    print(
                        f"rank {pids.index(pid)} still runs in {fate}:", file=sys.stderr, flush=True
                    )
                    os.kill(pid, signal.SIGUSR1)
                    time.sleep(1)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        victim_end = ends.get(pids[VICTIM])
        print(json.dumps({"fate": fate, "victim_end": victim_end}), flush=True)
    return 0


def waits_for_ever(fate, rank):
    if fate in ("stopped_rank", "absent_when_a_group_is_made"):
        return rank == VICTIM
    return fate in ("interrupted", "aborted_from_another_thread") and rank == 0


if __name__ == "__main__":
    sys.exit(main())
