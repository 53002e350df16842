"""Follow: a run in the foreground, from its submission to its end.

Called by `argosy run` and `argosy attach`. Prints output as it comes and a few short lines of its own to stderr; turns Ctrl-C
into a graceful stop and a second one into a kill; reconnects when the controller is restarted, going on where it was.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from argosy.analyze.story import Story
from argosy.cli.output import Output
from argosy.cli.paint import Paint
from argosy.cli.progress import Progress
from argosy.errors import ClusterError
from argosy.protocol.httpclient import Client, EventStream, ServerEvent

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

RECONNECT_SECONDS = 20.0
DETACHED = 130
HOLD_SECONDS = 0.3
"""A death, and the generation that follows it, are told after this time: the last words of the dead come first."""


class Interrupts:
    """Counts Ctrl-C without ever interrupting a write; `fileno` is readable when there was one."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # In this order: one that comes between the two counts twice rather than not at all.
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGINT, lambda *_: None)

    def fileno(self) -> int:
        """For select."""
        return self._read_end

    def take(self) -> int:
        """How many since the last call."""
        try:
            return os.read(self._read_end, 64).count(signal.SIGINT)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Ctrl-C is as it was before."""
        signal.set_wakeup_fd(self._wakeup_before)
        signal.signal(signal.SIGINT, self._before)
        os.close(self._read_end)
        os.close(self._write_end)


class Follower:
    """One run in the foreground."""

    def __init__(self, client: Client, view: dict[str, Any], output: Output) -> None:
        self._client = client
        self._run: str = view["run"]
        self._output = output
        self._story = Story()
        self._held: list[tuple[str, bool]] = []
        self._held_until = 0.0
        self._newest_number = self._held_number = 0
        self._progress = Progress()
        self._paint = Paint(sys.stderr)
        self._interrupts = Interrupts()
        self._num_interrupts = 0
        self._last_id = ""
        self._last_seq = 0
        self._ends: dict[tuple[Any, ...], int] = {}
        self._ends_before: dict[tuple[Any, ...], int] = {}
        self._is_settled = False
        self._look_at = time.monotonic() + 1.0
        self._end: dict[str, Any] | None = None
        self.is_detached = False

    def follow(self, *, tied: bool = False) -> dict[str, Any] | None:
        """Until the end; the run's last view. None when the person gave up waiting (three times Ctrl-C)."""
        lines = int(self._output.wants_lines)
        target = f"/v1/runs/{self._run}/stream?tied={int(tied)}&lines={lines}"
        self._progress.begin("starting")
        try:
            while self._end is None and not self.is_detached:
                # The stream gives its place only now and then: what was seen beyond it comes again.
                self._ends_before = dict(self._ends)
                with self._connect(target) as stream:
                    self._pump(stream)
        finally:
            self._progress.end()
            self._interrupts.close()
        self._output.finish()
        return self._end

    def _connect(self, target: str) -> EventStream:
        """Open the stream; while the controller is being restarted, wait for it."""
        deadline = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                return self._client.stream(target, last_id=self._last_id)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"lost the controller while following run {self._run} ({error})",
                        fix=f"the run may still be going: argosy status, then argosy logs -f {self._run}",
                    )
                self._progress.begin("waiting for the controller to come back")
                self._progress.show()
                time.sleep(0.05)

    def _pump(self, stream: EventStream) -> None:
        while self._end is None and not self.is_detached and not stream.is_closed:
            events, readable = stream.wait(self._patience(), self._interrupts.fileno())
            for event in events:
                self._take(event)
                self._last_id = event.id or self._last_id
            if readable:
                self._interrupted(self._interrupts.take())
            self._flush()
            if self._held and time.time() >= self._held_until:
                self._say_held()
            if not events:
                self._look()
                self._progress.show()

    def _patience(self) -> float:
        """How long the stream may be silent before something of ours is due."""
        due = self._output.deadline()
        patience = 0.25 if not self._is_settled else 3600.0
        if self._held:
            patience = min(patience, HOLD_SECONDS)
        return patience if due is None else max(0.0, min(patience, due - time.time()))

    def _take(self, event: ServerEvent) -> None:
        if event.kind == "line":
            self._hear()
            self._line(event.json())
        elif event.kind == "output":
            self._flush()
        elif event.kind == "fact":
            self._fact(event.json())
        elif event.kind == "end":
            # The end tells the cause and its collateral better than the deaths one by one.
            while self._held and not self._held[-1][1]:
                self._held.pop()
            self._say_held()
            self._end = event.json()

    def _flush(self) -> None:
        if self._output.has_news():
            self._hear()
        self._output.flush(time.time())

    def _hear(self) -> None:
        """The run says something: it is not waiting for anything."""
        self._is_settled = self._num_interrupts == 0
        self._progress.end()

    def _line(self, line: dict[str, Any]) -> None:
        file = (line["role"], line["index"], line["number"], line["stream"])
        end = int(line.get("end", 0))
        if end and end <= self._ends_before.get(file, 0):
            return
        self._ends[file] = end
        if self._held and line["number"] > self._held_number:
            self._output.flush(time.time() + HOLD_SECONDS)
            self._say_held()
        self._output.line(line)

    def _fact(self, event: dict[str, Any]) -> None:
        if event["seq"] <= self._last_seq:
            return
        self._last_seq = event["seq"]
        fact = event["fact"]
        if fact["kind"] == "attempt.planned":
            if not self._output.wants_lines:
                # All that the one before had to say is in its files, and nothing of this one's yet.
                self._flush()
                self._say_held()
                self._is_settled = False
            self._output.note_file(fact["role"], fact["index"], fact["number"])
            self._newest_number = max(self._newest_number, fact["number"])
        headline = self._story.headline(event)
        if fact["kind"] in ("attempt.started", "attempt.ready") and not self._num_interrupts:
            self._is_settled = True
            self._progress.end()
        elif fact["kind"] in ("attempt.exited", "gang.formed"):
            if not self._output.wants_lines:
                self._flush()  # its last words: what follows is waited for
            self._is_settled = False
            self._look_at = time.monotonic() + 1.0
        is_formed = fact["kind"] == "gang.formed"
        if headline and (fact["kind"] == "attempt.exited" or (is_formed and self._held)):
            if not self._held:
                self._held_number = self._newest_number
            self._held.append((headline, is_formed))
            self._held_until = time.time() + HOLD_SECONDS
        elif headline:
            self._say_held()
            self._say(headline)

    def _say_held(self) -> None:
        held, self._held = self._held, []
        for headline, _ in held:
            self._say(headline)

    def _look(self) -> None:
        """Ask what it waits for, once a second while nothing moves."""
        if self._is_settled or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + 1.0
        try:
            self._client.on_silence()
            view = self._client.get(f"/v1/runs/{self._run}")
        except ClusterError as error:
            self._progress.begin(f"{error.what} (fix: {error.fix})")
            return
        except OSError:
            return
        self._progress.begin(describe_wait(view), describe_save(view))

    def _interrupted(self, count: int) -> None:
        for _ in range(count):
            self._num_interrupts += 1
            self._is_settled = False
            if self._num_interrupts > 2:
                self._say(f"left run {self._run} to itself; look with `argosy ps {self._run}`")
                self.is_detached = True
                return
            hard = self._num_interrupts == 2
            again = "Ctrl-C again kills it, and saves nothing"
            self._say("killing the run" if hard else f"stopping the run ({again})")
            self._ask_to_stop(hard)

    def _ask_to_stop(self, hard: bool) -> None:
        body = {"hard": hard, "reason": f"Ctrl-C{' twice' if hard else ''}"}
        try:
            self._client.post(f"/v1/runs/{self._run}/stop", body)
        except OSError:
            self._say("the controller does not answer at the moment; press Ctrl-C again")
            self._num_interrupts -= 1

    def _say(self, text: str) -> None:
        self._progress.clear()
        sys.stdout.flush()
        sys.stderr.write(f"{self._paint('argosy:', 'dim')} {text}\n")
        sys.stderr.flush()


def describe_save(view: dict[str, Any]) -> str:
    """How far the save of a run that is being stopped is, while one goes on."""
    if view["state"] != "stopping":
        return ""
    processes = [p for role in view["roles"] for p in role["processes"] if p.get("pid")]
    return next((p["waiting"] for p in processes if p["waiting"].startswith("saves step")), "")


def describe_wait(view: dict[str, Any]) -> str:
    """What a run that does nothing visible is waiting for; nothing when it runs."""
    if view["state"] == "stopping":
        left = sum(
            1
            for r in view["roles"]
            for p in r["processes"]
            if p.get("pid") and p["state"] != "exited"
        )
        return f"stopping, {left} process{'es' if left != 1 else ''} left"
    if view.get("waiting"):
        return str(view["waiting"])
    for role in view["roles"]:
        for process in role["processes"]:
            if process["state"] in ("waiting", "planned", "starting"):
                name = f"starting {process['role']}/{process['index']}"
                return str(process.get("waiting") or name)
    return "waiting in the queue" if view["state"] == "queued" else ""
