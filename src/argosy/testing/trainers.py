"""SimulatedTrainer: a member of a training run as a process in virtual time, with its way from one membership to the next.

Its program is a generator that yields how long it works or waits; the clock resumes it, unless it was killed or hangs. What it hears goes into the real `Tidings`, whom it suspects is decided by the real
`Suspicions`, when a generation is taken and who is in it by `memberships`: as in worker/gang.py, train/crew.py and train/patience.py, which do the same with memory and clocks. Steps are in trainersteps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from random import Random
from typing import Literal, TypeVar

from argosy.errors import LEFT_CODE, GenerationChanged, PeerLost
from argosy.move import rounds
from argosy.testing.clock import VirtualClock
from argosy.testing.processes import Frame, SimulatedKeeper, SimulatedProcess
from argosy.testing.trainingmemory import TrainingMemory
from argosy.testing.trainingplans import HANGS, TrainingPlan
from argosy.train import memberships
from argosy.train.suspicions import Glance, Suspicions
from argosy.worker.tidings import Tidings

T = TypeVar("T")
Pause = tuple[Literal["work", "wait", "sleep"], float]
Program = Generator[Pause, None, T]
_SLICE_SECONDS = 0.25
_TICKS = 100.0
_FOR_EVER = 1e9
_SAVE_SECONDS = 20.0


class Moved(Exception):
    """The membership has changed, or is about to."""


class Stopped(Exception):
    """The run is to stop."""


class Raised(Exception):
    """User code raised."""


INTERRUPTIONS = (Moved, PeerLost, GenerationChanged)


class SimulatedTrainer:
    """One process; `program()` is what it does."""

    def __init__(
        self,
        keeper: SimulatedKeeper,
        process: SimulatedProcess,
        memory: TrainingMemory,
        plan: TrainingPlan,
    ) -> None:
        self.keeper, self.process, self.memory, self.plan = keeper, process, memory, plan
        self.clock: VirtualClock = keeper.clock
        self.truth = memory.truth
        self.name, self.pid = process.attempt, process.pid
        self.random = Random(f"{keeper.seed}/{self.name}")
        self.tidings = Tidings(process.generation)
        self.rank = process.rank or 0
        self.world_size = process.world_size
        self.suspicions = Suspicions(
            first_seconds=plan.first_hang_seconds, more_seconds=plan.hang_seconds
        )
        self.is_alive = True
        self.hang = ""
        """How it hangs: stopped, asleep or spinning."""
        self.is_stopping = process.is_saving
        self.heeds_stops = process.is_saving
        """From here on a wish to stop is remembered; before, it ends the process."""
        self.where = "start"
        self.members: tuple[int, ...] = ()
        self.is_interim = False
        self.number = -1
        """Of the membership that it has entered."""
        self.num_moves = 0
        self._met = -1
        """The generation whose members it knows."""
        self._peers: dict[int, SimulatedTrainer | None] = {}
        self._watched: dict[int, SimulatedTrainer | None] = {}
        self._unheard: list[Frame] = []
        self._token = 0
        self._mode: str = "sleep"
        self._since = self.clock.now
        self._ticks = 0.0
        self._beats = 0
        self._running = self._live()
        self._pause("sleep", 0.0)

    def program(self) -> Program[None]:
        """What this process does."""
        raise NotImplementedError

    def _live(self) -> Program[None]:
        """The program until its end, or until it is to stop; then what is committed is saved."""
        try:
            yield from self.program()
        except Stopped:
            yield from self._save()
            raise
        if (step := int(self.memory.committed.ledger["step"])) and self._is_first_living():
            yield from self._write_checkpoint(step)

    # --- the process ----------------------------------------------------------------------------------------------

    def hear(self, frame: Frame) -> None:
        """A frame arrives on the link; one that is stopped does not read it."""
        if self.hang == "stopped":
            self._unheard.append(frame)
        elif self.is_alive and self.tidings.note(frame):
            # Who trains already is ready for any generation.
            coming = self.tidings.coming()
            if coming is not None and self._met >= 0:
                self.memory.enlist(coming.generation, coming.rank, self)
            self.memory.tell()

    def signal(self) -> None:
        """It is asked to stop."""
        if not self.heeds_stops and not self.hang:
            self._leave(signal=15)
        self.is_stopping = True
        self.memory.tell()

    def end(self) -> None:
        """It is no more; whoever watches sees it at once."""
        self.is_alive = False
        self._token += 1
        self.memory.waiting.pop(self.pid, None)
        self.memory.tell()

    def glance(self) -> Glance:
        """How another process sees this one."""
        return Glance(
            state=self._state() if self.is_alive else "",
            ticks=int(self._ticks + self._worked()),
            beats=self.memory.sign_of("beats", self.pid),
            is_outside=self.memory.sign_of("outside", self.pid) % 2 == 1,
            is_done=self.memory.sign_of("done", self.pid) == 1,
        )

    def _state(self) -> str:
        if self.hang:
            return {"stopped": "T", "asleep": "S", "spinning": "R"}[self.hang]
        return "R" if self._mode == "work" else "S"

    def _worked(self) -> float:
        is_busy = self.hang == "spinning" or (self._mode == "work" and not self.hang)
        return (self.clock.now - self._since) * _TICKS if is_busy else 0.0

    def _pause(self, mode: str, seconds: float) -> None:
        self._token += 1
        token, self._mode, self._since = self._token, mode, self.clock.now

        def resume() -> None:
            if self._token == token and self.is_alive and not self.hang:
                self._go_on()

        if seconds < _FOR_EVER:
            self.clock.call_later(seconds, resume)
        if mode == "wait":
            self.memory.waiting[self.pid] = lambda: self.clock.call_later(
                0.0005 * self.random.random(), resume
            )

    def _go_on(self) -> None:
        self._ticks += self._worked()
        self.memory.waiting.pop(self.pid, None)
        try:
            mode, seconds = next(self._running)
        except StopIteration:
            self._leave(code=0)
        except Stopped:
            if self.is_stopping:
                self._leave(signal=15)
            else:
                self._leave(code=LEFT_CODE)
        except Raised:
            self._leave(code=1)
        else:
            if self.is_alive:
                self._pause(mode, seconds)

    def _leave(self, *, code: int | None = None, signal: int | None = None) -> None:
        self.truth.tell(f"{self.name} ends: code {code}, signal {signal}")
        self.keeper.end(self.name, code=code, signal=signal)

    def _save(self) -> Program[None]:
        """The first of those that live saves; the others wait for that, and take its place if it ends before."""
        until = self.clock.now + _SAVE_SECONDS
        while (step := int(self.memory.committed.ledger["step"])) and self.clock.now < until:
            if self.memory.saved < step and not self._is_first_living():
                yield "wait", 0.02
                continue
            yield from self._write_checkpoint(step)
            return
        if not step:
            self.keeper.say(self.process, {"say": "saved", "step": 0, "path": ""})

    def _write_checkpoint(self, step: int) -> Program[None]:
        yield "work", 0.05
        self.memory.saved = max(step, self.memory.saved)
        path = f"/checkpoints/step-{step:09d}"
        self.keeper.say(self.process, {"say": "saved", "step": step, "path": path})

    def _is_first_living(self) -> bool:
        if self.members:
            before = [self._peers.get(rank) for rank in self.members if rank < self.rank]
            return not any(peer is not None and peer.is_alive for peer in before)
        own = self.tidings.generation, self.rank, self.pid
        return memberships.is_foremost(self.memory.muster.first_places(), own)

    def pass_by(self, point: str, step: int) -> Program[bool]:
        """Something may go wrong here; True: what is computed now is not finite."""
        self.where = f"{point} of step {step}"
        for number, trouble in enumerate(self.plan.troubles):
            if trouble.has_come or (trouble.point, trouble.step) != (point, step):
                continue
            is_early = point in ("start", "joined") and not self.memory.state.version
            if is_early and trouble.kind in HANGS:
                continue  # nobody knows yet that this program joins and trains, and when
            trouble.has_come = True
            self.truth.tell(f"{self.name}: {trouble.kind} at {self.where}")
            if trouble.kind == "kill":
                self.keeper.end(self.name, signal=9)
                yield "sleep", _FOR_EVER
            elif trouble.kind in HANGS:
                self.hang = trouble.kind
                yield "sleep", _FOR_EVER
            elif trouble.kind == "raise":
                self.fail_at(step, -1, f"trouble {number}")
            elif trouble.kind == "nan":
                return True
            else:
                yield "work" if trouble.kind == "slow" else "sleep", trouble.seconds
        return False

    def fail_at(self, step: int, lane: int, text: str) -> None:
        """User code raises."""
        raise Raised

    # --- membership -----------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Place among the living members."""
        return self.members.index(self.rank)

    def pid_of(self, rank: int) -> int:
        """Process id of a member."""
        peer = self._peers.get(rank)
        return peer.pid if peer is not None else 0

    def look(self) -> None:
        """Raise when this process must not go on as it does."""
        self._beats += 1
        self.memory.sign("beats", self.rank, self.pid, self._beats)
        self._check_stop()
        if self._is_next_ready():
            raise Moved

    def persist(self, attempt: Callable[[], Program[T]]) -> Program[T]:
        """Try until nothing interrupts."""
        while True:
            try:
                return (yield from attempt())
            except INTERRUPTIONS:
                yield from self.settle_persistently()

    def settle_persistently(self) -> Program[None]:
        """Enter whatever membership is there."""
        while True:
            try:
                yield from self.settle()
                return
            except INTERRUPTIONS:
                continue

    def settle(self) -> Program[None]:
        """Enter the newest membership, and return when all its members have."""
        self.num_moves += 1
        while True:
            if self._is_next_ready():
                self._take()
            if self._met != self.tidings.generation and not self._meet():
                yield from self.wait(self._is_ready, self._late_veterans)
                continue
            yield from self.pass_by("settle", self.num_moves)
            ended = [r for r, peer in self._peers.items() if peer is None or not peer.is_alive]
            found = memberships.form(self.tidings.generation, self.world_size, ended)
            self.members, self.is_interim = found.members, found.is_interim
            try:
                yield from self._enter(found)
                return
            except GenerationChanged:
                self.look()
                yield "wait", 0.05
            except (PeerLost, Moved):
                continue

    def _is_ready(self) -> bool:
        self._check_stop()
        return self._is_next_ready() or self._is_complete(self.tidings.generation, self.world_size)

    def _late_veterans(self) -> list[int]:
        places = self.memory.muster.last_places()
        late = memberships.late_veterans(places, self.tidings.generation)
        self._peers = {rank: self.memory.processes[pid] for rank, pid in late.items()}
        return list(late)

    def _enter(self, found: memberships.Membership) -> Program[None]:
        memory, number = self.memory, found.number
        self.where = f"enter {number}"
        self.truth.formed(self.name, found)
        if memory.entered.get(self.rank, 0) > rounds.entered_word(number):
            raise GenerationChanged(f"another has entered a newer one than {number} as {self.rank}")
        self.number = number
        self._watched = {rank: self._peers[rank] for rank in found.members}
        memory.entered[self.rank] = rounds.entered_word(number)
        memory.tell()

        def is_entered() -> bool:
            words = [memory.entered.get(rank, 0) for rank in found.members]
            entry = rounds.entry(words, number)
            if entry == "past":
                raise GenerationChanged(f"{number} is past")
            return entry == "all"

        def late() -> list[int]:
            word = rounds.entered_word(number)
            return [rank for rank in found.members if memory.entered.get(rank, 0) != word]

        yield from self.wait(is_entered, late)
        self.truth.entered(self.name, number)

    def _take(self) -> None:
        told = self.tidings.take()
        if told is not None:
            self.rank, self.world_size = int(told["rank"]), int(told["world_size"])
            self.keeper.say(self.process, {"say": "join", "generation": self.tidings.generation})

    def _check_stop(self) -> None:
        generation = self.tidings.generation
        if self.is_stopping:
            self.memory.stop = generation + 1
        if self.memory.stop == generation + 1:
            raise Stopped

    def _is_next_ready(self) -> bool:
        coming = self.tidings.coming()
        if coming is None:
            return False
        if self.memory.process_of(coming.generation, coming.rank) is None:
            self.memory.enlist(coming.generation, coming.rank, self)
        return self._is_complete(coming.generation, coming.world_size)

    def _is_complete(self, generation: int, world_size: int) -> bool:
        return memberships.is_complete(
            world_size,
            lambda rank: self.memory.process_of(generation, rank) is not None,
            self.tidings.lost_in(generation),
        )

    def _meet(self) -> bool:
        generation = self.tidings.generation
        self.where = f"meet generation {generation}"
        if self.memory.process_of(generation, self.rank) is None:
            self.memory.enlist(generation, self.rank, self)
        self._check_stop()
        if not self._is_complete(generation, self.world_size):
            return False
        ranks = range(self.world_size)
        self._peers = {rank: self.memory.process_of(generation, rank) for rank in ranks}
        self._met = generation
        return True

    # --- patience -------------------------------------------------------------------------------------------------

    def wait(
        self, condition: Callable[[], T | None], awaited: Callable[[], list[int]]
    ) -> Program[T]:
        """Until the condition gives something; ends with PeerLost, Moved or Stopped otherwise. Whoever is awaited too long is accused."""
        self.suspicions.begin(self.clock.now)
        until = self.clock.now + _SLICE_SECONDS
        while True:
            found = condition()
            if found:
                return found
            self.look()
            lost = next((r for r, p in self._watched.items() if p is None or not p.is_alive), None)
            if lost is not None:
                raise PeerLost(lost, self.where)
            if self.clock.now >= until:
                until = self.clock.now + _SLICE_SECONDS
                done = [self.memory.sign_of("advances", self.pid_of(r)) for r in self.members]
                self.suspicions.note_work(self.clock.now, done)
                self._look_at(awaited())
            yield "wait", until - self.clock.now

    def _look_at(self, ranks: list[int]) -> None:
        now = self.clock.now
        for rank in ranks:
            peer = self._peers.get(rank)
            if peer is None or peer is self or self.suspicions.is_accused(now, peer.pid):
                continue
            reason = self.suspicions.judge(now, rank, peer.pid, peer.glance())
            if reason:
                self.truth.accused(
                    self.name, f"{peer.name} ({peer.where})", bool(peer.hang), reason
                )
                message = {"say": "suspect", "rank": rank, "pid": peer.pid, "reason": reason}
                self.keeper.say(self.process, {**message, "generation": self.tidings.generation})
