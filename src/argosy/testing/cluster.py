"""SimulatedCluster: the real Coordinator and HostSide over a simulated network, keepers and log, in virtual time.

`simulate(seed)` runs a random workload with random faults (crashes of controller, agents and keepers, kills, partitions,
bad weather), lets everything come to rest, and checks the invariants all the way. The same seed gives the same history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from argosy.config.spec import Submission
from argosy.control.coordinator import Coordinator, Outputs
from argosy.control.faults import DRAWN, FaultOrder, draw_faults
from argosy.control.hostside import HostOutputs, HostSide
from argosy.control.retention import KEEP_ENDED
from argosy.errors import ConfigError, InvariantError, NotFoundError
from argosy.protocol.facts import AttemptSuspected, Event
from argosy.testing.clock import VirtualClock
from argosy.testing.eventrows import EventRows
from argosy.testing.invariants import Invariants
from argosy.testing.network import SimulatedNetwork, Weather
from argosy.testing.processes import Lives, SimulatedKeeper, Watchers
from argosy.testing.workload import random_run

COMMIT_SECONDS = 0.003
KEPT_IN_SOME = 20
"""Ended runs that every other seed keeps: forgetting is met with every fault."""
LOCAL_SECONDS = 0.0002


class SimulatedHost:
    """One machine: a keeper and an agent, either of which may be down."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.incarnation = 0
        self.keeper = self._new_keeper()
        self.agent: HostSide | None = None
        self.is_linked = False
        self._agent_epoch = 0
        self._timer: float | None = None

    def _new_keeper(self) -> SimulatedKeeper:
        self.incarnation += 1
        cluster = self.cluster
        watch = cluster.invariants
        watchers = Watchers(watch.started, watch.ranked, watch.exited, watch.emitted)
        name = f"k-{self.name}-{self.incarnation}"
        return SimulatedKeeper(
            cluster.clock, name, self.name, cluster.seed, watchers, cluster.lives
        )

    # --- agent --------------------------------------------------------------------------------------------------

    def start_agent(self) -> None:
        """A fresh agent: it knows nothing and asks the keeper."""
        if self.agent is not None:
            return
        self._agent_epoch += 1
        self._timer = None
        # Small hosts: the queue fills, gangs spread over several of them, and some runs never fit.
        cpus = (1, 2, 4)[int(self.name[1:]) % 3]
        self.agent = HostSide(host=self.name, cpus=cpus, memory_bytes=1 << 34)
        self._meet_keeper()
        self.connect()

    def _meet_keeper(self) -> None:
        keeper, agent, epoch = self.keeper, self.agent, self._agent_epoch
        if agent is None or not keeper.is_alive:
            return
        clock = self.cluster.clock

        def hear(frame: dict[str, Any]) -> None:
            def arrive() -> None:
                if self._agent_epoch == epoch and self.keeper is keeper and self.agent is agent:
                    self._from_keeper(frame)

            clock.call_later(LOCAL_SECONDS, arrive)

        keeper.send = hear
        listing = keeper.listing()

        def listed() -> None:
            if self._agent_epoch == epoch and self.keeper is keeper:
                outputs = agent.keeper_connected(clock.now, keeper.keeper, 1, listing)
                self.carry_out(outputs)

        # Replies and events travel in order: the list first, then what is unacknowledged.
        clock.call_later(LOCAL_SECONDS, listed)
        keeper.resend()

    def _from_keeper(self, frame: dict[str, Any]) -> None:
        assert self.agent is not None
        now = self.cluster.clock.now
        if frame["type"] == "event":
            self.carry_out(self.agent.keeper_event(now, frame["number"], frame["event"]))
        else:
            self.carry_out(self.agent.keeper_reply(now, frame["id"], frame))

    def crash_agent(self) -> None:
        """kill -9 of the agent."""
        if self.agent is None:
            return
        self.agent = None
        self._agent_epoch += 1
        self.keeper.send = None
        self.disconnect()
        self.cluster.clock.call_later(self.cluster.draw(0.05, 1.0), self.start_agent)

    def crash_keeper(self) -> None:
        """kill -9 of the keeper: its processes end, a new one is started."""
        if not self.keeper.is_alive:
            return
        self.cluster.dead_keepers.add(self.keeper.keeper)
        self.keeper.crash()
        self.cluster.clock.call_later(self.cluster.draw(0.05, 0.5), self._replace_keeper)

    def _replace_keeper(self) -> None:
        self.keeper = self._new_keeper()
        self._meet_keeper()

    # --- links --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Reach the controller, or try again later."""
        cluster = self.cluster
        if self.agent is None or self.is_linked:
            return
        if cluster.coordinator is None or self.name in cluster.network.cut:
            epoch = self._agent_epoch
            cluster.clock.call_later(
                cluster.draw(0.1, 0.3),
                lambda: self.connect() if epoch == self._agent_epoch else None,
            )
            return
        self.is_linked = True
        cluster.network.connect(self.name)
        self.carry_out(self.agent.controller_connected(cluster.clock.now))

    def disconnect(self) -> None:
        """The link breaks; both sides notice."""
        if not self.is_linked:
            return
        self.is_linked = False
        cluster = self.cluster
        cluster.network.close(self.name)
        if cluster.coordinator is not None:
            cluster.coordinator.disconnected(cluster.clock.now, self.name)
        if self.agent is not None:
            self.agent.controller_disconnected(cluster.clock.now)
            self.connect()

    def from_controller(self, message: Any) -> None:
        """A message arrives from the controller."""
        if self.agent is not None and self.is_linked:
            self.carry_out(self.agent.receive(self.cluster.clock.now, message))

    def carry_out(self, outputs: HostOutputs) -> None:
        """Do what the agent decided."""
        cluster, clock, epoch = self.cluster, self.cluster.clock, self._agent_epoch
        keeper = self.keeper
        for frame in outputs.to_keeper:

            def deliver(frame: dict[str, Any] = frame) -> None:
                if self._agent_epoch == epoch and self.keeper is keeper and keeper.is_alive:
                    keeper.receive(frame)

            clock.call_later(LOCAL_SECONDS, deliver)
        if self.is_linked:
            for message in outputs.to_controller:
                cluster.network.send(self.name, message, lambda m: cluster.from_host(self.name, m))
        for attempt, _probe, _launch in outputs.probes:
            clock.call_later(cluster.draw(0.05, 0.5), lambda a=attempt: self._probe(a, epoch))  # type: ignore[misc]
        self._set_timer()

    def _probe(self, attempt: str, epoch: int) -> None:
        if self.agent is not None and self._agent_epoch == epoch:
            ok = self.cluster.random.random() < 0.95
            self.carry_out(self.agent.probed(self.cluster.clock.now, attempt, ok, "no answer"))

    def _set_timer(self) -> None:
        if self.agent is None:
            return
        at = self.agent.deadline()
        if at is None or (self._timer is not None and self._timer <= at):
            return
        self._timer = at
        epoch = self._agent_epoch

        def tick() -> None:
            if self._agent_epoch == epoch and self.agent is not None and self._timer == at:
                self._timer = None
                self.carry_out(self.agent.tick(self.cluster.clock.now))

        self.cluster.clock.call_at(at, tick)


class SimulatedCluster:
    """Hosts, a controller with its log, and the network between them."""

    def __init__(
        self,
        seed: int,
        *,
        num_hosts: int,
        weather: Weather | None = None,
        lives: Lives | None = None,
    ) -> None:
        self.seed = seed
        self.lives: Lives = lives or {}
        self.random = Random(seed)
        self.clock = VirtualClock()
        self.invariants = Invariants()
        self.network = SimulatedNetwork(self.clock, self.random, weather or Weather())
        self.keep_ended = KEPT_IN_SOME if seed % 2 else KEEP_ENDED
        self.log = EventRows()
        self.digest = hashlib.sha256()
        self.dead_keepers: set[str] = set()
        self.num_faults = 0
        self.num_restarts = 0
        self.num_resizes = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._pending: list[tuple[list[Event], Outputs, Callable[[], None] | None]] = []
        self._timer: float | None = None
        self._epoch = 0
        self.coordinator: Coordinator | None = None
        self.hosts = {f"h{i:03}": SimulatedHost(self, f"h{i:03}") for i in range(num_hosts)}
        self.start_controller()
        for host in self.hosts.values():
            host.start_agent()

    def draw(self, low: float, high: float) -> float:
        """A number between the two, from the seed."""
        return low + (high - low) * self.random.random()

    # --- controller ---------------------------------------------------------------------------------------------

    def start_controller(self) -> None:
        """A fresh controller that reads the log."""
        if self.coordinator is not None:
            return
        self._epoch += 1
        self._timer = None
        self.coordinator = self._read_log()
        self._set_timer()

    def _read_log(self) -> Coordinator:
        coordinator = Coordinator(
            runs_directory="/runs",
            seed=str(self.seed),
            keep_ended=self.keep_ended,
            gaps_below=self.log.mark,
        )
        coordinator.most_in_message = 2 + self.seed % 5  # pages get lost and overtake each other
        for event in self.log.replay():
            coordinator.replay(event)
        if coordinator.unreadable:
            raise InvariantError(f"a replay cannot read {coordinator.unreadable}")
        return coordinator

    def crash_controller(self) -> None:
        """kill -9 of the controller: what is not durable is lost, save perhaps a part of the last commit."""
        if self.coordinator is None:
            return
        self.coordinator = None
        self._epoch += 1
        self.num_restarts += 1
        pending, self._pending = self._pending, []
        if pending:
            events = [event for batch in pending for event in batch[0]]
            for event in events[: self.random.randrange(len(events) + 1)]:
                self._make_durable(event)
        for host in self.hosts.values():
            if host.is_linked:
                host.is_linked = False
                self.network.close(host.name)
                if host.agent is not None:
                    host.agent.controller_disconnected(self.clock.now)
                    self.clock.call_later(self.draw(0.05, 0.3), host.connect)
        self.clock.call_later(self.draw(0.1, 0.6), self.start_controller)

    def from_host(self, host: str, message: Any) -> None:
        """A message arrives at the controller."""
        if self.coordinator is not None:
            self.carry_out(self.coordinator.receive(self.clock.now, host, message))

    def carry_out(self, outputs: Outputs, then: Callable[[], None] | None = None) -> None:
        """Make the events durable after a moment, then send the messages."""
        for event in outputs.events:
            # Stacks of a suspect's gang are taken, sometimes too late or never.
            if isinstance(event.fact, AttemptSuspected) and self.random.random() < 0.8:
                name = event.fact.attempt
                self.clock.call_later(self.draw(0.05, 1.5), lambda a=name: self._evidence(a))  # type: ignore[misc]
        if outputs.events or outputs.messages or then:
            self._pending.append((outputs.events, outputs, then))
            if len(self._pending) == 1:
                epoch = self._epoch
                seconds = COMMIT_SECONDS if outputs.events else 0.0
                self.clock.call_later(
                    seconds, lambda: self._commit() if self._epoch == epoch else None
                )
        self._set_timer()

    def _commit(self) -> None:
        pending, self._pending = self._pending, []
        for events, outputs, then in pending:
            for event in events:
                self._make_durable(event)
            for host, message in outputs.messages:
                if self.hosts[host].is_linked:
                    self.network.send(host, message, self.hosts[host].from_controller)
            if then is not None:
                then()

    def _make_durable(self, event: Event) -> None:
        self.log.append(event)
        if self.log.doomed and event.seq % 4 == 0:
            self.log.delete_some(self.random.randrange(40))
        self.digest.update(self._encode(event))
        self.invariants.durable(event)

    def _set_timer(self) -> None:
        if self.coordinator is None:
            return
        at = self.coordinator.deadline()
        if at is None or (self._timer is not None and self._timer <= at):
            return
        self._timer = at
        epoch = self._epoch

        def tick() -> None:
            if self._epoch == epoch and self.coordinator is not None and self._timer == at:
                self._timer = None
                self.carry_out(self.coordinator.tick(self.clock.now))

        self.clock.call_at(at, tick)

    def _evidence(self, attempt: str) -> None:
        if self.coordinator is not None:
            now = self.clock.now
            self.carry_out(self.coordinator.keep_evidence(now, attempt, path="stacks", error=""))

    # --- clients ------------------------------------------------------------------------------------------------

    def submit(self, number: int) -> None:
        """Some client submits a random run."""
        if self.coordinator is not None:
            spec = random_run(self.random, number)
            submission = Submission(spec=spec, python="/usr/bin/python3")
            _runs, outputs = self.coordinator.submit(
                self.clock.now, submission, env_blob="blob", secret_blobs={}
            )
            self.carry_out(outputs)

    def stop_some(self) -> None:
        """Some client stops a run, a role or a process, gently or not."""
        if self.coordinator is None:
            return
        alive = [s for s in self.coordinator.runs.values() if s.ended is None]
        if not alive:
            return
        supervisor = self.random.choice(alive)
        role = index = None
        if self.random.random() < 0.4:
            role = self.random.choice(list(supervisor.roles))
            if self.random.random() < 0.5:
                index = self.random.randrange(len(supervisor.roles[role].processes))
        hard = self.random.random() < 0.3
        _command, outputs = self.coordinator.stop(
            self.clock.now, supervisor.run, hard=hard, reason="", role=role, index=index
        )
        self.carry_out(outputs)

    def resize_some(self) -> None:
        """Some client gives a gang another size, perhaps twice in a row."""
        coordinator = self.coordinator
        gangs = [
            (supervisor, role)
            for supervisor in (coordinator.runs.values() if coordinator is not None else ())
            for role in supervisor.order
            if supervisor.ended is None and role.spec.gang
        ]
        if not gangs or coordinator is None:
            return
        supervisor, role = self.random.choice(gangs)
        for _ in range(self.random.choice([1, 1, 2])):
            size = self.random.randint(1, 10)
            may_restart = self.random.random() < 0.3
            try:
                _command, outputs = coordinator.scale(
                    self.clock.now, supervisor.run, size, role=role.name, may_restart=may_restart
                )
            except (ConfigError, NotFoundError):
                continue  # refused, and nothing has changed
            self.num_resizes += 1
            self.carry_out(outputs)

    def break_some(self) -> None:
        """Some client has ranks of a gang break themselves."""
        coordinator = self.coordinator
        alive = [s for s in coordinator.runs.values() if s.ended is None] if coordinator else []
        if not alive or coordinator is None:
            return
        supervisor = self.random.choice(alive)
        seed = self.random.randrange(1 << 30)
        orders: list[FaultOrder] = draw_faults(seed, 2, 4, (1, 50), (*DRAWN, "raise"))
        try:
            _faults, outputs = coordinator.inject(self.clock.now, supervisor.run, orders)
        except (ConfigError, NotFoundError):
            return
        self.carry_out(outputs)

    def stop_all(self) -> None:
        """Stop every run that is left."""
        if self.coordinator is None:
            self.clock.call_later(0.5, self.stop_all)
            return
        _asked, outputs = self.coordinator.stop_runs(
            self.clock.now, None, hard=False, reason="the end"
        )
        self.carry_out(outputs)

    # --- faults -------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        """Something breaks."""
        self.num_faults += 1
        host = self.random.choice(list(self.hosts.values()))
        busy = [h for h in self.hosts.values() if h.keeper.processes]
        if busy and self.random.random() < 0.8:
            host = self.random.choice(busy)
        kind = self.random.random()
        if kind < 0.1:
            self.invariants.tell(f"fault: the controller crashes at {self.clock.now:.3f}")
            self.crash_controller()
        elif kind < 0.35:
            self.invariants.tell(f"fault: the agent of {host.name} crashes")
            host.crash_agent()
        elif kind < 0.5:
            self.invariants.tell(f"fault: the keeper of {host.name} crashes")
            host.crash_keeper()
        elif kind < 0.7:
            self._partition(host)
        else:
            self._kill(host)

    def _partition(self, host: SimulatedHost) -> None:
        seconds = self.draw(0.2, 3.0)
        self.invariants.tell(f"fault: {host.name} is cut off for {seconds:.2f} s")
        self.network.cut.add(host.name)

        def mend() -> None:
            self.network.cut.discard(host.name)
            host.disconnect()

        self.clock.call_later(seconds, mend)

    def _kill(self, host: SimulatedHost) -> None:
        if host.keeper.processes:
            name = self.random.choice(list(host.keeper.processes))
            self.invariants.tell(f"fault: {name} is killed from outside")
            host.keeper.end(name, signal=9)

    # --- the end ------------------------------------------------------------------------------------------------

    def is_at_rest(self) -> bool:
        """All runs have ended and every host has nothing more to say."""
        if self.coordinator is None or self._pending:
            return False
        if any(s.ended is None for s in self.coordinator.runs.values()):
            return False
        if self.coordinator.pending or len(self.coordinator.queue):
            return False
        return all(
            host.agent is not None
            and host.is_linked
            and host.keeper.is_alive
            and not host.keeper.unacknowledged
            for host in self.hosts.values()
        )

    def check_replay(self) -> None:
        """A controller that reads the log arrives at the same state as the one that wrote it."""
        assert self.coordinator is not None
        again = self._read_log()
        if again.runs.keys() != self.coordinator.runs.keys():
            raise InvariantError("other runs are known after a replay")
        before, after = self.coordinator.memory(), again.memory()
        self.invariants.taken(after.cursors)
        if msgspec.structs.replace(before, cursors=after.cursors) != after:
            raise InvariantError(f"after a replay {before} has become {after}")
        for run, supervisor in self.coordinator.runs.items():
            if _state(supervisor) != _state(again.runs[run]):
                raise InvariantError(f"run {run} is another one after a replay")
        if again.placement.hosts != self.coordinator.placement.hosts:
            raise InvariantError("the hosts are other ones after a replay")
        used = [c for c in again.placement.hosts.values() if c.processes or abs(c.used_cpus) > 1e-6]
        if used:
            raise InvariantError(f"{used} are in use and nothing runs")


def _state(supervisor: Any) -> Any:
    return (
        supervisor.roles,
        supervisor.attempts,
        supervisor.ports,
        supervisor.stop,
        supervisor.ended,
    )


def simulate(
    seed: int, *, num_hosts: int = 200, num_runs: int = 70, num_faults: int = 30
) -> dict[str, Any]:
    """One whole story; raises InvariantError, else returns its numbers and the hash of its history."""
    cluster = SimulatedCluster(seed, num_hosts=num_hosts)
    clock, begin = cluster.clock, cluster.clock.now
    for number in range(num_runs):
        clock.call_at(begin + cluster.draw(0.0, 12.0), lambda n=number: cluster.submit(n))  # type: ignore[misc]
    for _ in range(num_runs // 8):
        clock.call_at(begin + cluster.draw(1.0, 15.0), cluster.stop_some)
    for _ in range(num_runs // 2):
        clock.call_at(begin + cluster.draw(0.5, 15.0), cluster.resize_some)
    for _ in range(num_runs // 6):
        clock.call_at(begin + cluster.draw(0.5, 15.0), cluster.break_some)
    for _ in range(num_faults):
        clock.call_at(begin + cluster.draw(0.5, 15.0), cluster.fault)
    clock.run_until(begin + 20.0)
    cluster.network.weather = Weather(loss=0.0, doubling=0.0)
    cluster.stop_all()
    for _ in range(240):
        clock.run_until(clock.now + 0.5)
        if cluster.is_at_rest():
            break
    else:
        raise InvariantError("the cluster never came to rest", story=_unrest(cluster))
    cluster.invariants.at_rest(cluster.dead_keepers)
    cluster.check_replay()
    return {
        "seed": seed,
        "num_events": clock.num_events,
        "num_facts": cluster.log.num_appended,
        "num_deleted": cluster.log.num_deleted,
        "num_faults": cluster.num_faults,
        "num_resizes": cluster.num_resizes,
        "num_controller_restarts": cluster.num_restarts,
        "num_checks": cluster.invariants.num_checks,
        "num_messages": cluster.network.num_sent,
        "num_runs": cluster.coordinator.retention.num_submitted if cluster.coordinator else 0,
        "digest": cluster.digest.hexdigest(),
    }


def _unrest(cluster: SimulatedCluster) -> list[str]:
    lines = list(cluster.invariants.story)[-20:]
    if cluster.coordinator is None:
        return [*lines, "the controller is down"]
    for supervisor in cluster.coordinator.runs.values():
        if supervisor.ended is None:
            alive = [a for role in supervisor.order for a in role.alive()]
            lines.append(f"{supervisor.run} {supervisor.stop} {supervisor.waits} {alive[:3]}")
    for host in cluster.hosts.values():
        if host.keeper.unacknowledged or not host.is_linked or host.agent is None:
            lines.append(f"{host.name} linked={host.is_linked} {host.keeper.unacknowledged}")
    lines.append(f"pending {cluster.coordinator.pending}")
    return lines[-60:]
