"""The ledger of the next version: the step, the turn (which counts steps made, and never goes back), the skip list, the losses that a spike is measured by, the user's own state.

Written with a version by whoever owns its first page; every rank would write the same. After a rewind it is the snapshot's, with what must not be forgotten: the batches left out and the steps skipped. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.train.guards import Guard

_MOST_SKIPPED = 256
Ledger = dict[str, Any]


def after_step(
    old: Mapping[str, Any],
    step: int,
    more: Mapping[str, Any],
    outcome: Mapping[str, Any],
    guard: Guard,
) -> Ledger:
    """After a step that was made, or skipped."""
    ledger = {**old, **more, "step": step + 1, "turn": old.get("turn", 0) + 1}
    ledger.pop("edits", None)
    if outcome["verdict"] != "go":
        ledger["skipped"] = _with_skip(ledger, step)
    elif guard.spike is not None:
        ledger["losses"] = [*ledger.get("losses", []), outcome["loss"]][-guard.window :]
    return ledger


def after_rewind(
    old: Mapping[str, Any], snapshot: Mapping[str, Any], step: int, index: int
) -> Ledger:
    """After going back to a snapshot, without the batch `index` from now on."""
    return {
        **snapshot,
        "turn": old.get("turn", 0) + 1,
        "omitted": sorted({*old.get("omitted", []), index}),
        "skipped": _with_skip(old, step),
        "rewinds": old.get("rewinds", 0) + 1,
    }


def is_of_loop(before: int | None, turn: int) -> bool:
    """Whether a process that began the turn `before` last comes to this one in its own loop; else it joins there and must be given the state."""
    return before is not None and before <= turn <= before + 1


def version_of_turn(version: int, ledger: Mapping[str, Any], turn: int) -> int:
    """The version that a turn's step begins from, when this one is committed: the others may have needed nothing of this rank, and be a step further."""
    return version if ledger.get("turn", 0) == turn else version - 1


def skips_within(ledger: Mapping[str, Any], step: int, window: int) -> int:
    """How many steps were skipped or rewound lately."""
    return sum(1 for each in ledger.get("skipped", []) if each > step - window)


def _with_skip(ledger: Mapping[str, Any], step: int) -> list[int]:
    return [*ledger.get("skipped", []), step][-_MOST_SKIPPED:]
