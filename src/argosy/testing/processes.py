"""SimulatedKeeper: processes that run, report, crash and end, behind the keeper's protocol.

It takes the same frames as the real keeper and answers with the same replies and events: spawn is idempotent, events are
numbered and kept until acknowledged, a store belongs to a generation. Its crash takes its processes with it. What each
process does follows from the seed and its attempt id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from argosy.control.identity import fraction
from argosy.control.keeper.ends import MOST_PLACES, Ends
from argosy.testing.clock import VirtualClock

Frame = dict[str, Any]
_WORD_SECONDS = 0.003
"""Within so long a process hears what its keeper tells it."""


class Life(Protocol):
    """A program that is more than a plan of what it says and how it ends: a simulated trainer."""

    def hear(self, frame: Frame) -> None:
        """A frame arrives on its link."""

    def signal(self) -> None:
        """It is asked to stop."""

    def end(self) -> None:
        """It has ended."""


Lives = Mapping[str, Callable[["SimulatedKeeper", "SimulatedProcess"], Life]]
"""By the first word of the command."""


@dataclass(slots=True)
class SimulatedProcess:
    """One process with its tree."""

    attempt: str
    run: str
    role: str
    index: int
    generation: int
    rank: int | None
    state: str
    host: str
    is_gang: bool
    pid: int = 1
    world_size: int = 1
    is_saving: bool = False
    """It was started only to save what others have left."""
    places: list[list[int]] = field(default_factory=list)
    """(generation, rank) that it had before."""
    life: Life | None = None
    heard_at: float = 0.0
    """When the last frame told to it arrives: they come in order."""
    is_joined: bool = False
    children: int = 0
    program: dict[str, Any] = field(default_factory=dict)
    faults: set[int] = field(default_factory=set)

    @property
    def kind(self) -> str:
        """What the program does: the first word of its command."""
        argv = self.program.get("argv") or [""]
        return str(argv[0])


@dataclass(slots=True)
class Watchers:
    """Who is told what really happens, beside the protocol (the invariants)."""

    started: Callable[[SimulatedProcess], None]
    ranked: Callable[[SimulatedProcess], None]
    exited: Callable[[SimulatedProcess], None]
    emitted: Callable[[str, int, Frame], None]


class SimulatedKeeper:
    """The keeper of one host."""

    def __init__(
        self,
        clock: VirtualClock,
        keeper: str,
        host: str,
        seed: int,
        watchers: Watchers,
        lives: Lives,
    ) -> None:
        self.clock = clock
        self.keeper = keeper
        self.host = host
        self.seed = seed
        self.watchers = watchers
        self.lives = lives
        self.ends = Ends()
        self.is_alive = True
        self.processes: dict[str, SimulatedProcess] = {}
        self.known: set[str] = set()
        self.unacknowledged: dict[int, Frame] = {}
        self.stores: dict[tuple[str, str], tuple[int, int]] = {}
        self.ports: dict[tuple[str, str], int] = {}
        self.send: Callable[[Frame], None] | None = None
        self._number = 0
        self._next_port = 20_000

    def crash(self) -> None:
        """kill -9: its processes end with it, unseen."""
        self.is_alive = False
        self.send = None
        for process in list(self.processes.values()):
            if process.life is not None:
                process.life.end()
            self.watchers.exited(process)
        self.processes.clear()

    def listing(self) -> list[Frame]:
        """Answer to `list`: what it holds, running or ended and not acknowledged."""
        rows = [{"attempt": p.attempt, "state": p.state} for p in self.processes.values()]
        ended = {
            event["attempt"] for event in self.unacknowledged.values() if event["event"] == "exited"
        }
        return rows + [{"attempt": name, "state": "exited"} for name in sorted(ended)]

    def resend(self) -> None:
        """All unacknowledged events, in order."""
        if self.send is not None:
            for number, event in self.unacknowledged.items():
                self.send({"type": "event", "number": number, "event": event})

    def receive(self, frame: Frame) -> None:
        """One frame of the agent."""
        answer = getattr(self, f"_on_{frame['type']}")(frame)
        if self.send is not None:
            self.send({"type": "reply", "id": frame["id"], "ok": True, **(answer or {})})

    def _emit(self, event: Frame) -> None:
        self._number += 1
        self.unacknowledged[self._number] = event
        self.watchers.emitted(self.keeper, self._number, event)
        if self.send is not None:
            self.send({"type": "event", "number": self._number, "event": event})

    # --- frames -------------------------------------------------------------------------------------------------

    def _on_spawn(self, frame: Frame) -> Frame:
        batch = frame["batch"]
        answer: Frame = {}
        if batch["store"] is not None:
            key, generation = (batch["run"], batch["role"]), batch["generation"]
            if self.stores.get(key, (0, 0))[0] != generation:
                self._next_port += 1
                self.stores[key] = (generation, self._next_port)
            answer["store"] = {"host": "127.0.0.1", "port": self.stores[key][1], "hosted": True}
        for order in batch["attempts"]:
            if order["attempt"] not in self.known:
                self.known.add(order["attempt"])
                self._start(order, batch["store"] is not None or order["parked"])
        return answer

    def _start(self, order: Frame, is_gang: bool) -> None:
        name = order["attempt"]
        rank = order["env"].get("RANK")
        process = SimulatedProcess(
            attempt=name,
            run=order["run"],
            role=order["role"],
            index=order["index"],
            generation=order["generation"],
            rank=int(rank) if rank is not None else None,
            state="parked" if order["parked"] else "running",
            host=self.host,
            is_gang=is_gang,
            pid=int(self.keeper.rpartition("-")[2]) * 100_000 + len(self.known),
            world_size=int(order["env"].get("WORLD_SIZE", 1)),
            is_saving=order["env"].get("ARGOSY_STOPPING") == "1",
            children=int(self._draw(name, "children") * 3),
            program=order["program"],
        )
        if self._draw(name, "exec") < 0.01:
            if is_gang:
                self._remember_end(process, 127, None)
            error = "No such file or directory"
            self._emit({"event": "exited", "attempt": name, "run": process.run, "error": error})
            return
        self.processes[name] = process
        self.watchers.started(process)
        how = "fork" if is_gang else "exec"
        started = {"event": "started", "attempt": name, "run": process.run}
        self._emit({**started, "pid": process.pid, "how": how})
        if process.state == "running":
            self._live(process)

    def _on_release(self, frame: Frame) -> None:
        process = self.processes.get(frame["attempt"])
        if process is not None and process.state == "parked":
            process.state = "running"
            process.generation, process.rank = frame["gang"]["generation"], frame["gang"]["rank"]
            process.world_size = frame["gang"]["world_size"]
            self.watchers.ranked(process)
            self._live(process)

    def _on_tell(self, frame: Frame) -> Frame | None:
        process, message = self.processes.get(frame["attempt"]), frame["message"]
        if message["tell"] == "reform" and self._tell_late_place(frame["attempt"], message):
            return None
        if process is None or not process.is_joined:
            return {"ok": False, "error": f"attempt {frame['attempt']} has no link"}
        if message["tell"] == "fault":
            self._break(process, message)
            return None
        if process.generation >= message["generation"]:
            return None
        process.places = [*process.places, [process.generation, process.rank or 0]][-MOST_PLACES:]
        process.generation, process.rank = message["generation"], message["rank"]
        self.watchers.ranked(process)
        if process.life is not None:
            self._tell(process, {"type": "told", "message": message})
        else:
            self.say(process, {"say": "join", "generation": process.generation})
        return None

    def _tell_late_place(self, attempt: str, message: Frame) -> bool:
        """A member of a new generation had ended before it could be told: its peers must not wait for it."""
        role = self.ends.role_of(attempt)
        if role is None:
            return False
        frame = self.ends.give_place(attempt, message["generation"], message["rank"])
        if frame is not None:
            self._tell_peers(*role, frame)
        return True

    def _tell_peers(self, run: str, role: str, frame: Frame) -> None:
        for peer in self.processes.values():
            if (peer.run, peer.role) == (run, role) and peer.is_joined:
                self._tell(peer, frame)

    def _tell(self, process: SimulatedProcess, frame: Frame) -> None:
        """One frame on the link of a process, after those before it."""
        life = process.life
        if life is not None:
            seconds = _WORD_SECONDS * self._draw(process.attempt, self.clock.now)
            process.heard_at = max(process.heard_at, self.clock.now + seconds)
            told = dict(frame)
            self.clock.call_at(process.heard_at, lambda: life.hear(told))

    def _break(self, process: SimulatedProcess, message: Frame) -> None:
        """It was told a fault: some are deadly, at a moment that nobody knows before; each is met once."""
        if message["number"] in process.faults:
            return
        process.faults.add(message["number"])
        name, seconds = process.attempt, 2.0 * self._draw(process.attempt, message["number"])
        met = {"say": "fault", "number": message["number"]}
        self.clock.call_later(seconds, lambda: self.say(process, met))
        if message["kind"] in ("kill", "stop"):
            self.clock.call_later(seconds, lambda: self.end(name, signal=9))
        elif message["kind"] == "raise":
            self.clock.call_later(seconds, lambda: self.end(name, code=1))

    def _on_stop(self, frame: Frame) -> None:
        process = self.processes.get(frame["attempt"])
        if process is not None and process.life is not None:
            process.life.signal()
            end = lambda: self.end(frame["attempt"], signal=9)  # noqa: E731
            self.clock.call_later(frame["grace_seconds"], end)
            return
        draw = self._draw(frame["attempt"], "stop")
        grace = frame["grace_seconds"] if draw < 0.1 else 0.3 * draw
        signal = 9 if draw < 0.1 else 15
        self.clock.call_later(grace, lambda: self.end(frame["attempt"], signal=signal))

    def _on_kill(self, frame: Frame) -> None:
        self.clock.call_later(0.001, lambda: self.end(frame["attempt"], signal=9))

    def _on_ack(self, frame: Frame) -> None:
        for number in [n for n in self.unacknowledged if n <= frame["through"]]:
            del self.unacknowledged[number]

    def _on_reserve(self, frame: Frame) -> Frame:
        given: dict[str, int] = {}
        for key, number in frame["ports"].items():
            held = self.ports.get((frame["run"], key))
            if held is None:
                self._next_port += 1
                held = self.ports[frame["run"], key] = number or self._next_port
            given[key] = held
        return {"ports": given}

    def _on_end_run(self, frame: Frame) -> None:
        run = frame["run"]
        self.ports = {key: port for key, port in self.ports.items() if key[0] != run}
        self.stores = {key: store for key, store in self.stores.items() if key[0] != run}
        self.ends.run_ended(run)

    # --- lives --------------------------------------------------------------------------------------------------

    def _draw(self, *parts: object) -> float:
        return fraction(self.seed, *parts)

    def _live(self, process: SimulatedProcess) -> None:
        """Plan a process's life: what it says, and how it ends."""
        name = process.attempt
        kind = process.kind
        if kind in self.lives:
            process.life = self.lives[kind](self, process)
            return
        if kind == "joiner":
            self._say_later(process, 0.05, {"say": "join", "generation": process.generation})
        if self._draw(name, "says") < 0.3:
            for step in range(1, 4):
                self._say_later(process, 0.2 * step, {"say": "step", "step": step})
        self._accuse(process)
        if kind == "server" and self._draw(name, "dies") < 0.7:
            return
        seconds = 0.1 + 8.0 * self._draw(name, "life") ** 2
        end = self._draw(name, "end")
        if kind in ("joiner", "rank"):
            # The members of a gang end well together, if none of them fails.
            seconds = 4.0 + self._draw(process.run, process.role) + 0.1 * self._draw(name, "life")
            if end < 0.12:
                seconds *= self._draw(name, "when")
        code: int | None = 0 if end >= 0.2 else 1
        signal: int | None = None
        if end < 0.04:
            code, signal = None, 11
        elif end < 0.06:
            code, signal = None, 9
        elif end < 0.08:
            code, signal = None, 15
        self.clock.call_later(seconds, lambda: self.end(name, code=code, signal=signal))

    def _accuse(self, process: SimulatedProcess) -> None:
        """Some members take a peer for dead, some of them too late, and a few give the whole run up."""
        name = process.attempt
        if process.rank is None or self._draw(name, "accuses") > 0.12:
            return
        for turn in range(2):
            rank = int(self._draw(name, "whom") * 6)
            message = {"say": "suspect", "rank": rank, "generation": 0, "reason": "no sign of it"}
            if self._draw(name, "late") < 0.2:
                message["late"] = True
            self._say_later(process, 0.3 + turn * 0.4 + self._draw(name, "then"), message)
        if self._draw(name, "gives up") < 0.05:
            self._say_later(process, 1.5, {"say": "fail", "reason": "it cannot succeed"})

    def _say_later(self, process: SimulatedProcess, seconds: float, message: Frame) -> None:
        self.clock.call_later(seconds, lambda: self.say(process, message))

    def say(self, process: SimulatedProcess, message: Frame) -> None:
        """A process says something over its link."""
        if self.is_alive and process.attempt in self.processes:
            if message["say"] == "join" and process.life is None:
                message = {**message, "generation": process.generation}
            if message["say"] == "join" and not process.is_joined:
                process.is_joined = True
                oldest = process.places[0][0] if process.places else process.generation
                for frame in self.ends.since(process.run, process.role, oldest):
                    self._tell(process, frame)
            if message["say"] == "suspect" and process.life is None:
                generation = process.generation - (1 if message.get("late") else 0)
                message = {**message, "generation": generation}
            self._emit(
                {
                    "event": "link",
                    "attempt": process.attempt,
                    "run": process.run,
                    "message": message,
                }
            )

    def end(self, name: str, *, code: int | None = None, signal: int | None = None) -> None:
        """A process ends, its tree is swept, it is reaped; its peers may follow."""
        process = self.processes.pop(name, None)
        if process is None or not self.is_alive:
            return
        if process.life is not None:
            process.life.end()
        self.watchers.exited(process)
        if process.is_gang:
            self._remember_end(process, code, signal)
        self._emit(
            {
                "event": "exited",
                "attempt": name,
                "run": process.run,
                "code": code,
                "signal": signal,
                "swept": process.children,
                "at": self.clock.now,
            }
        )
        if process.is_gang and (signal is not None or code != 0):
            for peer in list(self.processes.values()):
                if (
                    (peer.run, peer.role) == (process.run, process.role)
                    and peer.kind == "rank"
                    and peer.state == "running"
                    and self._draw(peer.attempt, "follows") < 0.5
                ):
                    self.clock.call_later(0.002, lambda peer=peer: self._collateral(peer))  # type: ignore[misc]

    def _remember_end(
        self, process: SimulatedProcess, code: int | None, signal: int | None
    ) -> None:
        """Tell the peers that are there, and keep it for those that come later."""
        frame = {
            "type": "peer",
            "attempt": process.attempt,
            "rank": process.rank,
            "index": process.index,
            "generation": process.generation,
            "places": process.places,
            "code": code,
            "signal": signal,
        }
        self._tell_peers(process.run, process.role, frame)
        living = [
            (peer.places[0][0] if peer.places else peer.generation)
            for peer in self.processes.values()
            if (peer.run, peer.role) == (process.run, process.role) and peer.rank is not None
        ]
        oldest = min(living, default=process.generation)
        self.ends.remember(process.run, process.role, frame, lambda: oldest)

    def _collateral(self, peer: SimulatedProcess) -> None:
        self.end(peer.attempt, code=1)
