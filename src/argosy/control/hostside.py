"""HostSide: the agent without I/O. It makes the keeper's processes what the controller wants and reports what happens.

Wants and the keeper's list are reconciled by attempt id; every keeper event becomes one numbered observation that is sent
again until it is durable at the controller. The same class runs behind sockets (agent.py) and in the simulator. It
never reads a clock and never gives a process up because the controller is silent. Frame ids are small and positive; the
agent's own errands use others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from argosy.control.batches import (
    Frame,
    Key,
    fault_frame,
    group_key,
    late_place_frame,
    reform_frame,
    release_frame,
    spawn_frame,
    stop_frame,
    store_frame,
    store_key,
)
from argosy.control.identity import is_attempt, run_of
from argosy.control.keeperevents import is_advance, is_step, observation_of
from argosy.control.outbox import RESEND_SECONDS, Outbox
from argosy.protocol.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    FromAgent,
    Hello,
    Launch,
    Observed,
    Report,
    Reserve,
    Want,
    Wants,
    Welcome,
)

_ALIVE = ("spawning", "starting", "running", "parked")
MOST_IN_BATCH = 2048
ADVANCE_SECONDS = 2.0
"""So often the controller is told how far a save is; more often where the grace is short."""


@dataclass(slots=True)
class HostOutputs:
    """What one input led to."""

    to_keeper: list[Frame] = field(default_factory=list)
    to_controller: list[FromAgent] = field(default_factory=list)
    probes: list[tuple[str, dict[str, Any], Launch]] = field(default_factory=list)
    """Probes to begin."""
    watch_logs: list[Launch] = field(default_factory=list)
    """Attempts whose output begins."""
    forget: list[str] = field(default_factory=list)
    """Attempts of which nothing is needed any more: probes and log watches end."""


@dataclass(slots=True)
class _Local:
    """One attempt on this host."""

    attempt: str
    want: Want | None = None
    launch: Launch | None = None
    state: str = ""
    """as the keeper lists it; empty: the keeper does not have it; spawning: it was told to"""
    told: str = ""
    """term or kill: what the keeper was told"""
    is_released: bool = False
    reformed: int = 0
    faults_told: set[int] = field(default_factory=set)
    is_probed: bool = False
    is_watched: bool = False
    step_at: float | None = None
    is_hung: bool = False
    advance_at: float | None = None
    """When the controller was told last how far its save is."""


@dataclass(slots=True)
class _Holding:
    """Ports of a run on this host."""

    reserve: Reserve
    is_asked: bool = False


class HostSide:
    """One host's wants, attempts, stores and outboxes."""

    def __init__(self, *, host: str, cpus: int, memory_bytes: int, secret: str = "") -> None:
        self.host = host
        self.cpus = cpus
        self.memory_bytes = memory_bytes
        self.keeper = ""
        self.is_connected = False
        self._secret = secret
        self._keeper_pid = 0
        self._version = 0
        self._pages: dict[int, Wants] = {}
        """Of wants that have not come as a whole."""
        self._is_report_due = False
        self._greeted_at: float | None = None
        """When hello was said last, while no welcome has come."""
        self._attempts: dict[str, _Local] = {}
        self._runs: dict[str, _Holding] = {}
        self._held_runs: set[str] = set()
        """Runs of which the keeper held something when it was asked."""
        self._ending: dict[str, float] = {}
        """When the keeper is told again that a run is over."""
        self._stores: dict[Key, dict[str, Any] | None] = {}
        """None: asked for."""
        self._missing: dict[Key, Launch] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._own = ""
        self._next_id = 0
        self._asked: dict[int, tuple[str, Any]] = {}
        self._touched: dict[str, None] = {}
        self._later: dict[str, float] = {}
        self._watched: dict[str, None] = {}
        self._out = HostOutputs()

    # --- inputs -------------------------------------------------------------------------------------------------

    def keeper_connected(
        self,
        now: float,
        keeper: str,
        pid: int,
        attempts: list[dict[str, Any]],
        runs: Iterable[str] = (),
    ) -> HostOutputs:
        """The link to the keeper is up and it has listed what it has; its unacknowledged events follow.

        `runs` are those of which it holds memory or ports: should one be over, the controller says so.
        """
        if not self._own:
            self._own = f"{self.host}@{now:.6f}"
            self._outboxes[self._own] = Outbox(self._own)
        if keeper != self.keeper:
            self._change_keeper(keeper)
        self._keeper_pid = pid
        self._held_runs = set(runs)
        self._asked.clear()
        self._stores = {key: store for key, store in self._stores.items() if store is not None}
        for holding in self._runs.values():
            holding.is_asked = False
        listed = {str(each["attempt"]): each for each in attempts if is_attempt(each["attempt"])}
        for name in listed:
            self._attempts.setdefault(name, _Local(name))
        for name, local in self._attempts.items():
            state = str(listed[name]["state"]) if name in listed else ""
            if local.state != "exited":
                local.state = state
            local.told, local.is_released, local.reformed = "", False, 0
            local.faults_told.clear()
            self._touched[name] = None
        if self.is_connected:
            self._greet(now)
        return self._finish(now)

    def _change_keeper(self, keeper: str) -> None:
        """What the old keeper had is gone; the controller learns that from the new id."""
        self._out.forget += self._attempts
        self._attempts.clear()
        self._runs.clear()
        self._stores.clear()
        self._touched.clear()
        self._later.clear()
        self._ending.clear()
        self._watched.clear()
        self._version = 0
        self._pages = {}
        self.keeper = keeper
        self._outboxes.setdefault(keeper, Outbox(keeper))

    def keeper_event(self, now: float, number: int, event: dict[str, Any]) -> HostOutputs:
        """Something happened at the keeper."""
        outbox = self._outboxes[self.keeper]
        if number > outbox.last:
            outbox.add(number, self._observe(now, number, event))
        return self._finish(now)

    def keeper_reply(self, now: float, id: int, reply: dict[str, Any]) -> HostOutputs:
        """The keeper answered one of our frames."""
        kind, what = self._asked.pop(id, ("", None))
        is_ok = bool(reply.get("ok"))
        error = str(reply.get("error") or "the keeper refused")
        if kind == "store":
            self._store_made(now, what, reply.get("store") if is_ok else None)
        elif kind == "spawn" and not is_ok:
            for name in what:
                local = self._attempts.get(name)
                if local is not None and local.state == "spawning":
                    self._never_started(local, error)
        elif kind == "tell" and not is_ok:
            self._not_told(now, *what)
        elif kind == "end_run" and not is_ok:
            # A command beside a process is not reaped yet, say. What the run holds must not stay for ever.
            self._ending[what] = now + RESEND_SECONDS
        elif kind == "reserve" and what in self._runs:
            if is_ok:
                data = {"ports": reply.get("ports", {}), "keeper": self.keeper}
                self._tell("ports", run=what, data=data)
            else:
                data = {"reason": error, "keeper": self.keeper}
                self._tell("ports_refused", run=what, data=data)
        return self._finish(now)

    def controller_connected(self, now: float) -> HostOutputs:
        """A new link to the controller: say hello, then everything that is not acknowledged."""
        self.is_connected = True
        if self.keeper:
            self._greet(now)
        return self._finish(now)

    def controller_disconnected(self, now: float) -> None:
        """The link is gone; everything goes on."""
        self.is_connected = False
        self._greeted_at = None

    def receive(self, now: float, message: Welcome | Wants | Acknowledge) -> HostOutputs:
        """Take what the controller said."""
        if isinstance(message, Welcome):
            # An answer to the hello of an earlier keeper says nothing about this one.
            if message.keeper == self.keeper:
                self._greeted_at = None
                self._acknowledged(self.keeper, message.acknowledged)
        elif isinstance(message, Acknowledge):
            self._acknowledged(message.keeper, message.number)
        elif message.keeper in ("", self.keeper):
            self._take_wants(message)
        return self._finish(now)

    def probed(self, now: float, attempt: str, ok: bool, why: str) -> HostOutputs:
        """A probe succeeded, or gave up."""
        local = self._attempts.get(attempt)
        if local is not None and local.state in _ALIVE:
            if ok:
                self._tell("ready", attempt=attempt)
            else:
                self._tell("unready", attempt=attempt, data={"reason": why or "never became ready"})
        return self._finish(now)

    def note(self, now: float, run: str, attempt: str, text: str) -> HostOutputs:
        """Pass on what the agent itself has to say to people."""
        if self.keeper:
            self._tell("note", run=run, attempt=attempt, data={"level": "warning", "text": text})
        return self._finish(now)

    def tick(self, now: float) -> HostOutputs:
        """Do what has become due: delayed starts, hangs, reports sent again."""
        for name in [name for name, at in self._later.items() if at <= now]:
            del self._later[name]
            self._touched[name] = None
        for run in [run for run, at in self._ending.items() if at <= now]:
            del self._ending[run]
            self._ask({"type": "end_run", "run": run}, "end_run", run)
        for name in list(self._watched):
            self._watch(now, self._attempts[name])
        if self._greeted_at is not None and self._greeted_at + RESEND_SECONDS <= now:
            self._greet(now)
        return self._finish(now)

    def deadline(self) -> float | None:
        """When `tick` is next due."""
        times = [*self._later.values(), *self._ending.values()]
        times += [at for name in self._watched if (at := self._hang_at(self._attempts[name]))]
        if self.is_connected and self.keeper:
            times += [
                at for outbox in self._outboxes.values() if (at := outbox.due_at()) is not None
            ]
            if self._greeted_at is not None:
                times.append(self._greeted_at + RESEND_SECONDS)
        return min(times, default=None)

    # --- the controller's side ----------------------------------------------------------------------------------

    def _greet(self, now: float) -> None:
        self._greeted_at = now
        for outbox in self._outboxes.values():
            outbox.rewind()
            if outbox.source not in (self.keeper, self._own) and len(outbox):
                # How a dead keeper's processes ended, before they count as lost.
                self._report(now, outbox)
        alive = [name for name, local in self._attempts.items() if local.state]
        runs = {run_of(name) for name in alive} | set(self._runs) | self._held_runs
        self._out.to_controller.append(
            Hello(
                version=PROTOCOL_VERSION,
                host=self.host,
                keeper=self.keeper,
                pid=self._keeper_pid,
                cpus=self.cpus,
                memory_bytes=self.memory_bytes,
                alive=alive,
                runs=sorted(runs),
            )
        )
        self._is_report_due = True

    def _take_wants(self, message: Wants) -> None:
        self._is_report_due = True  # the controller learns from it where we are
        if message.since > self._version:
            return  # something before it was lost; it is sent again
        if any(
            (p.since, p.version) != (message.since, message.version) for p in self._pages.values()
        ):
            self._pages.clear()
        self._pages[message.page] = message
        last = max(self._pages)
        if self._pages[last].has_more or len(self._pages) <= last:
            return  # nothing counts until all of it is there
        pages, self._pages = self._pages, {}
        for number in sorted(pages):
            self._take_page(pages[number])
        self._version = max(self._version, message.version)

    def _take_page(self, message: Wants) -> None:
        for want in message.wants:
            if want.version > self._version:
                local = self._attempts.setdefault(want.attempt, _Local(want.attempt))
                local.want = want
                local.launch = want.launch or local.launch
                self._touched[want.attempt] = None
        for reserve in message.reserves:
            if reserve.version > self._version:
                self._take_reserve(reserve)

    def _take_reserve(self, reserve: Reserve) -> None:
        if reserve.ports:
            self._runs[reserve.run] = _Holding(reserve)
            return
        self._runs.pop(reserve.run, None)
        self._held_runs.discard(reserve.run)
        self._stores = {key: store for key, store in self._stores.items() if key[0] != reserve.run}
        self._ask({"type": "end_run", "run": reserve.run}, "end_run", reserve.run)

    def _acknowledged(self, source: str, number: int) -> None:
        outbox = self._outboxes.get(source)
        if outbox is None:
            return
        outbox.acknowledge(number)
        if source not in (self.keeper, self._own) and not len(outbox):
            del self._outboxes[source]

    def _tell(
        self, kind: Any, *, attempt: str = "", run: str = "", data: dict[str, Any] | None = None
    ) -> None:
        """Observe something ourselves."""
        outbox = self._outboxes[self._own]
        number = outbox.last + 1
        run = run or run_of(attempt)
        outbox.add(
            number, Observed(number=number, kind=kind, attempt=attempt, run=run, data=data or {})
        )

    def _report(self, now: float, outbox: Outbox) -> None:
        report = Report(
            host=self.host,
            keeper=outbox.source,
            observed=outbox.take(now),
            wants_version=self._version if outbox.source == self.keeper else 0,
        )
        self._out.to_controller.append(report)

    # --- the keeper's side --------------------------------------------------------------------------------------

    def _observe(self, now: float, number: int, event: dict[str, Any]) -> Observed | None:
        """Fold an event of the keeper; what it tells the controller, or None."""
        attempt = event.get("attempt")
        local: _Local | None = None
        is_first_step = False
        if is_attempt(attempt) and event.get("event") in ("started", "exited", "link"):
            local = self._attempts.setdefault(str(attempt), _Local(str(attempt)))
            self._touched[local.attempt] = None
            if event["event"] == "exited":
                local.state = "exited"
            elif event["event"] == "started":
                self._started(local)
            elif is_step(event):
                is_first_step, local.step_at = local.step_at is None, now
                self._watched[local.attempt] = None
            elif is_advance(event) and not _is_advance_due(now, local):
                return None
        return observation_of(number, event, is_first_step=is_first_step)

    def _started(self, local: _Local) -> None:
        is_parked = local.launch is not None and local.launch.parked and not local.is_released
        if local.state in ("", "spawning", "starting"):
            local.state = "parked" if is_parked else "running"

    def _ask(self, frame: Frame, kind: str, what: Any) -> None:
        self._next_id += 1
        self._asked[self._next_id] = (kind, what)
        self._out.to_keeper.append({"id": self._next_id, **frame})

    def _store_made(self, now: float, key: Key, store: Any) -> None:
        members = [name for name in self._attempts if run_of(name) == key[0]]
        if isinstance(store, dict):
            self._stores = {k: v for k, v in self._stores.items() if k[:2] != key[:2] or k >= key}
            self._stores[key] = store
            self._touched.update(dict.fromkeys(members))
        elif self._stores.get(key, False) is None:
            del self._stores[key]
            self._later.update(dict.fromkeys(members, now + RESEND_SECONDS))

    def _not_told(self, now: float, attempt: str, generation: int, fault: int) -> None:
        """It has no link yet, or not at the moment: it is told when it speaks, or after a while."""
        local = self._attempts.get(attempt)
        if local is None or local.state not in _ALIVE:
            return
        if local.reformed == generation:
            local.reformed = 0
        local.faults_told.discard(fault)
        self._later[attempt] = now + RESEND_SECONDS

    def _never_started(self, local: _Local, error: str) -> None:
        local.state = "exited"
        self._touched[local.attempt] = None
        self._tell("exited", attempt=local.attempt, data={"error": error})

    def _reconcile(self, now: float) -> None:
        launches: list[Launch] = []
        while self._touched:
            names, self._touched = list(self._touched), {}
            for name in names:
                local = self._attempts.get(name)
                if local is not None:
                    self._reconcile_one(now, local, launches)
        for group in _grouped(launches):
            names = [launch.attempt for launch in group]
            self._ask(spawn_frame(group, self._secret), "spawn", names)
        # Survivors and spares must know who hosts the store. Only the reply to a batch that starts nothing says so. It comes after
        # the members that are started: one fork then makes them and the store's host, and nobody waits longer for a replacement.
        for key, launch in self._missing.items():
            self._stores[key] = None
            self._ask(store_frame(launch, self._secret), "store", key)
        self._missing.clear()
        for run, holding in self._runs.items():
            if not holding.is_asked:
                holding.is_asked = True
                frame = {"type": "reserve", "run": run, "ports": holding.reserve.ports}
                self._ask(frame, "reserve", run)

    def _reconcile_one(self, now: float, local: _Local, launches: list[Launch]) -> None:
        want, launch = local.want, local.launch
        if local.state == "exited":
            self._watched.pop(local.attempt, None)
        if want is None:
            return
        if want.reform is not None and (local.state == "exited" or want.state == "gone"):
            self._tell_late_place(local, want.reform)
        if want.state == "gone":
            self._end(local)
        elif want.state == "running" and launch is not None:
            if local.state == "":
                if launch.not_before > now:
                    self._later[local.attempt] = launch.not_before
                    return
                local.state = "spawning"
                launches.append(launch)
                self._out.watch_logs.append(launch)
                local.is_watched = True
            elif local.state != "exited":
                self._keep_running(now, local, want, launch)
        elif want.state in ("term", "kill"):
            self._stop(local, want.state)

    def _keep_running(self, now: float, local: _Local, want: Want, launch: Launch) -> None:
        if not local.is_watched:
            local.is_watched = True
            self._out.watch_logs.append(launch)
        if local.state == "parked" and not launch.parked and not local.is_released:
            store = self._store(launch)
            if store is not None:
                local.is_released = True
                local.state = "running"
                self._ask(release_frame(launch, store), "release", local.attempt)
        elif want.reform is not None and local.reformed < want.reform["generation"]:
            store = self._store(launch)
            if store is not None and local.state == "running":
                local.reformed = want.reform["generation"]
                what = (local.attempt, local.reformed, 0)
                self._ask(reform_frame(local.attempt, want.reform, store), "tell", what)
        if local.state != "running":
            return
        for fault in want.faults:
            if fault["number"] not in local.faults_told:
                local.faults_told.add(fault["number"])
                what = (local.attempt, -1, fault["number"])
                self._ask(fault_frame(local.attempt, fault), "tell", what)
        if want.progressed and local.step_at is None:
            local.step_at = now
        if local.step_at is not None and launch.hang_seconds:
            self._watched[local.attempt] = None
        if launch.probe is not None and not local.is_probed:
            local.is_probed = True
            self._out.probes.append((local.attempt, launch.probe, launch))

    def _tell_late_place(self, local: _Local, reform: dict[str, Any]) -> None:
        """It ended before it could be told its place in a new generation: the others learn from the keeper that it will not come."""
        if local.state not in _ALIVE and local.reformed < reform["generation"]:
            local.reformed = reform["generation"]
            self._ask(late_place_frame(local.attempt, reform), "place", local.attempt)

    def _store(self, launch: Launch) -> dict[str, Any] | None:
        """The generation's store, if it is known; else it is asked for."""
        key = store_key(launch)
        if key not in self._stores:
            self._missing[key] = launch
        return self._stores.get(key)

    def _stop(self, local: _Local, level: str) -> None:
        if local.state == "":
            self._never_started(local, "it was told to end before it was started")
        elif local.state in _ALIVE and local.told not in (level, "kill"):
            local.told = level
            frame = (
                {"type": "kill", "attempt": local.attempt}
                if level == "kill"
                else stop_frame(local.attempt, local.launch)
            )
            self._ask(frame, "stop", local.attempt)

    def _end(self, local: _Local) -> None:
        if local.state in _ALIVE:
            self._stop(local, "kill")
            return
        del self._attempts[local.attempt]
        self._later.pop(local.attempt, None)
        self._watched.pop(local.attempt, None)
        self._out.forget.append(local.attempt)

    # --- time ---------------------------------------------------------------------------------------------------

    def _hang_at(self, local: _Local) -> float | None:
        launch = local.launch
        if launch is None or not launch.hang_seconds or local.step_at is None:
            return None
        if local.is_hung or local.told or local.state != "running":
            return None
        return local.step_at + launch.hang_seconds

    def _watch(self, now: float, local: _Local) -> None:
        at = self._hang_at(local)
        if at is not None and at <= now:
            local.is_hung = True
            seconds = now - (local.step_at or now)
            self._tell(
                "hung", attempt=local.attempt, data={"reason": f"no step for {seconds:.0f} s"}
            )

    def _finish(self, now: float) -> HostOutputs:
        """Bring the keeper in line, report what is new, and hand the outputs over."""
        if self.keeper:
            self._reconcile(now)
        current = self._outboxes.get(self.keeper)
        through = current.take_forgettable() if current is not None else 0
        if through:
            self._ask({"type": "ack", "through": through}, "ack", through)
        if self.is_connected and self.keeper:
            for outbox in self._outboxes.values():
                due = outbox.due_at()
                if outbox.unsent() or (due is not None and due <= now):
                    self._report(now, outbox)
                    self._is_report_due = self._is_report_due and outbox is not current
            if self._is_report_due and current is not None:
                self._report(now, current)
                self._is_report_due = False
        out, self._out = self._out, HostOutputs()
        return out


def _is_advance_due(now: float, local: _Local) -> bool:
    """Whether the controller is to hear how far a save is; who waits for it there has the same grace as the keeper."""
    grace = local.launch.grace_seconds if local.launch is not None else ADVANCE_SECONDS
    if local.advance_at is not None and now - local.advance_at < min(ADVANCE_SECONDS, grace / 4):
        return False
    local.advance_at = now
    return True


def _grouped(launches: Iterable[Launch]) -> list[list[Launch]]:
    groups: dict[Any, list[Launch]] = {}
    for launch in launches:
        groups.setdefault(group_key(launch), []).append(launch)
    # A frame has a limit. Batches of one generation share its store.
    return [
        group[first : first + MOST_IN_BATCH]
        for group in groups.values()
        for first in range(0, len(group), MOST_IN_BATCH)
    ]
