"""ScriptedHost: one host played by hand against a real Coordinator, for tests that tell a story step by step.

It keeps what the controller wants of it, reports what the test says happened, and lets time pass. Names of attempts are
given without the run: `train.0.1` is the second attempt of process 0 of role train.
"""

from __future__ import annotations

from typing import Any

from argosy.config.spec import RoleSpec, RunSpec, Submission
from argosy.control.coordinator import Coordinator, Outputs
from argosy.control.retention import KEEP_ENDED
from argosy.protocol.facts import Event
from argosy.protocol.messages import PROTOCOL_VERSION, Hello, Observed, Report, Reserve, Want, Wants
from argosy.testing.eventrows import EventRows


class ScriptedHost:
    """A coordinator, one host, and the log."""

    def __init__(self, *, cpus: int = 4, host: str = "h", keep_ended: int = KEEP_ENDED) -> None:
        self.now = 1000.0
        self.host = host
        self.cpus = cpus
        self.keeper = "k1"
        self.run = ""
        self.log: list[Event] = []
        self.rows = EventRows()
        """What is left of the log when the events of forgotten runs are deleted."""
        self._keep_ended = keep_ended
        self.wants: dict[str, Want] = {}
        self.reserves: dict[str, Reserve] = {}
        self.started: set[str] = set()
        self.exited: set[str] = set()
        self.num_messages = 0
        self._number = 0
        self._version = 0
        self.coordinator = self.replayed()
        self.hello()

    def take(self, outputs: Outputs) -> Outputs:
        """Make the events durable and read the messages."""
        self.log += outputs.events
        for event in outputs.events:
            self.rows.append(event)
        for _host, message in outputs.messages:
            self.num_messages += 1
            if isinstance(message, Wants) and message.keeper == self.keeper:
                for want in message.wants:
                    self.wants[want.attempt] = want
                for reserve in message.reserves:
                    self.reserves[reserve.run] = reserve
                self._version = message.version
        return outputs

    def cut_log(self, length: int) -> None:
        """Only the first events became durable."""
        self.log, self.rows = self.log[:length], EventRows()
        for event in self.log:
            self.rows.append(event)

    def hello(self, *, alive: list[str] | None = None) -> None:
        """Say hello, as after a reconnect."""
        message = Hello(
            version=PROTOCOL_VERSION,
            host=self.host,
            keeper=self.keeper,
            pid=1,
            cpus=self.cpus,
            memory_bytes=8 << 30,
            alive=sorted(self.started - self.exited) if alive is None else alive,
        )
        self.take(self.coordinator.receive(self.now, self.host, message))

    def replace_keeper(self) -> None:
        """The keeper died with all its processes; a new one says hello."""
        self.keeper = f"k{int(self.keeper[1:]) + 1}"
        self._number = 0
        self.wants.clear()
        self.exited |= self.started
        self.hello()

    def restart_controller(self) -> None:
        """A new controller reads the log; the host reconnects."""
        self.coordinator = self.replayed()
        self.hello()

    def replayed(self) -> Coordinator:
        """A coordinator that has read what is left of the log."""
        coordinator = Coordinator(
            runs_directory="/runs", keep_ended=self._keep_ended, gaps_below=self.rows.mark
        )
        for event in self.rows.replay():
            coordinator.replay(event)
        return coordinator

    def submit(self, roles: dict[str, RoleSpec], **run: Any) -> str:
        """Submit a run and remember it as the present one."""
        submission = Submission(spec=RunSpec(roles=roles, **run), python="/usr/bin/python3")
        runs, outputs = self.coordinator.submit(
            self.now, submission, env_blob="blob", secret_blobs={}
        )
        self.take(outputs)
        self.run = runs[0]
        return self.run

    def stop(self, role: str | None = None, index: int | None = None, *, hard: bool = False) -> str:
        """Stop the present run or a part of it."""
        command, outputs = self.coordinator.stop(
            self.now, self.run, hard=hard, reason="", role=role, index=index
        )
        self.take(outputs)
        return command

    def report(self, kind: Any, attempt: str = "", **data: Any) -> Outputs:
        """Report one observation of an attempt of the present run."""
        self._number += 1
        observed = Observed(
            number=self._number,
            kind=kind,
            attempt=f"{self.run}.{attempt}" if attempt else "",
            run=self.run,
            data=data,
        )
        message = Report(
            host=self.host, keeper=self.keeper, observed=[observed], wants_version=self._version
        )
        return self.take(self.coordinator.receive(self.now, self.host, message))

    def start(self, *attempts: str) -> None:
        """These were started; without names: all that are wanted and not started yet."""
        for name in attempts or self.waiting():
            self.started.add(f"{self.run}.{name}")
            self.report("started", name, pid=100, how="exec")

    def exit(
        self, attempt: str, *, code: int | None = None, signal: int | None = None, error: str = ""
    ) -> None:
        """An attempt ended, its tree swept, a moment after what was said before."""
        self.now += 0.001
        self.exited.add(f"{self.run}.{attempt}")
        self.report("exited", attempt, code=code, signal=signal, error=error, at=self.now)

    def advance(self, seconds: float) -> None:
        """Let time pass; whatever becomes due is done at its time."""
        until = self.now + seconds
        while (at := self.coordinator.deadline()) is not None and at <= until:
            self.now = max(self.now, at)
            self.report_version()
            self.take(self.coordinator.tick(self.now))
        self.now = until

    def report_version(self) -> None:
        """Confirm the wants received so far."""
        message = Report(host=self.host, keeper=self.keeper, wants_version=self._version)
        self.take(self.coordinator.receive(self.now, self.host, message))

    def wanted(self, state: str = "running") -> list[str]:
        """Attempts of the present run that should be in this state, without the run."""
        prefix = f"{self.run}."
        return [
            name.removeprefix(prefix)
            for name, want in self.wants.items()
            if want.state == state and name.startswith(prefix) and name not in self.exited
        ]

    def waiting(self) -> list[str]:
        """Attempts that should be started and are not."""
        return [name for name in self.wanted() if f"{self.run}.{name}" not in self.started]

    def want(self, attempt: str) -> Want:
        """What the controller wants of an attempt."""
        return self.wants[f"{self.run}.{attempt}"]

    def facts(self, kind: type) -> list[Any]:
        """All facts of a class so far."""
        return [event.fact for event in self.log if isinstance(event.fact, kind)]

    @property
    def ended(self) -> Any:
        """How the present run ended, or None."""
        return self.coordinator.runs[self.run].ended
