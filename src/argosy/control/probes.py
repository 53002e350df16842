"""Probes: is a process ready? By a port that accepts, an HTTP answer, a file that exists, or a command that exits 0.

The agent starts one task per probe and cancels it when the attempt ends. A probe tells its answer once: ready, or not in time and why.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from argosy.control.keeper.kernel import set_death_signal
from argosy.protocol.messages import Launch

Check = Callable[[], Awaitable[str]]
"""Empty when ready, else why not."""
_ATTEMPT_SECONDS = 5.0
_MOST_HEADER_BYTES = 16 << 10


class Probes:
    """All running probes, by attempt."""

    def __init__(self, on_answer: Callable[[str, bool, str], None]) -> None:
        self._on_answer = on_answer
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(
        self, attempt: str, probe: dict[str, Any], launch: Launch, environment: dict[str, str]
    ) -> None:
        """Start to ask; `environment` is the process's, for commands."""
        self.cancel(attempt)
        check = make_check(probe, launch, environment)
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
        why = "it was never asked"
        try:
            async with asyncio.timeout(patience):
                while why := await check():
                    await asyncio.sleep(every)
        except TimeoutError:
            self._tasks.pop(attempt, None)
            self._on_answer(attempt, False, f"not ready after {patience:g} s: {why}")
            return
        self._tasks.pop(attempt, None)
        self._on_answer(attempt, True, "")


def make_check(probe: dict[str, Any], launch: Launch, environment: dict[str, str]) -> Check:
    """The question of this probe."""
    if probe.get("port"):
        port = launch.ports.get(str(probe["port"]), 0)
        return lambda: _check_port(port)
    if probe.get("http"):
        name, _, path = str(probe["http"]).partition("/")
        return lambda: _check_http(launch.ports.get(name, 0), "/" + path)
    if probe.get("file"):
        path = os.path.join(launch.cwd, str(probe["file"]))
        return lambda: _check_file(path)
    argv = [str(word) for word in probe.get("command") or ["false"]]
    return lambda: _check_command(argv, launch.cwd, environment)


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


async def _check_file(path: str) -> str:
    return "" if os.path.exists(path) else f"there is no file {path}"


async def _check_command(argv: list[str], cwd: str, environment: dict[str, str]) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            # Killed with the agent: its successor asks anew, and nobody else would end it.
            preexec_fn=_die_with_agent,
        )
    except OSError as error:
        return f"{argv[0]}: {error}"
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        # The whole group: a shell's children must not outlive the question.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        raise
    return "" if code == 0 else f"{argv[0]} exited with {code}"


def _die_with_agent() -> None:
    set_death_signal(signal.SIGKILL)
