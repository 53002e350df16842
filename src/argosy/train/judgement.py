"""What a computed step comes to: its loss, the norm of its gradient, the factor that they are scaled by, and the verdict of the guard.

Every rank judges for itself from the same numbers, and comes to the same outcome, which is committed with the step. Called by transaction.py when all votes are there.
"""

from __future__ import annotations

import math
from typing import Any

from argosy.errors import StepStopped
from argosy.move.gathered import total
from argosy.train import guards, ledgers
from argosy.train.lanes import WHOLE, Terms
from argosy.train.settings import Settings

Outcome = dict[str, Any]
NOTHING: Outcome = {"verdict": "go", "loss": 0.0, "norm": 0.0, "terms": {}, "scale": 1.0}
"""Of an update whose lanes were not computed."""


class Judge:
    """The guard of a run, with its limits."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watch = guards.Watch(settings.guard)

    @staticmethod
    def remark(step: int, outcome: Outcome, attempt: int, num_members: int) -> str:
        """What a person should hear of a step that was not as others, once its verdict is final; empty: nothing."""
        if outcome["verdict"] == "go":
            if not attempt:
                return ""
            others = " by other ranks" if num_members > 1 else ""
            return (
                f"step {step}: loss or gradient was not finite; computed again{others} they are: "
                "a fault of the machine, which has cost nothing else"
            )
        done = "is left out" if outcome["verdict"] == "skip" else "is undone with those before it"
        again = ", also when computed again" if attempt else ""
        return f"step {step}: loss {outcome['loss']:g}, gradient norm {outcome['norm']:g}{again}: it {done}"

    def judge(
        self, step: int, terms: Terms, votes: list[float], ledger: dict[str, Any], attempt: int
    ) -> Outcome:
        """The outcome of one update of a step; StepStopped when the guard says so."""
        whole, size = terms[WHOLE]
        count = size or 1.0
        norm = math.sqrt(total(votes)) / count if all(map(math.isfinite, votes)) else math.nan
        loss = whole / count
        guard = self._settings.guard
        self._watch.recall(ledger.get("losses", []))
        skips = ledgers.skips_within(ledger, step, guard.window)
        verdict = self._watch.judge(loss, norm, attempt=attempt, skips=skips)
        if verdict == "stop":
            raise StepStopped(
                f"step {step}: loss {loss:g}, gradient norm {norm:g}, computed {attempt + 1} times, "
                f"{skips} steps skipped lately",
                fix="look at the batch and the learning rate; "
                + (
                    f"more than most_skips = {guard.most_skips} of {guard.window} steps are not left out"
                    if guard.policy != "stop"
                    else "run.trainer(guard=…) can skip or rewind instead"
                ),
            )
        clip = self._settings.clip
        factor = 1.0 if clip is None or not norm > clip else clip / (norm + 1e-6)
        return {
            "verdict": verdict,
            "loss": loss,
            "norm": norm,
            "terms": {name: list(value) for name, value in terms.items() if name != WHOLE},
            "scale": factor / count,
        }
