"""One run that the demo starts and watches: its facts from the controller, its steps from `metrics.jsonl`.

Submitted exactly as `argosy run` does it, tied to this process: if the demo vanishes, the run ends. Used by demo.py; prints nothing and
never imports torch.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.cli.app import find_verb
from argosy.cli.arguments import parse
from argosy.cli.program import read_program
from argosy.cli.run import leave_alone, submit_program
from argosy.cli.shield import Shield
from argosy.control.asking import ControllerClient
from argosy.control.home import Cluster
from argosy.errors import ClusterError

LOOK_SECONDS = 0.1
STOP_SECONDS = 30.0
_RECONNECT_SECONDS = 20.0


@dataclass
class Member:
    """One start of one rank."""

    rank: int
    generation: int
    pid: int = 0
    is_alive: bool = False
    signal: int | None = None
    ended_at: float = 0.0


class WatchedRun:
    """A run of a script, followed to its end."""

    def __init__(self, cluster: Cluster, words: list[str]) -> None:
        verb, rest = find_verb(["run", "--tied", *words])
        shield = Shield()
        handles = submit_program(read_program(parse(verb, rest)), cluster, shield)
        leave_alone(handles, shield)
        self.handle = handles[0]
        self.directory = Path(cluster.runs) / self.handle.run
        self.members: dict[str, Member] = {}
        """Every start of a rank, by attempt, in order."""
        self.generation = 0
        self.steps: list[dict[str, Any]] = []
        """Lines of metrics.jsonl: step, loss, tokens, seconds, time of the commit."""
        self.outcome = ""
        self._client = ControllerClient(cluster)
        self._seq = 0
        self._last_id = ""
        self._unread = b""
        self._position = 0

    def follow(self, look: Callable[[], None]) -> None:
        """Stay until the run has ended; `look` is called after every look at facts and steps."""
        broken_at = 0.0
        while not self.outcome:
            target = f"/v1/runs/{self.handle.run}/stream?tied=1"
            try:
                with self._client.stream(target, last_id=self._last_id) as stream:
                    broken_at = 0.0
                    while not stream.is_closed and not self.outcome:
                        for event in stream.wait(LOOK_SECONDS)[0]:
                            self._last_id = event.id or self._last_id
                            if event.kind == "fact":
                                self._note(event.json())
                        self.read_steps()
                        look()
            except OSError as error:
                # The controller may be on its way back.
                broken_at = broken_at or time.monotonic()
                if time.monotonic() - broken_at > _RECONNECT_SECONDS:
                    raise ClusterError(f"lost the controller ({error})", fix="see `argosy status`")
                time.sleep(0.05)

    def stop(self) -> None:
        """End it at once."""
        self.handle.stop(hard=True, reason="the demo was stopped")
        self.handle.wait(STOP_SECONDS)

    def living(self) -> list[Member]:
        """Ranks that run now."""
        return [member for member in self.members.values() if member.is_alive]

    def killed(self) -> list[Member]:
        """Ranks that a signal has ended."""
        return [member for member in self.members.values() if member.signal is not None]

    def median_seconds(self) -> float:
        """Of a step."""
        return float(statistics.median(step["seconds"] for step in self.steps))

    def tokens_per_second(self) -> float:
        """In the median step."""
        return float(statistics.median(step["tokens"] / step["seconds"] for step in self.steps))

    def result(self) -> dict[str, Any]:
        """What the program has left in its directory; empty when it did not come to that."""
        try:
            found: dict[str, Any] = json.loads((self.directory / "demo.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def _note(self, event: dict[str, Any]) -> None:
        if int(event["seq"]) <= self._seq:
            return  # told again after the controller came back
        self._seq = int(event["seq"])
        fact = event["fact"]
        kind, attempt = fact["kind"], fact.get("attempt", "")
        if kind == "gang.formed":
            self.generation = fact["generation"]
        elif kind == "attempt.planned" and fact.get("rank") is not None:
            self.members[attempt] = Member(fact["rank"], fact["generation"])
        elif kind == "attempt.started" and attempt in self.members:
            self.members[attempt].pid, self.members[attempt].is_alive = fact["pid"], True
        elif kind == "attempt.exited" and attempt in self.members:
            member = self.members[attempt]
            member.is_alive, member.signal = False, fact.get("signal")
            member.ended_at = fact.get("at") or event["at"]
        elif kind == "run.ended":
            self.outcome = fact["outcome"]
            self.read_steps()

    def read_steps(self) -> None:
        """Take over what was written since the last look, whole lines only."""
        try:
            descriptor = os.open(self.directory / "metrics.jsonl", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if os.fstat(descriptor).st_size < self._position:
                # Steps are made again: what was written of them was taken back.
                self.steps, self._unread, self._position = [], b"", 0
            while data := os.pread(descriptor, 1 << 16, self._position):
                self._position += len(data)
                *lines, self._unread = (self._unread + data).split(b"\n")
                self.steps += [json.loads(line) for line in lines if line]
        finally:
            os.close(descriptor)
