"""`python -m argosy.move.routeprobe N`: which route each pair of N processes would use, why, and how fast it is; one JSON object.

Forks N ranks on this host, proves their locality as a training run does, and tries shared memory, reading a peer's memory, and Gloo, pair by
pair. Started by `argosy doctor --transfer` in a child process; leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from argosy.errors import ArgosyError
from argosy.move import arenas, kernels, locality, waits

_SECONDS = 60.0
_BLOCK_BYTES = 8 << 20
_COPIES = 7
_ROUNDS = 100

Report = dict[str, Any]
_stores: Any = dist
"""torch exports its stores without saying so to type checkers."""


def main(arguments: list[str]) -> int:
    """Probe and print; 0 unless a rank failed."""
    size = int(arguments[0]) if arguments else 4
    with tempfile.TemporaryDirectory(prefix="argosy-routes-") as directory:
        pids = [_fork(rank, size, directory) for rank in range(size)]
        codes = _reap(pids)
        reports = [_read(f"{directory}/{rank}.json") for rank in range(size)]
    failed = [
        {"rank": rank, "why": report.get("why") or f"it ended with status {code}"}
        for rank, (code, report) in enumerate(zip(codes, reports, strict=True))
        if code != 0
    ]
    pairs = [pair for report in reports for pair in report.get("pairs", [])]
    pairs.sort(key=lambda pair: (pair["first"], pair["second"]))
    result = {"processes": size, "kernels": kernels.path(), "pairs": pairs, "failed": failed}
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if failed else 0


def _fork(rank: int, size: int, directory: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    report: Report = {}
    try:
        torch.set_num_threads(1)
        report = {"pairs": _Rank(rank, size, directory).run()}
        code = 0
    except ArgosyError as failure:
        report = {"why": str(failure)}
    except Exception as failure:  # noqa: BLE001 - entry point of a forked process
        report = {"why": f"{type(failure).__name__}: {failure}"}
    finally:
        with open(f"{directory}/{rank}.json", "w") as file:
            json.dump(report, file)
        os._exit(code)


def _reap(pids: list[int]) -> list[int]:
    """Wait for all, kill who is late."""
    deadline = time.monotonic() + _SECONDS
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def _read(path: str) -> Report:
    try:
        with open(path) as file:
            found: Report = json.load(file)
            return found
    except (OSError, ValueError):
        return {}


class _Rank:
    """One of the processes; reports on the pairs in which it is the second."""

    def __init__(self, rank: int, size: int, directory: str) -> None:
        self.rank, self.size = rank, size
        self.deadline = time.monotonic() + _SECONDS / 2
        self.store = _stores.FileStore(f"{directory}/store", -1)
        self.locality: locality.Locality
        self.arena: arenas.Arena
        self.own = torch.ones(_BLOCK_BYTES // 4)
        self.gloo_why = ""

    def run(self) -> list[Report]:
        """All pairs, one at a time, so that they do not disturb each other."""
        self.locality = locality.prove(
            _stores.PrefixStore("routes", self.store), self.rank, self.size, timeout=_SECONDS / 2
        )
        self._open_arena()
        self._start_gloo()
        self.store.set(f"own/{self.rank}", f"{os.getpid()} {self.own.data_ptr()}")
        self.store.wait([f"own/{rank}" for rank in range(self.size)])
        reports = []
        for first in range(self.size):
            for second in range(first + 1, self.size):
                if self.rank == second:
                    reports.append(self._report(first))
                    self.store.set(f"done/{first}/{second}", "1")
                elif self.rank == first:
                    self._answer(second)
                self.store.wait([f"done/{first}/{second}"])
        self.locality.close()
        self.arena.close()
        if not self.gloo_why:
            dist.destroy_process_group()
        return reports

    def _open_arena(self) -> None:
        members = self.locality.group
        if self.locality.is_leader:
            made = arenas.create(f"routes-{os.getpid()}", _BLOCK_BYTES * len(members) + (1 << 16))
            for rank in members:
                made.empty((_BLOCK_BYTES // 4,), name=str(rank)).fill_(rank)
            descriptor = self.locality.share(made.fileno(), timeout=_SECONDS / 2)
            made.close()
        else:
            descriptor = self.locality.share(timeout=_SECONDS / 2)
        self.arena = arenas.attach(descriptor)

    def _start_gloo(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            dist.init_process_group(
                "gloo",
                store=_stores.PrefixStore("gloo", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=datetime.timedelta(seconds=_SECONDS / 2),
            )
        except RuntimeError as failure:
            self.gloo_why = str(failure).splitlines()[0]

    def _report(self, peer: int) -> Report:
        is_local = peer in self.locality.group
        found: Report = {"first": peer, "second": self.rank, "shared_memory": is_local}
        if is_local:
            found |= {
                "route": "shared memory",
                "why": "it handed over memory, and the nonce read back was its own",
                "copy_gb_per_second": self._measure_copy(peer),
                "latency_us": self._bounce(peer, is_first=False),
            }
        else:
            found |= {"route": "gloo", "why": self.locality.reasons.get(peer, "")}
        pid, address = (int(word) for word in self.store.get(f"own/{peer}").split())
        why = read_peer(pid, address, self.own.data_ptr(), 4096) if is_local else "not on this host"
        found |= {"process_vm_readv": not why, "process_vm_readv_why": why}
        found |= {"gloo": not self.gloo_why, "gloo_why": self.gloo_why}
        if not self.gloo_why:
            found |= self._measure_gloo(peer, is_first=False)
        elif not is_local:
            found["route"] = "none"
        return found

    def _answer(self, peer: int) -> None:
        if peer in self.locality.group:
            self._bounce(peer, is_first=True)
        if not self.gloo_why:
            self._measure_gloo(peer, is_first=True)

    def _measure_copy(self, peer: int) -> float:
        block = self.arena.tensor(str(peer))
        target = torch.empty_like(block).zero_()
        return round(_BLOCK_BYTES / 1e9 / _median(_COPIES, lambda: target.copy_(block)), 3)

    def _bounce(self, peer: int, *, is_first: bool) -> float:
        """Half a round trip between two words, as waits of collectives take it."""
        low, high = sorted((peer, self.rank))
        words = self.arena.words(f"bounce/{low}/{high}", 2)
        peers = waits.Peers([self.locality.pidfds[peer]], ranks=[peer])
        taken = []
        for count in range(1, _ROUNDS + 1):
            started = time.perf_counter()
            if is_first:
                waits.wait(words[0], count, deadline=self.deadline, peers=peers)
                waits.post(words[1], count)
            else:
                waits.post(words[0], count)
                waits.wait(words[1], count, deadline=self.deadline, peers=peers)
            taken.append(time.perf_counter() - started)
        return round(statistics.median(taken) / 2 * 1e6, 2)

    def _measure_gloo(self, peer: int, *, is_first: bool) -> Report:
        block, small = torch.ones(_BLOCK_BYTES // 4), torch.ones(1)

        def bounce() -> None:
            for step in (is_first, not is_first):
                if step:
                    dist.recv(small, src=peer)
                else:
                    dist.send(small, dst=peer)

        def move() -> None:
            if is_first:
                dist.send(block, dst=peer)
            else:
                dist.recv(block, src=peer)

        latency = _median(20, bounce) / 2
        return {
            "gloo_latency_us": round(latency * 1e6, 2),
            "gloo_gb_per_second": round(_BLOCK_BYTES / 1e9 / _median(3, move), 3),
        }


def read_peer(pid: int, source: int, target: int, num_bytes: int) -> str:
    """Read a peer's memory by process_vm_readv; empty when that worked, else why not."""

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, "process_vm_readv", None)
    if call is None:
        return "this C library has no process_vm_readv"
    call.restype = ctypes.c_ssize_t
    local, remote = Vector(target, num_bytes), Vector(source, num_bytes)
    ulong = ctypes.c_ulong
    done = call(pid, ctypes.byref(local), ulong(1), ctypes.byref(remote), ulong(1), ulong(0))
    return "" if done == num_bytes else os.strerror(ctypes.get_errno())


def _median(count: int, action: Callable[[], object]) -> float:
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
