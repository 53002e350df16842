"""The crew of a run without recovery: the ranks that it began with, all of them until the end.

State is updated in place then, so a rank that ends in the middle of a step leaves nothing to go on from: the run is ended with that cause, by whoever sees it first, and a process that would join is refused.
A wish to stop is heeded between two steps, where the state is whole, by all ranks at the same one. Used by parts.py and transaction.py.
"""

from __future__ import annotations

from argosy.errors import ConfigError, RunFailed
from argosy.train.crew import Crew, Stopped
from argosy.train.roster import STOP

_FIX = "start it again from its last save; with recovery, the default, the others would have finished the step"


class FixedCrew:
    """This rank's view of it."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        crew.heeds_stops = False
        own = crew.gang.generation
        self._generation = crew.roster.first_generation(own)
        if self._generation != own:
            raise ConfigError(
                f"this process would join a run that began without it (generation {self._generation}, this is {own}), with recovery=False",
                fix=_FIX,
            )

    def check(self, step: int) -> None:
        """End the run if not all are there that began it."""
        gang = self._crew.gang
        if gang.generation != self._generation:
            reason = f"the ranks changed before step {step} was committed, with recovery=False"
            gang.fail(f"{reason}; {_FIX}")
            raise RunFailed(reason, fix=_FIX)
        missing = sorted(set(range(gang.world_size)) - set(self._crew.members))
        if missing:
            reason = f"rank {missing[0]} has ended during step {step}, with recovery=False"
            gang.fail(f"{reason}; {_FIX}", rank=missing[0])
            # Not as PeerLost, after which others would go on; its words say that this is no first cause.
            raise RunFailed(f"peer lost: {reason}", fix=_FIX)

    def heed_stop(self, turn: int) -> None:
        """Stopped, on all ranks or on none, when the first one to begin this turn was asked to stop."""
        crew = self._crew
        is_asked = crew.gang.stopping or crew.roster.is_stopping(self._generation)
        if is_asked:
            crew.roster.stop(self._generation)
        if crew.roster.agree_on(turn, STOP, crew.rank, is_asked):
            raise Stopped
