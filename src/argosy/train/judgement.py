"""What a computed step comes to: its loss, the norm of its gradient, the factor that they are scaled by, and the verdict of the guard.

Every rank judges for itself from the same numbers, and comes to the same outcome, which is committed with the step. Called by transaction.py when all votes are there.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

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
        if outcome.get("uncounted"):
            return f"step {step}: {outcome['uncounted']}: it {done}"
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
        uncounted = _find_uncounted(terms, norm)
        if uncounted:
            loss = math.nan  # there is no mean over nothing
            verdict = self._watch.judge_uncounted(skips)
        else:
            verdict = self._watch.judge(loss, norm, attempt=attempt, skips=skips)
        if verdict == "stop":
            self._stop(step, (loss, norm), attempt, skips, uncounted)
        clip = self._settings.clip
        factor = 1.0 if clip is None or not norm > clip else clip / (norm + 1e-6)
        return {
            "verdict": verdict,
            "loss": loss,
            "norm": norm,
            "terms": {name: list(value) for name, value in terms.items() if name != WHOLE},
            "scale": factor / count,
            **({"uncounted": uncounted} if uncounted else {}),
        }

    def _stop(
        self, step: int, numbers: tuple[float, float], attempt: int, skips: int, uncounted: str
    ) -> NoReturn:
        guard, (loss, norm) = self._settings.guard, numbers
        if uncounted:
            raise StepStopped(
                f"step {step}: {uncounted}; {skips} steps skipped lately",
                fix="return (sum, count) with what was summed over: labels.numel(), or those that are not masked; are all of them masked?",
            )
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


def _find_uncounted(terms: Terms, norm: float) -> str:
    """What a step would train on without dividing it by anything, in words; empty: nothing.

    A batch in which there is nothing to learn, no sum and no gradient, is no fault.
    """
    whole, _ = terms[WHOLE]
    if (whole or norm) and not any(count for _, count in terms.values()):
        return f"the loss counts 0 on every lane, its sum is {whole:g}"
    for name, (part, count) in terms.items():
        if name != WHOLE and part and not count:
            return f"term {name!r} of the loss counts 0 on every lane, its sum is {part:g}"
    return ""
