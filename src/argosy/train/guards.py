"""Guards: what to do with a step whose loss or gradient is not finite or jumps.

A non-finite step is computed once more, by other ranks if there are any: with equal bits promised, a result that does not repeat was a fault of the machine and is dropped. One that repeats is the data's or the
program's, and the policy decides. Every rank sees the same numbers and comes to the same verdict. Pure.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Literal

from argosy.errors import ConfigError

Policy = Literal["skip", "rewind", "stop"]
Verdict = Literal["go", "again", "skip", "rewind", "stop"]
MOST_WINDOW = 2048
"""The losses of so many steps are committed with each step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard:
    """The policies and their limits."""

    policy: Policy = "skip"
    """skip: commit the old state, go on with the next batch; rewind: go back to the last snapshot in memory and leave the batch out; stop."""
    spike: float | None = None
    """So many median absolute deviations above the median loss are a spike; None: spikes are not looked for."""
    window: int = 64
    """Steps that the median is taken over."""
    most_skips: int = 10
    """More in `window` steps stop the run."""
    snapshot_every: int = 50
    """Steps between snapshots in memory, for rewind."""

    def __post_init__(self) -> None:
        if self.policy not in ("skip", "rewind", "stop"):
            raise ConfigError(f"guard policy {self.policy!r}", fix="use skip, rewind or stop")
        is_window = 8 <= self.window <= MOST_WINDOW
        if not is_window or self.most_skips < 0 or self.snapshot_every < 1:
            raise ConfigError(
                f"guard with window {self.window}, most_skips {self.most_skips}, snapshot_every {self.snapshot_every}",
                fix=f"use a window of 8 to {MOST_WINDOW}, and positive counts",
            )
        if self.spike is not None and not self.spike > 0:
            raise ConfigError(
                f"guard with spike {self.spike}", fix="give a positive number, or None"
            )


class Watch:
    """The guard's view of a run; recalled from the ledger, so that every process has the same."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._losses: list[float] = []

    def recall(self, losses: list[float]) -> None:
        """The losses of the last committed steps."""
        self._losses = losses[-self.guard.window :]

    def judge(self, loss: float, norm: float, *, attempt: int, skips: int) -> Verdict:
        """What to do with a computed step; `attempt` counts how often it was computed again, `skips` the batches left out lately."""
        if math.isfinite(loss) and math.isfinite(norm):
            return self._policy(skips) if self._is_spike(loss) else "go"
        return "again" if attempt == 0 else self._policy(skips)

    def judge_uncounted(self, skips: int) -> Verdict:
        """What to do with a step that is not divided by anything: no older state is better for it, so it is left out rather than gone back for."""
        found = self._policy(skips)
        return "skip" if found == "rewind" else found

    def _is_spike(self, loss: float) -> bool:
        if self.guard.spike is None or len(self._losses) < self.guard.window:
            return False
        middle = statistics.median(self._losses)
        spread = statistics.median(abs(each - middle) for each in self._losses)
        return loss > middle + self.guard.spike * max(spread, 1e-12)

    def _policy(self, skips: int) -> Verdict:
        if self.guard.policy == "stop" or skips >= self.guard.most_skips:
            return "stop"
        return self.guard.policy


def batch_of_step(step: int, omitted: Iterable[int]) -> int:
    """The index of a step's batch: indices that were left out are passed over, and each of the others comes once."""
    index = step
    for each in sorted(set(omitted)):
        if each > index:
            break
        index += 1
    return index
