"""What must hold of a simulated training run, whatever happens to its members: checked at every commit, entry, accusation and end.

Fed by the shared memory and by the members themselves; a broken invariant raises InvariantError with the last things that happened.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from operator import ne
from typing import Any, NamedTuple

from argosy.errors import InvariantError
from argosy.move.rounds import Round
from argosy.train.guards import batch_of_step
from argosy.train.memberships import Membership
from argosy.train.shares import owners_of_lanes, parameters_of, runs_of

MOST_ATTEMPTS = 2


class Sample(NamedTuple):
    """What one lane was computed from."""

    lane: int
    batch: int
    weights: frozenset[int]
    """Versions of the weights that were seen while it was computed."""
    is_finite: bool


class Page(NamedTuple):
    """A parameter in one version: the batches that have gone into it."""

    round: Round | None
    history: tuple[int, ...]
    lanes: tuple[Sample, ...] = ()
    """Of the last step that was not left out."""


class TrainingTruth:
    """The truth about one run."""

    def __init__(
        self,
        run: str,
        num_lanes: int,
        costs: Mapping[str, int],
        is_bad: Callable[[int, int], bool],
    ) -> None:
        self.run = run
        self.num_lanes = num_lanes
        self.costs = costs
        self.is_bad = is_bad
        """Whether a step with this batch may be left out."""
        self.story: deque[str] = deque(maxlen=80)
        self.num_checks = 0
        self.num_commits = 0
        self.num_accusations = 0
        self.num_left_out = 0
        self.num_unsaved = 0
        """Stops that say that nothing was saved."""
        self.newest_number = 0
        """Of the memberships that somebody has entered together with all others."""
        self.failed: set[tuple[int, int]] = set()
        """(step, lane) of exceptions that were said to have come twice."""
        self._memberships: dict[int, Membership] = {}
        self._skipped: set[int] = set()
        self._states: dict[tuple[int, int], int] = {}
        self._totals: dict[Any, Any] = {}
        self._step = 0

    @property
    def num_memberships(self) -> int:
        """How many were formed."""
        return len(self._memberships)

    def tell(self, text: str) -> None:
        """Remember something for the story."""
        self.story.append(text)

    def check(self, holds: bool, what: str | Callable[[], str]) -> None:
        """Count one thing that must hold."""
        self.num_checks += 1
        if not holds:
            text = what if isinstance(what, str) else what()
            raise InvariantError(f"run {self.run}: {text}", story=list(self.story))

    # --- memberships ----------------------------------------------------------------------------------------------

    def formed(self, who: str, found: Membership) -> None:
        """A process is about to enter a membership: all that do have the same members, and share the work without a gap."""
        known = self._memberships.get(found.number)
        if known is None:
            self._memberships[found.number] = found
            self._check_shares(found)
        else:
            self.check(known == found, lambda: f"{who} enters {found}, others entered {known}")

    def entered(self, who: str, number: int) -> None:
        """All members of a membership are in it: from now on nobody works for an earlier one."""
        self.tell(f"{who} is in {number}")
        self.newest_number = max(self.newest_number, number)

    def wrote(self, who: str, number: int, what: str) -> None:
        """A process writes to what is shared."""
        self.check(
            number >= self.newest_number,
            lambda: f"{who} writes {what} in {number}, {self.newest_number} has begun",
        )

    def _check_shares(self, found: Membership) -> None:
        members, lanes = found.members, self.num_lanes
        count = len(members)
        for attempt in range(MOST_ATTEMPTS):
            given = {"is_interim": found.is_interim, "attempt": attempt}
            dealt: dict[int, int] = {}
            for position, rank in enumerate(members):
                for first, more in runs_of(position, count, lanes, **given):  # type: ignore[arg-type]
                    for lane in range(first, first + more):
                        self.check(lane not in dealt, f"lane {lane} is dealt twice in {found}")
                        dealt[lane] = rank
            self.check(len(dealt) == lanes, f"lanes {sorted(dealt)} of {lanes} are dealt: {found}")
            owners = owners_of_lanes(members, lanes, **given)  # type: ignore[arg-type]
            self.check(
                all(owners[lane] == rank for lane, rank in dealt.items()),
                f"{owners} are said to own what {dealt} compute",
            )
            before = owners_of_lanes(members, lanes, is_interim=found.is_interim)
            self.check(
                attempt == 0 or count == 1 or all(map(ne, owners, before)),
                f"lanes are computed again by those who have before, in {found}",
            )
        names = [n for place in range(count) for n in parameters_of(place, count, self.costs)]
        self.check(sorted(names) == sorted(self.costs), f"parameters {names} are updated: {found}")

    # --- commits --------------------------------------------------------------------------------------------------

    def flipped(
        self,
        who: str,
        version: int,
        pages: Mapping[str, Page],
        ledger: Mapping[str, Any],
        outcome: Mapping[str, Any],
    ) -> None:
        """A version was committed."""
        self.num_commits += 1
        self.check(version == self.num_commits, f"{who} commits version {version} out of order")
        step, verdict = int(ledger["step"]), outcome["verdict"]
        self.tell(f"{who} commits version {version}: step {step}, {verdict}")
        first = next(iter(pages.values()))
        self.check(
            set(pages) == set(self.costs)
            and all(page.history == first.history for page in pages.values()),
            lambda: f"version {version} is torn: {pages}",
        )
        if verdict == "go":
            self._skipped.discard(outcome["index"])
            for page in pages.values():
                self._check_lanes(version, page, outcome["index"])
        else:
            self.num_left_out += 1
            may_be = self.is_bad(outcome["step"], outcome["index"])
            self.check(may_be, f"batch {outcome['index']} was left out, and it is a good one")
            self._skipped |= {outcome["index"]} if verdict == "skip" else set()
        is_back = verdict == "rewind" and step <= self._step
        self.check(
            step == self._step + 1 or is_back, f"step {step} is committed after {self._step}"
        )
        self._step = step
        omitted = ledger.get("omitted", [])
        expected = [batch_of_step(each, omitted) for each in range(step)]
        self.check(
            list(first.history) == [index for index in expected if index not in self._skipped],
            lambda: f"batches {first.history} were used in {step} steps without {omitted}",
        )

    def _check_lanes(self, version: int, page: Page, index: int) -> None:
        lanes = Counter(sample.lane for sample in page.lanes)
        self.check(
            set(lanes) == set(range(self.num_lanes)) and set(lanes.values()) == {1},
            f"version {version} has lanes {dict(lanes)}",
        )
        self.check(
            all(s.weights == {version - 1} and s.batch == index for s in page.lanes),
            lambda: f"version {version} was computed from {page.lanes}",
        )
        self.check(all(s.is_finite for s in page.lanes), f"version {version} is not finite")

    # --- user code ------------------------------------------------------------------------------------------------

    def began_turn(self, who: str, turn: int, step: int, state: int) -> None:
        """A process begins a turn of its loop: with the same step and state as everybody."""
        known = self._states.setdefault((turn, step), state)
        self.check(known == state, f"{who} begins turn {turn} with {state}, others with {known}")

    def evaluated(self, who: str, key: Any, total: Mapping[int, Any], size: int) -> None:
        """An evaluation came to this: all lanes, their own batches in order, the same for everybody."""
        known = self._totals.setdefault(key, total)
        self.check(known == total, f"{who}: evaluation {key} is {total}, for others {known}")
        wanted = {lane: [(lane, place) for place in range(size)] for lane in range(self.num_lanes)}
        self.check(total == wanted, lambda: f"{who}: evaluation {key} has {total}")

    # --- recovery -------------------------------------------------------------------------------------------------

    def accused(self, who: str, whom: str, is_silent: bool, reason: str) -> None:
        """A member takes another one for hung."""
        self.num_accusations += 1
        self.tell(f"{who} accuses {whom}: {reason}")
        self.check(is_silent, f"{who} accuses {whom}, which is well: {reason}")

    def stopped(self, reason: str, saved: int) -> None:
        """A person stopped it: what it had come to is saved, or it is said that it is not."""
        is_told = "nothing was saved" in reason
        self.check(
            saved == self._step or is_told,
            f"it was stopped after step {self._step}, saved is {saved}, and it says: {reason}",
        )
        self.num_unsaved += is_told

    def ended(self, outcome: str, reason: str, num_steps: int, wish: str) -> None:
        """The run is over; `wish` is how else it may end than well: cancelled, raised, or with a member killed."""
        self.tell(f"the run {outcome}: {reason}")
        if wish == "raised":
            self.check(outcome == "failed", f"it {outcome}, and a lane raises always")
            named = [f"step {step}, lane {lane} raised" in reason for step, lane in self.failed]
            self.check(any(named), f"it failed without its cause: {reason}")
        elif wish == "cancelled" and outcome in ("cancelled", "stopped"):
            return
        else:
            # One of whose processes a person has killed is called stopped, however far it came without it.
            well = ("succeeded", "stopped") if wish == "killed" else ("succeeded",)
            self.check(outcome in well, f"it {outcome}: {reason}")
            self.check(self._step == num_steps, f"it ended with {self._step} of {num_steps} steps")
