"""`Run`: what `launch` hands to the user's `main`: config, directory, seed, state, measurements, and the way to a trainer.

One per process. Its gang is joined when it is first asked for, so a program that never asks keeps the contract of torchrun: the
whole gang is started again when a member dies. Imports the trainer, and with it torch, only when one is made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argosy.errors import ArgosyError, ConfigError
from argosy.worker import gang as gangs
from argosy.worker.journal import Journal
from argosy.worker.notices import say
from argosy.worker.onces import run_once
from argosy.worker.states import State

if TYPE_CHECKING:
    from argosy.train.trainer import Trainer


class Run:
    """One process's view of its run."""

    def __init__(
        self,
        *,
        name: str,
        directory: Path,
        config: Any = None,
        seed: int = 0,
        threads: int = 1,
        resume_from: Path | None = None,
        allows_drift: bool = False,
    ) -> None:
        self.name = name
        self.directory = directory
        self.config = config
        self.seed = seed
        self.threads = threads
        """Threads of each rank: a constant of the run."""
        self.resume_from = resume_from
        """The directory of the run that this one goes on with; None: it begins anew."""
        self.allows_drift = allows_drift
        """Whether it may go on under another numerics fingerprint."""
        self.is_new = False
        """Whether this process, or the one it was forked from, has made the directory."""
        self.state = State()
        self.step: int | None = None
        """The step in progress, set by the trainer; measurements and side effects are dated by it."""
        self.writers: Callable[[], Iterable[int]] | None = None
        """The ranks of which the lowest living one writes, set by a trainer in whose steps not all take part; None: all."""
        self.last_saved: int | None = None
        """The step that this process knows to be saved."""
        self.when_lasting: Callable[[], None] | None = None
        """Called once when something has come of this start: a step is committed, or `main` has returned."""
        self._trainer: Trainer | None = None
        self._journal = Journal(directory / "metrics.jsonl")
        self._calls: dict[str, int] = {}
        self._calls_step: int | None = None
        """The step in which these calls of `once` were made."""

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {str(self.directory)!r})"

    @property
    def rank(self) -> int:
        """This process's number among the ranks; it may change when the gang is resized or goes on without a member."""
        joined = gangs.joined()
        return int(os.environ.get("RANK", "0")) if joined is None else joined.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are; it may change, too."""
        joined = gangs.joined()
        return int(os.environ.get("WORLD_SIZE", "1")) if joined is None else joined.world_size

    @property
    def gang(self) -> gangs.Gang:
        """The membership of this process; the first use tells the runtime that it can re-form in place."""
        return gangs.join()

    def trainer(self, **arguments: Any) -> Trainer:
        """A trainer of this run; see `argosy.train.trainer.Trainer` for the arguments."""
        from argosy.train.trainer import Trainer

        if self._trainer is not None:
            raise ConfigError(
                "this run has a trainer already: what it trains, its steps and its checkpoints are the run's",
                fix="one trainer per run: launch(main) once for each, or several optimizers in one trainer",
            )
        self._trainer = Trainer(self, **arguments)
        return self._trainer

    def finish(self, *, has_failed: bool = False) -> None:
        """Called when `main` has returned, or has raised: what was trained is saved, on one rank, if its loop is over."""
        if not has_failed:
            self.note_lasting()
        if self._trainer is not None:
            self._trainer.save_at_end(has_failed=has_failed)

    def note_lasting(self) -> None:
        """Something has come of this start. A record that cannot be written costs no training."""
        note, self.when_lasting = self.when_lasting, None
        if note is not None:
            try:
                note()
            except ArgosyError as error:
                say(str(error))

    def note_saved(self, step: int, path: Path | None) -> None:
        """The trainer has saved, here or on another rank, or had no step to save: the runtime and the person are told."""
        self.last_saved = self.last_saved if path is None else step
        self.gang.saved(step, "" if path is None else str(path))

    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Print the values and append them to `metrics.jsonl`, on one rank; dated by the trainer's step unless one is given."""
        is_writer = self._is_first_living()
        self._journal.note(values, step=self.step, is_writer=is_writer, given=step)

    def go_back(self, step: int, *, is_alone: bool = False) -> None:
        """The trainer makes steps from this one on again: their lines leave `metrics.jsonl`, by the rank that writes, or here if nobody trains yet."""
        self._journal.go_back(step, is_writer=is_alone or self._is_first_living())

    def once(self, fn: Callable[[], object], key: str | None = None) -> bool:
        """Run `fn` on one rank, the first time that any process of the run comes to this call; whether it ran here.

        Returns when it is done. It runs at least once: again only if the process that ran it died in the middle. Calls are told apart
        by `key`, or else by their place in the program, the trainer's step and how often the place was passed in it.
        """
        return run_once(self.directory / "once", key or self._name_call(), fn)

    def _name_call(self) -> str:
        frame = sys._getframe(2)
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if self.step != self._calls_step:
            self._calls, self._calls_step = {}, self.step
        self._calls[place] = self._calls.get(place, 0) + 1
        return f"{place} step {self.step} call {self._calls[place]}"

    def _is_first_living(self) -> bool:
        joined = gangs.joined()
        if joined is None:
            return os.environ.get("RANK", "0") == "0"
        ranks = range(joined.world_size) if self.writers is None else self.writers()
        return not any(rank < joined.rank and rank not in joined.lost() for rank in ranks)
