"""Teams: groups of training processes that live through a whole measurement and take steps when they are told to.

A team's ranks connect to its socket (programs/train_baton.py) and are told how many steps to take; the time of a turn is from the first rank's
beginning to the last rank's end, by their own clocks. One team works at a time, so that hundreds of turns of several teams can be
interleaved. Ends what it started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from benchmarks.measure import PROGRAMS, PYTHON, ROOT, SideFailed, fair_environment
from benchmarks.ours import end_process
from benchmarks.peers.drivers import free_port

START_SECONDS = 300.0
TURN_SECONDS = 600.0

_numbers = itertools.count()


class Turn(NamedTuple):
    seconds: float
    losses: list[float]
    """Of each step: the sum over what the ranks reported, over their number."""


class Team:
    """One side of a comparison; `start_…` below make them."""

    def __init__(self, name: str, directory: Path, num_ranks: int) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self.pids: dict[int, int] = {}
        self._path = directory / f"{next(_numbers)}.socket"
        self._log = self._path.with_suffix(".log")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        self._ranks: dict[int, socket.socket] = {}
        self._buffers: dict[int, bytes] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def spawn(self, command: list[str], **environment: str) -> None:
        with self._log.open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=fair_environment(
                        BENCH_SOCKET=str(self._path), PYTHONWARNINGS="ignore", **environment
                    ),
                    cwd=self._path.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def wait_ready(self) -> None:
        """Until every rank has built its model and waits for its first turn."""
        deadline = time.monotonic() + START_SECONDS
        self._listener.settimeout(0.2)
        while len(self._ranks) < self.num_ranks:
            if time.monotonic() > deadline:
                raise SideFailed(f"{self.name}: {len(self._ranks)} ranks came; {self._tail()}")
            if any(process.poll() is not None for process in self._processes):
                raise SideFailed(f"{self.name} ended before its first step; {self._tail()}")
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.settimeout(TURN_SECONDS)
                self._buffers[connection.fileno()] = b""
                hello = self._read(connection)
                self._ranks[hello["rank"]] = connection
                self.pids[hello["rank"]] = hello["pid"]

    def turn(self, steps: int = 1) -> Turn:
        """Let all ranks take steps, and wait until the last of them is done."""
        for connection in self._ranks.values():
            self._tell(connection, str(steps))
        answers = [self._read(connection) for connection in self._ranks.values()]
        began, ended = min(a["began"] for a in answers), max(a["ended"] for a in answers)
        losses = [
            sum(values) / len(values)
            for values in zip(*(a["losses"] for a in answers), strict=True)
        ]
        return Turn((ended - began) / 1e9, losses)

    def ask(self, line: str) -> dict[str, Any]:
        """Tell the first rank something, and wait for its answer."""
        connection = self._ranks[0]
        self._tell(connection, line)
        return self._read(connection)

    def memory_bytes(self) -> int:
        """The proportional set size of all its processes, launchers too."""
        roots = [process.pid for process in self._processes]
        return sum(_pss_bytes(pid) for pid in sorted(set(_family(roots)) | set(self.pids.values())))

    def close(self) -> None:
        """Hang up, which ends the ranks; then make sure."""
        for connection in self._ranks.values():
            connection.close()
        self._listener.close()
        deadline = time.monotonic() + 10.0
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            end_process(process)
        self._processes = []

    def _tell(self, connection: socket.socket, line: str) -> None:
        try:
            connection.sendall(f"{line}\n".encode())
        except OSError as failure:
            raise SideFailed(f"{self.name} is gone: {failure}; {self._tail()}")

    def _read(self, connection: socket.socket) -> dict[str, Any]:
        number = connection.fileno()
        while b"\n" not in self._buffers[number]:
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                raise SideFailed(f"{self.name}: no end after {TURN_SECONDS:g} s; {self._tail()}")
            except OSError as failure:
                raise SideFailed(f"{self.name}: {failure}; {self._tail()}")
            if not data:
                raise SideFailed(f"{self.name}: a rank is gone; {self._tail()}")
            self._buffers[number] += data
        line, _, self._buffers[number] = self._buffers[number].partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-1200:] if self._log.exists() else ""


def start_torch(form: str, directory: Path, ranks: int, **environment: str) -> Team:
    """`raw`, `ddp`, `fsdp2` or `fsdp2_kept`: plain processes with the environment that torchrun gives, without the memory of a launcher."""
    return start_ranks(form, ["train_torch.py", form], directory, ranks, **environment)


def start_ranks(
    name: str, words: list[str], directory: Path, ranks: int, **environment: str
) -> Team:
    """A program and its arguments, once for each rank."""
    team = Team(name, directory, ranks)
    port = str(free_port())
    for rank in range(ranks):
        team.spawn(
            [str(PYTHON), str(PROGRAMS / words[0]), *words[1:]],
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            **environment,
        )
    return team


def start_ours(directory: Path, ranks: int, **environment: str) -> Team:
    """`python train_ours.py -n RANKS`: no cluster is needed for it."""
    team = Team("ours", directory, ranks)
    team.spawn([str(PYTHON), str(PROGRAMS / "train_ours.py"), "-n", str(ranks)], **environment)
    return team


def start_peer(name: str, directory: Path, **environment: str) -> Team:
    """`lightning` or `huggingface`, one process in the peers' environment."""
    team = Team(name, directory, 1)
    command = [str(peer_python("trainers")), str(PROGRAMS / f"train_{name}.py")]
    team.spawn(command, PYTHONPATH=str(ROOT / "src"), **environment)
    return team


def peer_python(name: str) -> Path:
    python = ROOT / ".peers" / name / "bin" / "python"
    if not (ROOT / ".peers" / name / "versions.txt").exists():
        raise SideFailed(f".peers/{name} is not there: run `make peers`")
    return python


def peer_versions(environment: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of what a peers' environment has of these packages."""
    listed = ROOT / ".peers" / environment / "versions.txt"
    if not listed.exists():
        return {}
    found = dict(line.split("==", 1) for line in listed.read_text().split() if "==" in line)
    return {name: found[name] for name in packages if name in found}


@contextlib.contextmanager
def closing(*teams: Team) -> Iterator[None]:
    """Wait until all are ready, and end them all, whatever happens."""
    try:
        for team in teams:
            team.wait_ready()
        yield
    finally:
        for team in teams:
            team.close()


def _family(roots: list[int]) -> list[int]:
    """These processes and all their descendants."""
    found, left = [], list(roots)
    while left:
        pid = left.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text()
                left += [int(child) for child in children.split()]
    return found


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
