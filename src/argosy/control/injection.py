"""Injection: carries out faults that no rank does itself: signals to ranks through the keeper, and the end of the runtime's own parts.

Called by the HTTP API after the faults are durable. What rank or part is meant was decided before; one that has gone meanwhile is an
error for whoever asked.
"""

from __future__ import annotations

import asyncio
import os
import signal

from argosy.control.agentlinks import AgentLinks
from argosy.errors import ClusterError, NotFoundError
from argosy.protocol.facts import FaultInjected

_SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP"}
_ANSWER_SECONDS = 0.1
"""The controller lives so much longer than its answer."""


async def carry_out(links: AgentLinks, fault: FaultInjected, host: str) -> None:
    """Break it now; ClusterError or NotFoundError when it is not there."""
    if not fault.part:
        data = {"attempt": fault.attempt, "signal": _SIGNALS[fault.fault]}
        await links.ask(host, "signal", data)
        return
    pids = await find_part(links, fault.part)
    if not pids:
        raise NotFoundError(f"there is no {fault.part} at the moment", fix="try again in a moment")
    for pid in pids:
        if pid == os.getpid():
            asyncio.get_running_loop().call_later(_ANSWER_SECONDS, os.kill, pid, signal.SIGKILL)
        else:
            _kill(pid, fault.part)


async def find_part(links: AgentLinks, part: str) -> list[int]:
    """Pids of a part of the runtime on this machine."""
    if part == "controller":
        return [os.getpid()]
    pids: list[int] = []
    for host in links.hosts():
        if part == "keeper":
            pids.append(links.keeper(host)[0])
        elif part == "agent":
            pids.append(links.agent_pid(host))
        else:
            answer = await links.ask(host, "statistics", {})
            for entry in answer["keeper"].get("zygotes", []):
                pids += [int(zygote["pid"]) for zygote in entry.get("layers", [])]
    return [pid for pid in pids if pid > 0]


def _kill(pid: int, part: str) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ClusterError(f"the {part} (pid {pid}) has just ended") from None
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
