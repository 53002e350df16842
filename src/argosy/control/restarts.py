"""What an exit means and whether another start is allowed: classes, first cause, budgets, backoff.

Pure functions and one small history per process (or per gang), folded by the supervisor. Nothing here decides to start
or stop anything; the supervisor asks and acts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from argosy.config.spec import Backoff, Budget, Restart, RoleSpec, RunSpec
from argosy.control.identity import fraction
from argosy.protocol import lastwords
from argosy.protocol.facts import AttemptExited, FailureClass
from argosy.protocol.peerloss import is_peer_loss

SIGABRT, SIGKILL, SIGTERM = 6, 9, 15
NOT_READY = "not ready in time"
WITHOUT_END = 1 << 30
_ENDLESS = Budget(
    user=WITHOUT_END,
    host=WITHOUT_END,
    hang=WITHOUT_END,
    preemption=WITHOUT_END,
    no_progress=0,
    same_error=0,
)
# Kills from outside are no fault of the program, and it is started again at once; so many in so short a time are a loop.
KILLS_AT_ONCE, KILLS_SECONDS = 5, 10.0


def in_force(run: RunSpec, role: RoleSpec) -> RoleSpec:
    """The role as it is supervised: one of a service that says nothing of restarts has no end."""
    if not run.service or role.restart is not None:
        return role
    budget = _ENDLESS if role.budget == Budget() else role.budget
    return msgspec.structs.replace(role, restart="permanent", budget=budget)


def policy_of(role: RoleSpec) -> Restart:
    """The restart policy in force: a gang without one of its own is transient."""
    return role.restart or ("transient" if role.gang else "temporary")


def classify(exit: AttemptExited) -> FailureClass | None:
    """Failure class of an exit that nobody asked for; None: it ended well."""
    if exit.hung:
        return "hang"
    if exit.lost or exit.is_oom or exit.signal == SIGKILL:
        return "host"
    if exit.signal == SIGTERM:
        return "preemption"
    if exit.code == 0:
        return None
    return "user"


def severity(exit: AttemptExited) -> int:
    """Rank of an exit as a first cause, least first; exits seen together are not ordered by time."""
    is_collateral = is_peer_loss(exit.error)
    if exit.hung or exit.lost or exit.is_oom or exit.signal in (SIGKILL, SIGTERM):
        return 0
    if exit.signal is not None and not (exit.signal == SIGABRT and is_collateral):
        return 1
    return 3 if is_collateral else 2


def exit_code(exit: AttemptExited) -> int:
    """What `argosy run` exits with when this was the first cause."""
    if exit.signal is not None:
        return 128 + exit.signal
    if exit.lost:
        return 128 + SIGKILL
    if exit.code is not None:
        return exit.code or 1
    return unstarted_code(exit.error)


def unstarted_code(error: str) -> int:
    """The shell's code for a program that could not be started for this reason: 126 if it was found, else 127."""
    said = error.lower()
    return 126 if "not executable" in said or "permission" in said else 127


def describe(exit: AttemptExited) -> str:
    """An exit in a few words."""
    if exit.hung:
        return "made no progress and was killed"
    if exit.lost:
        return "was lost with its keeper"
    if exit.is_oom:
        return "ran out of memory"
    if exit.error.startswith(NOT_READY):
        return f"was {exit.error}"
    if exit.signal is not None:
        return f"was killed by signal {exit.signal}"
    if exit.code is not None:
        return f"exited with code {exit.code}"
    lines = exit.error.strip().splitlines()
    return f"could not be started: {lines[-1] if lines else 'no reason given'}"


@dataclass(slots=True)
class Tally:
    """Counts after one more failure."""

    in_period: int
    row: int
    fruitless: int
    repeated: int = 0
    """Failures in a row that said the same."""


@dataclass(slots=True)
class History:
    """Failures of one role (budgets) and failures in a row of one process or gang (backoff, no progress)."""

    failures: dict[str, deque[float]] = field(default_factory=dict)
    row: int = 0
    fruitless: int = 0
    repeated: int = 0
    said: str = ""
    """The last words of the program's last failure, if nothing else has shown progress since."""

    def peek(self, budget: Budget, at: float, failure: FailureClass, life: Life) -> Tally:
        """The counts as they would be with this failure."""
        row, fruitless = self.row, self.fruitless
        if failure in ("user", "hang") or life.is_oom:
            row = 1 if life.has_progressed or life.is_long else row + 1
            fruitless = 0 if life.has_progressed else fruitless + 1
        repeated = 0
        if failure == "user" and life.said:
            is_again = life.said == self.said and not life.has_worked
            repeated = self.repeated + 1 if is_again else 1
        return Tally(self._count(budget, at, failure) + 1, row, fruitless, repeated)

    def standing(self, budget: Budget, at: float, failure: FailureClass) -> Tally:
        """The counts for one that belongs to the last failure and is counted with it."""
        count = max(1, self._count(budget, at, failure))
        return Tally(count, max(1, self.row), self.fruitless, self.repeated)

    def row_of_kills(self, at: float, failure: FailureClass) -> int:
        """Kills from outside up to `at`, as failures in a row by which the next start waits."""
        recent = sum(1 for time in self.failures.get(failure, ()) if time > at - KILLS_SECONDS)
        return max(1, recent - KILLS_AT_ONCE)

    def _count(self, budget: Budget, at: float, failure: FailureClass) -> int:
        since = at - budget.period_seconds
        return sum(1 for time in self.failures.get(failure, ()) if time > since)

    def add(self, budget: Budget, at: float, failure: FailureClass, life: Life) -> None:
        """Fold the failure in."""
        tally = self.peek(budget, at, failure, life)
        self.row, self.fruitless = tally.row, tally.fruitless
        if failure == "user":
            self.said, self.repeated = life.said, tally.repeated
        elif life.has_worked:
            self.said, self.repeated = "", 0
        times = self.failures.setdefault(failure, deque(maxlen=2048))
        times.append(at)


@dataclass(slots=True, frozen=True)
class Life:
    """What of an attempt's life matters for the counts."""

    has_progressed: bool
    is_long: bool
    is_oom: bool = False
    said: str = ""
    """The last line of the exception that ended it."""

    @property
    def has_worked(self) -> bool:
        """Whether it told of it or not: what it says at its end is said for the first time."""
        return self.has_progressed or self.is_long


_FAILURES: dict[FailureClass, str] = {
    "user": "failures of the program",
    "host": "failures of the host",
    "hang": "hangs",
    "preemption": "preemptions",
}


def why_given_up(role: RoleSpec, failure: FailureClass, tally: Tally, is_observable: bool) -> str:
    """Why there is no further start, or an empty string if one is allowed."""
    if policy_of(role) == "temporary":
        return "it is temporary, so it is not restarted"
    allowed: int = getattr(role.budget, failure)
    if tally.in_period > allowed:
        restarts = f"{allowed} restart{'s' if allowed != 1 else ''}"
        return f"the budget of {restarts} after {_FAILURES[failure]} is spent"
    # Only programs that show progress (a probe, reported steps) can be seen to make none.
    limit = role.budget.no_progress
    if is_observable and limit and tally.fruitless >= limit and failure in ("user", "hang"):
        return f"{tally.fruitless} failures in a row without progress in between"
    if 0 < role.budget.same_error <= tally.repeated:
        return lastwords.describe_repeats(tally.repeated)
    return ""


def describe_restart(role: RoleSpec, failure: FailureClass, count: int) -> str:
    """`restart 2 of 3`: which of the restarts that this class of failures may cost."""
    after = "" if failure == "user" else f" after {_FAILURES[failure]}"
    allowed = getattr(role.budget, failure)
    return f"restart {count}{f' of {allowed}' if allowed < WITHOUT_END else ''}{after}"


def why_hopeless(exit: AttemptExited, life: Life) -> str:
    """Why another start would end in the same way, or an empty string if it may not: a program that failed before it did anything."""
    if exit.code in (None, 0) or life.has_progressed or life.is_long:
        return ""
    return lastwords.why_hopeless(exit.error)


def wait_seconds(backoff: Backoff, row: int, *key: object) -> float:
    """Wait before the next start after `row` failures in a row."""
    row = min(row, 64)  # what fails for days must not run out of numbers
    if row <= 1:
        wait = backoff.first_seconds
    else:
        wait = max(backoff.first_seconds * 2.0 ** (row - 1), 0.5 * 2.0 ** (row - 2))
    wait = min(wait, backoff.most_seconds)
    return wait * (1.0 + backoff.jitter * (2.0 * fraction(*key, row) - 1.0))


def first_cause(exits: Iterable[AttemptExited]) -> AttemptExited | None:
    """The exit that explains the others: by severity, then by time."""
    return min(exits, key=precedence, default=None)


def precedence(exit: AttemptExited) -> tuple[int, float, str]:
    """The least of several exits explains the others."""
    return severity(exit), exit.at, exit.attempt
