"""A small training loop on the exchange, and a parent that plays the keeper: reaps, replaces, and makes generations.

The loop is the one of docs/reference/exchange.md with a made-up gradient and momentum SGD; every lane's gradient depends on the weights, so one wrong bit
shows in every later version. Ranks are forks of this process. Used by the benchmark of peer kills and by the fault tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import random
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from argosy.errors import GenerationChanged, PeerLost, RoundOver
from argosy.move import arenas, trees
from argosy.move import exchange as exchanges
from argosy.move.layout import Layout, Parameter
from argosy.move.rounds import Round

SIZES = (70_000, 300, 5_000, 66_000)
ENDLESS = 1 << 40
WAIT_SECONDS = 20.0
_MOST_RANKS = 8
_RECORD = struct.Struct("<QQ8Q8d8Q")


class Job:
    """What all ranks share: the exchange, the state of each version slot, the weights."""

    def __init__(
        self,
        name: str,
        *,
        lanes: int,
        ranks: int,
        make: Callable[[str, Layout], exchanges.Exchange] = exchanges.open,
    ) -> None:
        parameters = tuple(Parameter(name=f"p{i}", numel=n) for i, n in enumerate(SIZES))
        self.layout = Layout(num_lanes=lanes, most_ranks=ranks, parameters=parameters)
        self.exchange = make(name, self.layout)
        count, slots = self.layout.num_elements, self.layout.num_versions
        self.arena = arenas.create(
            f"{name}-state", 4 * count * (2 * slots + 1) + 65536, scope="run"
        )
        self.states = self.arena.empty((slots, 2, count), name="states")
        self.weights = self.arena.empty((count,), name="weights")
        generator = torch.Generator().manual_seed(7)
        self.base = torch.randn(lanes, count, generator=generator)
        self.states[0, 0].copy_(torch.randn(count, generator=generator))

    def close(self) -> None:
        name = self.exchange._arena.name
        self.exchange.close()
        self.arena.close()
        for each in (name, f"{name}-state"):
            arenas.release(each)

    def gradient(self, step: int, lane: int) -> torch.Tensor:
        return (self.base[lane] * (1.0 + step % 7) + self.weights).mul_(0.125)

    def update(self, old: int, new: int, gradient: torch.Tensor, start: int, stop: int) -> None:
        """Momentum SGD of one range, from one slot of the state into another."""
        momentum = self.states[new, 1, start:stop]
        torch.mul(self.states[old, 1, start:stop], 0.9, out=momentum)
        momentum.add_(gradient[start:stop])
        torch.sub(
            self.states[old, 0, start:stop],
            momentum,
            alpha=0.001,
            out=self.states[new, 0, start:stop],
        )

    def digest(self, slot: int) -> str:
        """Of a version's bytes; gaps between parameters are never written."""
        return hashlib.sha256(self.states[slot].numpy().tobytes()).hexdigest()


class Record:
    """What the keeper tells the ranks, and the ranks tell it: words in memory that forks share."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 4096)

    def _numbers(self) -> tuple[float, ...]:
        return _RECORD.unpack_from(self._map)

    def generation(self) -> tuple[int, dict[int, int]]:
        """(generation, pid of each rank); the generation is written last and read first and last."""
        while True:
            before = self._numbers()
            if self._numbers()[0] == before[0]:
                pids = before[2:10]
                return int(before[0]), {r: int(pid) for r, pid in enumerate(pids) if pid}

    def announce(self, generation: int, pids: dict[int, int]) -> None:
        struct.pack_into("<8Q", self._map, 16, *(pids.get(r, 0) for r in range(_MOST_RANKS)))
        struct.pack_into("<Q", self._map, 0, generation)

    @property
    def target(self) -> int:
        return int(self._numbers()[1])

    @target.setter
    def target(self, version: int) -> None:
        struct.pack_into("<Q", self._map, 8, version)

    def told(self, rank: int) -> tuple[float, int]:
        """(when a rank last had a PeerLost, in which generation)"""
        numbers = self._numbers()
        return numbers[10 + rank], int(numbers[18 + rank])

    def tell(self, rank: int, generation: int) -> None:
        struct.pack_into("<d", self._map, 80 + 8 * rank, time.monotonic())
        struct.pack_into("<Q", self._map, 144 + 8 * rank, generation)

    def close(self) -> None:
        self._map.close()


def run_rank(job: Job, record: Record, rank: int, seen: int) -> None:
    """One rank: every generation after `seen`, until the target is committed."""
    while True:
        generation, pids = wait_generation(record, seen)
        seen = generation
        with process_descriptors(rank, pids) as members:
            if members is None:
                continue  # one of them is dead already: the keeper will say so
            try:
                job.exchange.enter(
                    generation, rank, members, deadline=time.monotonic() + WAIT_SECONDS
                )
                train(job, record, rank, sorted(members))
                return
            except PeerLost:
                record.tell(rank, generation)
            except GenerationChanged:
                pass


def wait_generation(record: Record, seen: int) -> tuple[int, dict[int, int]]:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        generation, pids = record.generation()
        if generation > seen:
            return generation, pids
        time.sleep(0.0005)
    raise TimeoutError(f"no generation after {seen}")


@contextlib.contextmanager
def process_descriptors(rank: int, pids: dict[int, int]) -> Iterator[dict[int, int] | None]:
    members: dict[int, int] | None = {}
    opened = []
    try:
        for number, pid in pids.items():
            members[number] = -1 if number == rank else os.pidfd_open(pid)
            opened.append(members[number])
    except ProcessLookupError:
        members = None
    try:
        yield members
    finally:
        for descriptor in opened:
            if descriptor >= 0:
                os.close(descriptor)


def train(job: Job, record: Record, rank: int, members: list[int]) -> None:
    """Steps from the committed version on; what others have finished already is not done again."""
    position, count = members.index(rank), len(members)
    layout = job.layout
    first, stop = (layout.num_lanes * (position + i) // count for i in (0, 1))
    mine = [page for name in layout.share(position, count) for page in layout.pages_of(name)]
    out = torch.zeros(layout.num_elements)
    while True:
        version, _ = job.exchange.state.current()
        refresh(job, version, mine)
        if version >= record.target:
            return
        try:
            step(job, version, layout.blocks(first, stop - first), mine, out)
        except RoundOver:
            continue


def step(
    job: Job, version: int, blocks: list[trees.Node], mine: list[int], out: torch.Tensor
) -> None:
    exchange, state = job.exchange, job.exchange.state
    deadline = time.monotonic() + WAIT_SECONDS
    round = Round(version, step=version)
    for block in blocks:
        claim = exchange.claim(round, block)
        if claim is not None:
            claim.zero()
            for lane in range(block.first, block.stop):
                claim.flat.add_(job.gradient(version, lane))
            exchange.publish(claim, terms={"loss": (float(block.first), float(block.size))})
    gathered = exchange.wait_lanes(round, deadline=deadline)
    exchange.vote(round, mine, exchange.reduce(gathered, mine, out))
    exchange.wait_votes(round, deadline=deadline)
    left = sorted(set(mine) & set(state.undone(version + 1)))
    if left:
        old, new = state.current()[1], state.begin(version + 1, deadline=deadline)
        for page in left:
            job.update(old, new, out, *job.layout.bounds(page))
        state.mark_done(version + 1, left)
    state.wait_flip(version + 1, deadline=deadline)


def refresh(job: Job, version: int, mine: list[int]) -> None:
    state = job.exchange.state
    slot = state.current()[1]
    left = sorted(set(mine) & set(state.unrefreshed(version)))
    for page in left:
        start, stop = job.layout.bounds(page)
        job.weights[start:stop].copy_(job.states[slot, 0, start:stop])
    if left:
        state.mark_refreshed(version, left)
    state.wait_refreshed(version, deadline=time.monotonic() + WAIT_SECONDS, weights=job.weights)


class Gang:
    """The ranks of a job, and the keeper's part: every death is reaped before the next generation begins."""

    def __init__(self, job: Job, ranks: int, *, target: int = ENDLESS) -> None:
        self.job, self.record = job, Record()
        self.record.target = target
        self.pids: dict[int, int] = {}
        self.generation = 0
        for rank in range(ranks):
            self.start(rank)
        self.announce()

    def start(self, rank: int) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(120)
                run_rank(self.job, self.record, rank, self.generation)
                code = 0
            except BaseException:  # noqa: BLE001 - the entry point of a process
                traceback.print_exc()
            finally:
                os._exit(code)
        self.pids[rank] = pid

    def announce(self) -> None:
        self.generation += 1
        self.record.announce(self.generation, self.pids)

    def kill(self, rank: int, *, replace: bool) -> float:
        """SIGKILL, reap, and go on with or without a replacement; when the signal was sent."""
        sent = time.monotonic()
        os.kill(self.pids[rank], signal.SIGKILL)
        os.waitpid(self.pids.pop(rank), 0)
        if replace:
            self.start(rank)
        return sent

    def wait_told(
        self, ranks: list[int], generation: int, timeout_seconds: float
    ) -> dict[int, float]:
        """When each of these ranks had its PeerLost in this generation; those that had none are missing."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            told = {rank: self.record.told(rank) for rank in ranks}
            found = {rank: at for rank, (at, number) in told.items() if number == generation}
            if len(found) == len(ranks) or time.monotonic() > deadline:
                return found
            time.sleep(0.0005)

    def wait_version(self, version: int, timeout_seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + timeout_seconds
        while self.job.exchange.state.current()[0] < version:
            if time.monotonic() > deadline:
                raise TimeoutError(f"version {version} was not committed")
            time.sleep(0.0005)

    def finish(self) -> list[int]:
        """Let the ranks end a few steps on; their exit codes."""
        self.record.target = min(self.record.target, self.job.exchange.state.current()[0] + 5)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids.values()]
        self.pids.clear()
        return codes

    def close(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.record.close()


def reference(lanes: int, versions: int) -> list[str]:
    """Digests of versions 0 to `versions`, by one rank in this process."""
    job = Job(f"reference-{random.randrange(1 << 40)}", lanes=lanes, ranks=1)
    try:
        job.exchange.enter(1, 0, {0: -1}, deadline=time.monotonic() + 5)
        record = Record()
        digests = [job.digest(0)]
        for target in range(1, versions + 1):
            record.target = target
            train(job, record, 0, [0])
            digests.append(job.digest(job.exchange.state.current()[1]))
        record.close()
        return digests
    finally:
        job.close()
