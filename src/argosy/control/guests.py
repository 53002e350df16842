"""Guests: commands beside a process, with its environment, directory, limits and containment, so that they end with it.

The agent's errand `exec` and its probes start them here, through the keeper, which is their parent as it is of everything else. It
decides nothing, and restarts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from argosy.control.keeperlink import KeeperLink
from argosy.control.launchenv import LaunchEnvironments
from argosy.errors import ClusterError
from argosy.protocol.messages import Launch

Data = dict[str, Any]
_EXEC, _PROBE = "exec-", "probe-"


class Guests:
    """Starts guests over the agent's link to its keeper, and waits for those whose end somebody wants to know."""

    def __init__(self, link: Callable[[], KeeperLink], environments: LaunchEnvironments) -> None:
        """`link` gives the present link, or raises ClusterError when there is none."""
        self._link = link
        self._environments = environments
        self._ends: dict[str, asyncio.Future[Data]] = {}

    async def start(self, launch: Launch, order: Data) -> None:
        """Start one, as `guest_order` describes it; ClusterError when the keeper refuses."""
        batch = {
            "run": launch.run,
            "role": launch.role,
            "generation": launch.generation,
            "zygote": None,
            "store": None,
            "attempts": [order],
        }
        frame = self._environments.complete({"type": "spawn", "batch": batch})
        await self._link().ask(frame, timeout_seconds=30)

    async def probe(self, launch: Launch, argv: Sequence[str]) -> Data:
        """Run a command whose output nobody reads; its `exited` event. Cancelled: its whole tree is killed."""
        attempt = f"{launch.attempt}.{_PROBE}{secrets.token_hex(4)}"
        end: asyncio.Future[Data]
        end = self._ends[attempt] = asyncio.get_running_loop().create_future()
        try:
            await self.start(launch, guest_order(launch, attempt, argv))
            return await end
        except asyncio.CancelledError:
            self._kill(attempt)
            raise
        finally:
            del self._ends[attempt]

    def seen(self, event: Data) -> None:
        """An event of the keeper."""
        end = self._ends.get(str(event.get("attempt")))
        if end is not None and event.get("event") == "exited" and not end.done():
            end.set_result(event)

    def listed(self, attempts: list[Data]) -> None:
        """What a keeper holds: probes whose answer nobody awaits any more, as their agent has died, are ended."""
        for entry in attempts:
            name = str(entry.get("attempt"))
            if is_probe(name) and name not in self._ends and entry.get("state") != "exited":
                self._kill(name)

    def _kill(self, attempt: str) -> None:
        # Without a link it is ended when there is one again.
        with contextlib.suppress(ClusterError):
            self._link().tell({"type": "kill", "attempt": attempt})


def exec_name(target: str) -> str:
    """A new id for a command beside that attempt."""
    return f"{target}.{_EXEC}{secrets.token_hex(4)}"


def is_exec(attempt: str) -> bool:
    """Whether an attempt's id is that of an exec'd command."""
    return _guest_part(attempt).startswith(_EXEC)


def is_probe(attempt: str) -> bool:
    """Whether an attempt's id is that of a probe's command."""
    return _guest_part(attempt).startswith(_PROBE)


def _guest_part(attempt: str) -> str:
    """What follows `RUN.ROLE.INDEX.NUMBER`; a role may be called as it likes."""
    return attempt.split(".", 4)[-1] if attempt.count(".") >= 4 else ""


def guest_order(
    launch: Launch,
    attempt: str,
    argv: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    output: tuple[str, str] = ("", ""),
    is_tty: bool = False,
) -> Data:
    """The keeper's order for a command beside a process; without files for `output` it is thrown away."""
    return {
        "attempt": attempt,
        "run": launch.run,
        "role": launch.role,
        "index": launch.index,
        "generation": launch.generation,
        "token": secrets.token_hex(16),
        "program": {"kind": "exec", "argv": list(argv)},
        "python": launch.python,
        "env_blob": launch.env_blob,
        "env": {**launch.env, **(env or {})},
        "cwd": launch.cwd,
        "umask": launch.umask,
        "limits": launch.limits,
        "affinity": launch.affinity,
        "stdout": output[0],
        "stderr": output[1],
        "tty": is_tty,
        "error_file": "",
        "threads": None,
        "nice": launch.nice,
        "memory_bytes": None,
        "secret_blobs": {},
        "parked": False,
        "join": launch.attempt,
    }
