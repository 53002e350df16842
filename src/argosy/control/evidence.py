"""Evidence against a suspect: stacks of its whole gang, taken before it is killed, and kept in the run's directory.

The conductor calls `take` for every suspicion that was decided. It is bounded in time: a suspect is killed without evidence
rather than late. Never decides anything; what it found, or why not, becomes a fact.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from argosy.control.agentlinks import AgentLinks
from argosy.control.supervisor import EVIDENCE_SECONDS, Supervisor
from argosy.errors import ClusterError
from argosy.protocol.facts import AttemptSuspected
from argosy.telemetry.rundir import stacks_directory

logger = logging.getLogger("argosy.controller")
MOST_STACKS = 256
"""Asked for at once: an answer is a message, and has a limit."""
_SHARE = 0.8
"""Of the time there is, so much for the stacks themselves."""


class Evidence:
    """Takes stacks for suspicions, each in its own task."""

    def __init__(
        self,
        links: AgentLinks,
        runs_directory: str,
        keep: Callable[[str, str, str], None],
    ) -> None:
        """`keep` is told (suspect, path, error) when it is done."""
        self._links = links
        self._runs = runs_directory
        self._keep = keep
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, supervisor: Supervisor, fact: AttemptSuspected) -> None:
        """Begin; the answer comes by `keep`."""
        role = supervisor.roles[supervisor.attempts[fact.attempt].role]
        members = [attempt for attempt in role.alive() if attempt.pid]
        # The suspect first: it matters most if there is not time for all.
        members.sort(key=lambda attempt: attempt.id != fact.attempt)
        who = {
            attempt.id: {"role": attempt.role, "index": attempt.index, "rank": attempt.rank}
            for attempt in members
        }
        hosts: dict[str, list[str]] = {}
        for attempt in members[:MOST_STACKS]:
            hosts.setdefault(attempt.host, []).append(attempt.id)
        task = asyncio.create_task(self._take(fact, who, hosts))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Give up what is under way."""
        for task in list(self._tasks):
            task.cancel()

    async def _take(
        self, fact: AttemptSuspected, who: dict[str, dict[str, Any]], hosts: dict[str, list[str]]
    ) -> None:
        asked = [self._ask(host, attempts) for host, attempts in hosts.items()]
        stacks: list[dict[str, Any]] = []
        error = ""
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, ClusterError):
                error = answer.what
            elif isinstance(answer, BaseException):
                raise answer
            else:
                stacks += [{**who[stack["attempt"]], **stack} for stack in answer]
        path = ""
        if stacks:
            try:
                path = write_stacks(os.path.join(self._runs, fact.run), fact, stacks)
            except OSError as problem:
                error = f"the stacks cannot be written: {problem.strerror}"
        self._keep(fact.attempt, path, error)

    async def _ask(self, host: str, attempts: list[str]) -> list[dict[str, Any]]:
        data = {"attempts": attempts, "seconds": _SHARE * EVIDENCE_SECONDS}
        answer = await self._links.ask(host, "stacks", data, timeout_seconds=EVIDENCE_SECONDS)
        stacks: list[dict[str, Any]] = answer["stacks"]
        return stacks


def write_stacks(directory: str, fact: AttemptSuspected, stacks: list[dict[str, Any]]) -> str:
    """Keep them in the run's directory; the path."""
    folder = stacks_directory(directory)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, f"{fact.attempt}.json")
    document = {
        "suspect": fact.attempt,
        "by": fact.by,
        "generation": fact.generation,
        "reason": fact.reason,
        "stacks": stacks,
    }
    part = f"{path}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(document, file)
    os.replace(part, path)
    return path
