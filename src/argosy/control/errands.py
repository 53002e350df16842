"""Errands: what the controller asks of an agent beside the desired state: blobs, stacks, exec, signals, statistics, the end.

Each errand is done at most once and answered; it may be lost with the link, and then whoever asked is told. The roster is what the agent
has seen pass by of attempts, pids and exec'd commands; it decides nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from argosy.control.guests import Guests, exec_name, guest_order, is_exec
from argosy.control.hostroom import find_shortage, find_unusable
from argosy.control.keeper.census import look_at
from argosy.control.keeperevents import is_step
from argosy.control.keeperlink import KeeperLink
from argosy.control.launchenv import LaunchEnvironments
from argosy.control.stacks import Target, take_stacks
from argosy.errors import ArgosyError, ClusterError
from argosy.protocol.messages import Answer, Ask, Launch
from argosy.telemetry.rundir import exec_directory

_MOST_EXECS = 256
Data = dict[str, Any]


class Roster:
    """Attempts as the agent saw them: their launches, their pids, and exec'd commands with their ends."""

    def __init__(self) -> None:
        self.launches: dict[str, Launch] = {}
        self.pids: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        """The step that each attempt was at when it last said so."""
        self._execs: OrderedDict[str, Data] = OrderedDict()

    def listed(self, attempts: list[Data]) -> None:
        """What a keeper holds."""
        self.pids = {
            str(entry["attempt"]): int(entry["pid"])
            for entry in attempts
            if entry.get("pid") and entry.get("state") != "exited"
        }
        for name in self.pids:
            if is_exec(name):
                self._execs.setdefault(name, {"running": True})

    def seen(self, event: Data) -> None:
        """An event of the keeper."""
        attempt = str(event.get("attempt") or "")
        kind = event.get("event")
        if kind == "started":
            self.pids[attempt] = int(event.get("pid") or 0)
        elif is_step(event):
            step = event["message"].get("step")
            if isinstance(step, int) and attempt in self.pids:
                self.steps[attempt] = step
        elif kind == "exited":
            self.pids.pop(attempt, None)
            self.steps.pop(attempt, None)
            if is_exec(attempt):
                self._end_exec(attempt, event)

    def begin_exec(self, attempt: str) -> None:
        """A command was ordered."""
        self._execs[attempt] = {"running": True}
        while len(self._execs) > _MOST_EXECS:
            self._execs.popitem(last=False)

    def exec_state(self, attempt: str) -> Data:
        """How it is doing; empty when it is not known here."""
        return self._execs.get(attempt, {})

    def began(self, attempt: str) -> float:
        """When its process began, in seconds since 1970; now, when there is none any more."""
        process = look_at(self.pids.get(attempt, 0))
        return time.time() - (process.age_seconds if process is not None else 0.0)

    def waiting_to_fork(self) -> list[Launch]:
        """Those that are to be forked from a warm parent and have no process yet."""
        launches = self.launches.values()
        return [each for each in launches if each.warm and each.attempt not in self.pids]

    def forget(self, attempt: str) -> None:
        """The attempt is over for good."""
        self.launches.pop(attempt, None)
        self.pids.pop(attempt, None)

    def _end_exec(self, attempt: str, event: Data) -> None:
        self._execs[attempt] = {
            "running": False,
            "code": event.get("code"),
            "signal": event.get("signal"),
            "error": str(event.get("error") or ""),
        }


class Errands:
    """Carries errands out, over the agent's link to its keeper."""

    def __init__(
        self,
        link: Callable[[], KeeperLink],
        roster: Roster,
        environments: LaunchEnvironments,
        guests: Guests,
        statistics: Callable[[], Data],
    ) -> None:
        """`link` gives the present link, or raises ClusterError when there is none."""
        self._link = link
        self._roster = roster
        self._environments = environments
        self._guests = guests
        self._statistics = statistics
        self._verbs: dict[str, Callable[[Data], Awaitable[Data]]] = {
            "put_blob": self._put_blob,
            "get_blob": self._get_blob,
            "drop_blob": self._drop_blob,
            "room": self._room,
            "cpus": self._cpus,
            "stacks": self._stacks,
            "look": self._look,
            "steps": self._steps,
            "exec": self._exec,
            "exec_state": self._exec_state,
            "signal": self._signal,
            "statistics": self._count,
            "shutdown": self._shutdown,
        }

    async def answer(self, ask: Ask) -> Answer:
        """Do it, and say how it went."""
        verb = self._verbs.get(ask.verb)
        if verb is None:
            return Answer(id=ask.id, ok=False, error=f"this agent does not know `{ask.verb}`")
        try:
            return Answer(id=ask.id, ok=True, data=await verb(ask.data))
        except ArgosyError as error:
            return Answer(id=ask.id, ok=False, error=error.what)
        except (OSError, KeyError, TypeError, ValueError) as error:
            return Answer(id=ask.id, ok=False, error=f"{ask.verb}: {type(error).__name__}: {error}")

    async def _put_blob(self, data: Data) -> Data:
        content = str(data["data"])
        name = str(data.get("name") or hashlib.sha256(content.encode()).hexdigest())
        self._environments.learn(name, content)
        await self._link().ask({"type": "put_blob", "name": name, "data": content})
        return {"name": name}

    async def _get_blob(self, data: Data) -> Data:
        reply = await self._link().ask({"type": "get_blob", "name": str(data["name"])})
        return {"data": reply["data"]}

    async def _drop_blob(self, data: Data) -> Data:
        self._environments.forget(str(data["name"]))
        await self._link().ask({"type": "drop_blob", "name": str(data["name"])})
        return {}

    async def _room(self, data: Data) -> Data:
        commands, pythons, keeper = int(data["commands"]), int(data["pythons"]), self._link().pid
        loop = asyncio.get_running_loop()
        shortage = await loop.run_in_executor(None, find_shortage, commands, pythons, keeper)
        return {} if shortage is None else shortage._asdict()

    async def _cpus(self, data: Data) -> Data:
        loop = asyncio.get_running_loop()
        unusable = await loop.run_in_executor(None, find_unusable, list(data["cpus"]))
        return {"unusable": unusable, "usable": sorted(os.sched_getaffinity(0))}

    async def _stacks(self, data: Data) -> Data:
        targets = []
        for attempt in data["attempts"]:
            pid = self._roster.pids.get(attempt)
            if pid:
                launch = self._roster.launches.get(attempt)
                targets.append(Target(attempt, pid, launch.stderr if launch else ""))
        return {"stacks": await take_stacks(targets, seconds=data.get("seconds"))}

    async def _look(self, data: Data) -> Data:
        # In a thread: with thousands of processes it takes a while.
        pids = dict(self._roster.pids)
        loop = asyncio.get_running_loop()
        halted = await loop.run_in_executor(None, find_halted, pids)
        return {"halted": halted, "importing": await self._importing()}

    async def _importing(self) -> dict[str, str]:
        """Attempts that wait for their warm parent -> what it imports."""
        waiting = self._roster.waiting_to_fork()
        if not waiting:
            return {}
        reply = await self._link().ask({"type": "statistics"})
        busy = {(z["python"], *z["preload"]) for z in reply["zygotes"] if z["waiting"]}
        return {
            launch.attempt: ", ".join(name for name in launch.preload if not name.endswith("?"))
            for launch in waiting
            if (launch.python, *launch.preload) in busy
        }

    async def _steps(self, data: Data) -> Data:
        known = self._roster.steps
        return {"steps": {name: known[name] for name in data["attempts"] if name in known}}

    async def _exec(self, data: Data) -> Data:
        target = str(data["attempt"])
        launch = self._roster.launches.get(target)
        if launch is None or not self._roster.pids.get(target):
            raise ClusterError(f"{target} does not run on this host")
        attempt, is_tty = exec_name(target), bool(data.get("tty"))
        directory = exec_directory(os.path.dirname(os.path.dirname(launch.stdout)))
        os.makedirs(directory, mode=0o700, exist_ok=True)
        stdout = os.path.join(directory, f"{attempt}.out")
        stderr = stdout if is_tty else os.path.join(directory, f"{attempt}.err")
        order = guest_order(
            launch,
            attempt,
            [str(word) for word in data["argv"]],
            env={str(k): str(v) for k, v in (data.get("env") or {}).items()},
            output=(stdout, stderr),
            is_tty=is_tty,
        )
        self._roster.begin_exec(attempt)
        await self._guests.start(launch, order)
        return {"attempt": attempt, "stdout": stdout, "stderr": stderr}

    async def _exec_state(self, data: Data) -> Data:
        return self._roster.exec_state(str(data["attempt"]))

    async def _signal(self, data: Data) -> Data:
        number = signal.Signals[str(data["signal"])].name
        frame = {"type": "signal", "attempt": str(data["attempt"]), "signal": number}
        await self._link().ask(frame)
        return {}

    async def _count(self, data: Data) -> Data:
        reply = await self._link().ask({"type": "statistics"})
        keeper = {key: value for key, value in reply.items() if key not in ("type", "id", "ok")}
        return {"agent": self._statistics(), "keeper": keeper}

    async def _shutdown(self, data: Data) -> Data:
        await self._link().ask({"type": "shutdown"}, timeout_seconds=30)
        return {}


def find_halted(pids: dict[str, int]) -> list[str]:
    """Which attempts' processes were stopped by a signal and not continued."""
    halted = []
    for attempt, pid in pids.items():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name before it may hold anything, parentheses too.
                state = file.read().rpartition(b") ")[2][:1]
        except OSError:
            continue
        if state == b"T":
            halted.append(attempt)
    return halted
