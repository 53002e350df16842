"""What a household knows of its ranks' training: how far it is, what is saved, how long a member may take to begin. Pure.

Part of upkeep.py, which asks here whether a stop needs a process that saves what the others have left, what to tell the person, and
when a member that never comes to train is taken for hung.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.protocol import savers
from argosy.protocol.advances import TELL_SECONDS, describe_advance

GRACE_SECONDS = 30.0
"""What one has that is told to save and leave, before it is killed."""
_STARTS = 3.0
"""A member may take so many times as long as the slowest one, and `hang_seconds` more."""


class Training:
    """Steps and saves, as they are told."""

    def __init__(self) -> None:
        self.steps = 0
        """The newest that was heard of; 0: none is done."""
        self.has_entered = False
        """A member has come to train: it may have made a step of which it could not tell any more."""
        self.keeps_state = False
        """What was trained is in the household's memory: any rank can save it."""
        self.saved: tuple[int, str] | None = None
        self.is_closed = False
        """Nobody needs to be started to save: a rank could not and has said why, or the person does not want it."""
        self._saved_by = ""
        self._has_saved = False
        """Since it is being stopped."""
        self._were_unlucky: list[bool] = []
        """Of each saver that has ended: whether another one may do better."""
        self._told_at = 0.0
        """When the person was told last how far a save is."""
        self._saver_end = ""
        """How the last one did, in words."""

    def note_step(self, step: object) -> None:
        """So many are done."""
        if isinstance(step, int):
            self.steps = max(1, step)

    def note_save(self, attempt: str, message: Mapping[str, Any], *, is_stopping: bool) -> str:
        """A rank says that a step is saved, or that there was none to save; what to tell the person, once."""
        self._has_saved = self._has_saved or is_stopping
        self._saved_by = attempt
        save = (int(message.get("step") or 0), str(message.get("path") or ""))
        if not save[1] or save == self.saved:
            return ""
        self.saved = save
        return f"step {save[0]} is saved in {save[1]}"

    def note_advance(self, message: Mapping[str, Any], at: float, *, since: float) -> str:
        """A rank says how far its save is; what to tell the person, who has heard of it `since`, now and then."""
        numbers = [message.get(key) for key in ("step", "num_bytes", "total_bytes")]
        if at - max(since, self._told_at) < TELL_SECONDS:
            return ""
        self._told_at = at
        step, num_bytes, total_bytes = (n if isinstance(n, int) else 0 for n in numbers)
        return describe_advance(step, num_bytes, total_bytes, str(message.get("what")))

    def note_saver_end(self, what: str, *, is_unlucky: bool) -> None:
        """A process that was started only to save has ended."""
        self._were_unlucky.append(is_unlucky)
        self._saver_end = what

    def needs_saver(self, ended_well: Mapping[str, bool]) -> bool:
        """Whether all have ended without a save, although what they trained is still there; `ended_well`: each member."""
        legacy = savers.Legacy(
            has_entered=self.has_entered,
            keeps_state=self.keeps_state,
            has_saved=self._has_saved,
            has_finished=savers.has_finished(ended_well, len(ended_well), self._saved_by),
            has_answered=self.is_closed,
        )
        return savers.needs_saver(legacy, self._were_unlucky)

    def describe_loss(self) -> str:
        """What a stop has cost, or giving up, as the end of a sentence."""
        if self._is_safe():
            return ""
        # Nobody tells of the saves on the way: how many steps are lost is not known here.
        return f"; nothing was saved at its end{self._describe_saver()}"

    def _is_safe(self) -> bool:
        if self._has_saved or not self.steps:
            return True
        return self.saved is not None and self.saved[0] >= self.steps

    def _describe_saver(self) -> str:
        return f" (a process was started to save: it {self._saver_end})" if self._saver_end else ""


class Entries:
    """How long members took to come to their loops."""

    def __init__(self) -> None:
        self._first_at: float | None = None
        self._slowest = 0.0
        self._hang_seconds = 0.0

    def note_bounds(self, message: Mapping[str, Any]) -> None:
        """What a trainer says of itself."""
        seconds = message.get("hang_seconds")
        self._hang_seconds = float(seconds) if isinstance(seconds, int | float) else 0.0

    def note_entry(self, at: float, seconds: float) -> None:
        """A member has come to its loop, so long after its start."""
        self._first_at = at if self._first_at is None else self._first_at
        self._slowest = max(self._slowest, seconds)

    def expected_at(self, started_at: float) -> float | None:
        """When one that was started then should have, too; None: nobody has yet, or it may take as long as it wants."""
        if self._first_at is None or not self._hang_seconds:
            return None
        return max(started_at, self._first_at) + self._hang_seconds + _STARTS * self._slowest

    def saver_seconds(self) -> float:
        """How long a process may take that is started only to save."""
        return savers.saver_seconds(GRACE_SECONDS, self._slowest)
