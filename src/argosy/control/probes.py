"""Probes: is a process ready? By a port that accepts, an HTTP answer, a file that exists, or a command that exits 0.

The agent starts one task per probe and cancels it when the attempt ends. A probe tells its answer once: ready, or not in time and why.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from argosy.errors import ClusterError
from argosy.protocol.messages import Launch

Check = Callable[[], Awaitable[str]]
"""Empty when ready, else why not."""
RunCommand = Callable[[Launch, list[str]], Awaitable[dict[str, Any]]]
"""Runs a command beside a process; how it exited."""
_ATTEMPT_SECONDS = 5.0
_CLOCK_SECONDS = 0.01
"""By so much the kernel's stamps on files may be behind the time at which a process began."""
_MOST_HEADER_BYTES = 16 << 10


class Probes:
    """All running probes, by attempt."""

    def __init__(
        self, on_answer: Callable[[str, bool, str], None], run_command: RunCommand
    ) -> None:
        self._on_answer = on_answer
        self._run_command = run_command
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(
        self, attempt: str, probe: dict[str, Any], launch: Launch, *, began: float = 0.0
    ) -> None:
        """Start to ask a process that began at this time."""
        self.cancel(attempt)
        check = make_check(probe, launch, self._run_command, began)
        self._tasks[attempt] = asyncio.create_task(self._ask(attempt, probe, check))

    def cancel(self, attempt: str) -> None:
        """The attempt has ended: stop asking."""
        task = self._tasks.pop(attempt, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Stop all."""
        for attempt in list(self._tasks):
            self.cancel(attempt)

    async def _ask(self, attempt: str, probe: dict[str, Any], check: Check) -> None:
        every = float(probe.get("every_seconds", 0.2))
        patience = float(probe.get("timeout_seconds", 60.0))
        why = silence = _describe_silence(probe)
        try:
            async with asyncio.timeout(patience):
                while why := await check():
                    await asyncio.sleep(every)
                    why = silence
        except TimeoutError:
            self._tasks.pop(attempt, None)
            self._on_answer(attempt, False, f"not ready after {patience:g} s: {why}")
            return
        self._tasks.pop(attempt, None)
        self._on_answer(attempt, True, "")


def _describe_silence(probe: dict[str, Any]) -> str:
    """What it means when the time is over before the last question was answered."""
    if probe.get("command"):
        return f"{probe['command'][0]} has not ended"
    return f"{probe.get('http') or probe.get('port') or probe.get('file')} has not answered"


def make_check(
    probe: dict[str, Any], launch: Launch, run_command: RunCommand, began: float
) -> Check:
    """The question of this probe."""
    if probe.get("port"):
        port = launch.ports.get(str(probe["port"]), 0)
        return lambda: _check_port(port)
    if probe.get("http"):
        name, _, path = str(probe["http"]).partition("/")
        return lambda: _check_http(launch.ports.get(name, 0), "/" + path)
    if probe.get("file"):
        path = os.path.join(launch.cwd, str(probe["file"]))
        return _FileCheck(path, began).ask
    argv = [str(word) for word in probe.get("command") or ["false"]]
    return lambda: _check_command(run_command, launch, argv)


async def _check_port(port: int) -> str:
    try:
        async with asyncio.timeout(_ATTEMPT_SECONDS):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
    except (OSError, TimeoutError) as error:
        return f"port {port}: {str(error) or 'no answer'}"
    return ""


async def _check_http(port: int, path: str) -> str:
    writer = None
    try:
        async with asyncio.timeout(_ATTEMPT_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            line = (await reader.readline())[:_MOST_HEADER_BYTES]
    except (OSError, TimeoutError, ValueError) as error:
        return f"http port {port}: {str(error) or 'no answer'}"
    finally:
        if writer is not None:
            writer.close()
    words = line.decode("latin-1").split(None, 2)
    if len(words) >= 2 and words[0].startswith("HTTP/") and words[1].startswith("2"):
        return ""
    return f"http port {port}{path}: answered {line.decode('latin-1').strip()[:80]!r}"


class _FileCheck:
    """A file that this process has made: one that an earlier start has left does not count until it is made anew."""

    def __init__(self, path: str, began: float) -> None:
        self._path = path
        self._began = began - _CLOCK_SECONDS
        self._left_over: tuple[int, int] | None = None
        self._was_asked = False

    async def ask(self) -> str:
        try:
            status = os.stat(self._path)
        except OSError:
            self._was_asked = True
            return f"there is no file {self._path}"
        # The time of its last change as the kernel has seen it: programs can set the other one.
        stamp = (status.st_ino, status.st_ctime_ns)
        if not self._was_asked and status.st_ctime < self._began:
            self._left_over = stamp
        self._was_asked = True
        if stamp == self._left_over:
            return f"{self._path} is older than the process"
        return ""


async def _check_command(run: RunCommand, launch: Launch, argv: list[str]) -> str:
    try:
        end = await run(launch, argv)
    except ClusterError as error:
        return f"{argv[0]}: {error.what}"
    if end.get("code") == 0:
        return ""
    if end.get("signal") is not None:
        return f"{argv[0]} was ended by signal {end['signal']}"
    return str(end.get("error") or f"{argv[0]} exited with {end.get('code')}")
