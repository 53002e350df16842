"""SimulatedKeeper: processes that run, report, crash and end, behind the keeper's protocol.

It takes the same frames as the real keeper and answers with the same replies and events: spawn is idempotent, events are
numbered and kept until acknowledged, a store belongs to a generation. Its crash takes its processes with it. What each
process does follows from the seed and its attempt id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from argosy.control.identity import fraction
from argosy.testing.clock import VirtualClock

Frame = dict[str, Any]


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
        self, clock: VirtualClock, keeper: str, host: str, seed: int, watchers: Watchers
    ) -> None:
        self.clock = clock
        self.keeper = keeper
        self.host = host
        self.seed = seed
        self.watchers = watchers
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
        if self._draw(name, "exec") < 0.01:
            error = "No such file or directory"
            self._emit({"event": "exited", "attempt": name, "run": order["run"], "error": error})
            return
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
            children=int(self._draw(name, "children") * 3),
            program=order["program"],
        )
        self.processes[name] = process
        self.watchers.started(process)
        how = "fork" if is_gang else "exec"
        self._emit({"event": "started", "attempt": name, "run": process.run, "pid": 1, "how": how})
        if process.state == "running":
            self._live(process)

    def _on_release(self, frame: Frame) -> None:
        process = self.processes.get(frame["attempt"])
        if process is not None and process.state == "parked":
            process.state = "running"
            process.generation, process.rank = frame["gang"]["generation"], frame["gang"]["rank"]
            self.watchers.ranked(process)
            self._live(process)

    def _on_tell(self, frame: Frame) -> Frame | None:
        process, message = self.processes.get(frame["attempt"]), frame["message"]
        if process is None or not process.is_joined:
            return {"ok": False, "error": f"attempt {frame['attempt']} has no link"}
        if message["tell"] == "fault":
            self._break(process, message)
            return None
        if process.generation >= message["generation"]:
            return None
        process.generation, process.rank = message["generation"], message["rank"]
        self.watchers.ranked(process)
        self._say(process, {"say": "join", "generation": process.generation})
        return None

    def _break(self, process: SimulatedProcess, message: Frame) -> None:
        """It was told a fault: some are deadly, at a moment that nobody knows before; each is met once."""
        if message["number"] in process.faults:
            return
        process.faults.add(message["number"])
        name, seconds = process.attempt, 2.0 * self._draw(process.attempt, message["number"])
        if message["kind"] in ("kill", "stop"):
            self.clock.call_later(seconds, lambda: self.end(name, signal=9))
        elif message["kind"] == "raise":
            self.clock.call_later(seconds, lambda: self.end(name, code=1))

    def _on_stop(self, frame: Frame) -> None:
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

    # --- lives --------------------------------------------------------------------------------------------------

    def _draw(self, *parts: object) -> float:
        return fraction(self.seed, *parts)

    def _live(self, process: SimulatedProcess) -> None:
        """Plan a process's life: what it says, and how it ends."""
        name = process.attempt
        kind = process.kind
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
        self.clock.call_later(seconds, lambda: self._say(process, message))

    def _say(self, process: SimulatedProcess, message: Frame) -> None:
        if self.is_alive and process.attempt in self.processes:
            if message["say"] == "join":
                process.is_joined = True
                message = {**message, "generation": process.generation}
            if message["say"] == "suspect":
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
        self.watchers.exited(process)
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

    def _collateral(self, peer: SimulatedProcess) -> None:
        self.end(peer.attempt, code=1)
