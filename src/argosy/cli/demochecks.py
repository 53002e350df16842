"""What the demo sets out to do, what came of it, and whether all of it is true.

Plain records and functions over watched runs; used by demo.py, which shows them. Decides nothing and touches nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.cli.watchedrun import WatchedRun

FALL = 0.9
"""The loss of the last steps must be below this part of the loss of the first one."""


@dataclass
class Plan:
    """What is to be done, on how much."""

    ranks: int
    lanes: int
    steps: int
    corpus: Path
    settings: list[str] = field(default_factory=list)

    @property
    def victim(self) -> int:
        """The rank that is killed."""
        return self.ranks - 1

    @property
    def other_ranks(self) -> int:
        """Ranks of the undisturbed run."""
        return self.ranks + 1


@dataclass
class Kill:
    """The blow."""

    pid: int
    step: int
    at: float
    median_seconds: float
    commit_seconds: float | None = None
    """From the kill to the next commit."""
    is_replaced: bool = False


def check_disturbed(run: WatchedRun, kill: Kill | None, plan: Plan) -> dict[str, bool]:
    """What must be true of the run in which a rank was killed."""
    deaths = [(member.pid, member.signal) for member in run.killed()]
    return {
        "the disturbed run succeeded": run.outcome == "succeeded",
        "every step was done, and done once": _is_whole(run, plan),
        "the loss fell": _has_fallen(run),
        "exactly one rank died, by the kill": kill is not None
        and deaths == [(kill.pid, int(signal.SIGKILL))],
        "a replacement joined in generation 2": run.generation == 2
        and kill is not None
        and kill.is_replaced,
        "a step was committed after the kill": kill is not None and kill.commit_seconds is not None,
        "a sample was generated": bool(run.result().get("sample")),
    }


def check_undisturbed(run: WatchedRun, plan: Plan) -> dict[str, bool]:
    """What must be true of the other one."""
    return {
        "the undisturbed run succeeded": run.outcome == "succeeded",
        "it was undisturbed": run.generation == 1 and not run.killed(),
        "its every step was done, and done once": _is_whole(run, plan),
    }


def _is_whole(run: WatchedRun, plan: Plan) -> bool:
    is_done = run.result().get("steps") == plan.steps
    return is_done and [step["step"] for step in run.steps] == list(range(plan.steps))


def _has_fallen(run: WatchedRun) -> bool:
    losses = [step["loss"] for step in run.steps]
    return bool(losses) and mean_end(losses) < FALL * losses[0]


def mean_end(losses: list[float]) -> float:
    """Of the last tenth."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def figures(run: WatchedRun, kill: Kill | None, result: dict[str, Any]) -> dict[str, Any]:
    """For the report and for programs."""
    figures: dict[str, Any] = {
        "run": run.handle.run,
        "steps": len(run.steps),
        "parameters": result.get("parameters"),
        "first_loss": run.steps[0]["loss"],
        "last_loss": mean_end([step["loss"] for step in run.steps]),
        "tokens_per_second": round(run.tokens_per_second(), 1),
        "median_step_seconds": round(run.median_seconds(), 4),
        "lanes_recomputed": result.get("lanes_recomputed"),
        "digest": result.get("digest", ""),
        "sample": result.get("prompt", "") + result.get("sample", ""),
    }
    if kill is not None and kill.commit_seconds is not None:
        figures["killed_pid"], figures["killed_in_step"] = kill.pid, kill.step
        figures["kill_to_commit_seconds"] = round(kill.commit_seconds, 4)
        figures["recovery_seconds"] = round(kill.commit_seconds - kill.median_seconds, 4)
    return figures
