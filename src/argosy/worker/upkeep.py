"""What a household does next: who is started, told, stopped or killed, and when the whole ends. Pure.

Events go in (`exited`, `said`, `interrupted`, `passed`), actions come out; `household` carries them out. The rules are those of a
cluster: a member that joined keeps its process when another dies, all others are ended and started again with it; a generation
is formed when everybody who left the one before is reaped; failures of the program have a small budget, those of the host a large one;
what was trained is saved when it is stopped, also if nobody is left to do so (savings.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from argosy.errors import InvariantError
from argosy.protocol.peerloss import is_peer_loss
from argosy.protocol.savers import is_answer, was_unlucky
from argosy.worker.failures import LONG_SECONDS, Failures, Life
from argosy.worker.members import Exit, Member, Members
from argosy.worker.savings import GRACE_SECONDS, Entries, Training

SIGHUP, SIGINT, SIGKILL, SIGTERM = 1, 2, 9, 15
_INSISTING = {SIGHUP: "SIGTERM", SIGINT: "Ctrl-C again", SIGTERM: "a second SIGTERM"}
"""What ends it at once after it was asked to stop by this signal, for people."""
_ONE_WISH_SECONDS = 1.0
"""Signals of several kinds that come so close together are one wish: a session that ends sends SIGHUP and SIGTERM."""
_MOST_STORY = 64
ERRORS = "errors.txt"
"""Of the run's directory: what failed ranks have left."""


@dataclass(frozen=True)
class Start:
    """Start this process."""

    attempt: str
    rank: int
    generation: int
    world_size: int = 1
    is_saving: bool = False
    """Only to save what the others have left."""


@dataclass(frozen=True)
class Tell:
    """Send this frame to the process, now or when it has connected."""

    attempt: str
    frame: Mapping[str, Any]


@dataclass(frozen=True)
class Signal:
    """Send this signal."""

    attempt: str
    number: int


@dataclass(frozen=True)
class TakeStacks:
    """Write down the stacks of all living processes."""

    reason: str


@dataclass(frozen=True)
class Announce:
    """Show a line to the person."""

    text: str


@dataclass(frozen=True)
class End:
    """The household is over."""

    code: int
    text: str = ""
    """Why it failed; empty when it did not."""
    error: str = ""
    """The first cause's traceback, if it had one."""
    is_stop: bool = False
    """It was asked for."""
    is_refusal: bool = False
    """The program said that its input is wrong, before it did anything with it."""


Action = Start | Tell | Signal | TakeStacks | Announce | End


class Upkeep:
    """The household's members and what follows from what happens to them."""

    def __init__(self, num_ranks: int, run: str = "local") -> None:
        self.members = Members(num_ranks, run)
        self.failures = Failures(num_ranks)
        self.end: End | None = None
        """How the household will end; once set nobody is started any more."""
        self.is_over = False
        self._can_join = False
        """Whether the program was seen to join: then a newcomer that has not done so yet will."""
        self._stop_signal = 0
        self._stop_at = 0.0
        self._blamed: int | None = None
        """The rank whose end is why the run cannot succeed."""
        self._bad_exits: dict[int, Exit] = {}
        """Of each rank the first one that did not end well."""
        self._story: list[str] = []
        self._retry_at: float | None = None
        """When the next generation may be formed."""
        self._has_given_up = False
        self._kill_at: float | None = None
        """When those that were told to save and leave are killed."""
        self._entries = Entries()
        self._training = Training()

    @property
    def due(self) -> float | None:
        """When `passed` wants to be called."""
        times = [at for at in (self._retry_at, self._kill_at) if at is not None]
        if self.end is None and not self._stop_signal:
            times += [at for at, _ in self._expected()]
        return min(times, default=None)

    @property
    def saved_step(self) -> int | None:
        """The newest step whose save the person was told of; others may have been saved on the way."""
        return None if self._training.saved is None else self._training.saved[0]

    # --- events -----------------------------------------------------------------------------------

    def begin(self, at: float = 0.0) -> list[Action]:
        """Form the first generation."""
        return self._form(at)

    def exited(self, attempt: str, exit: Exit, at: float) -> list[Action]:
        """A process has ended and is reaped; whatever it had said was given to `said` before."""
        member = self._member(attempt, f"exited {attempt} {exit.code} {exit.signal}")
        if member.exit is not None:
            raise InvariantError(f"{attempt} ended twice", story=self._story)
        member.exit = exit
        if not exit.is_well and not member.killed_for:
            self._bad_exits.setdefault(member.rank, exit)
        if (self._stop_signal or member.is_saver) and is_answer(exit.code):
            self._training.is_closed = True  # it has failed to save and says why
        if member.is_saver:
            self._note_saver_end(member, at)
        frame = member.peer_frame()
        actions: list[Action] = [Tell(other.attempt, frame) for other in self.members.living()]
        if self.end is None and not self._stop_signal and not exit.is_well:
            actions += self._count(member, at)
        return actions + self._go_on(at)

    def said(self, attempt: str, message: Mapping[str, Any], at: float = 0.0) -> list[Action]:
        """A process said something over its link."""
        member = self._member(attempt, f"said {attempt} {message.get('say')}")
        what = message.get("say")
        if what == "join":
            member.has_joined = self._can_join = True
        elif what == "step":
            member.has_progressed = True
            self._training.note_step(message.get("step"))
            self.failures.note_step()
        elif what in ("bounds", "enter", "saved"):
            return self._note_training(member, message, at)
        elif what == "saving":
            return self._note_advance(message, at)
        elif what == "warning":
            return [Announce(str(message.get("text") or ""))]
        elif what == "suspect":
            return self._suspect(message)
        elif what == "fail" and self.end is None:
            return self._finish(self._end_as_told(message))
        return []

    def _end_as_told(self, message: Mapping[str, Any]) -> End:
        """A member says that the run cannot succeed, or what is wrong with its input."""
        reason = str(message.get("reason") or "no reason given")
        text = f"the run cannot succeed: {reason}"
        rank, code = message.get("rank"), message.get("code")
        if isinstance(rank, int):
            self._blamed = rank
            return End(1, text)
        # What a rank raised was only named when it was started again: here it is shown whole.
        error = self.failures.last_error
        last = error.strip().rpartition("\n")[2]
        cause = error if last and last in reason else ""
        if isinstance(code, int) and 0 < code < 256:
            return End(code, text, cause, is_refusal=True)
        return End(1, text, cause)

    def _note_training(self, member: Member, message: Mapping[str, Any], at: float) -> list[Action]:
        """What a member's trainer says of itself."""
        if message["say"] == "bounds":
            self._training.keeps_state = bool(message.get("keeps_state"))
            self._entries.note_bounds(message)
        elif message["say"] == "enter":
            member.has_entered = self._training.has_entered = True
            self._entries.note_entry(at, at - member.started_at)
        else:
            is_asked = bool(self._stop_signal) or self.end is not None
            said = self._training.note_save(member.attempt, message, is_stopping=is_asked)
            return [Announce(said)] if said else []
        return []

    def _note_advance(self, message: Mapping[str, Any], at: float) -> list[Action]:
        """The save of one that is to leave goes on: nobody is killed meanwhile."""
        if self._kill_at is not None:
            self._kill_at = max(self._kill_at, at + GRACE_SECONDS)
        said = self._training.note_advance(message, at, since=self._stop_at)
        return [Announce(said)] if said else []

    def interrupted(self, number: int, at: float = 0.0) -> list[Action]:
        """A person or the system asks the household to stop: first gently, then at once."""
        self._remember(f"interrupted {number}")
        living = self.members.living()
        if self._stop_signal:
            if not self._insists(number, at):
                return []
            self._training.is_closed = True
            return [Signal(member.attempt, SIGKILL) for member in living]
        self._stop_signal, self._stop_at = number, at
        again = _INSISTING[number]
        what = "saving what is committed" if self._training.steps else "stopping"
        than = "without saving" if self._training.steps else "at once"
        # A saver was asked from its beginning; before it has come to its trainer the signal would end it.
        asked = [member for member in living if not member.is_saver]
        actions: list[Action] = [Signal(member.attempt, SIGTERM) for member in asked]
        actions.append(Announce(f"{what} ({again} stops {than})"))
        return actions + self._go_on(at)

    def _insists(self, number: int, at: float) -> bool:
        """Whether a further signal asks to end at once, and is not one more sign of the first wish."""
        if number == SIGHUP:
            return False  # a terminal that closes sends two: its shell's, and the kernel's when the shell ends
        return number == self._stop_signal or at - self._stop_at >= _ONE_WISH_SECONDS

    def passed(self, at: float) -> list[Action]:
        """The time `due` has come."""
        self._remember(f"passed {at:.3f}")
        return self._go_on(at)

    def welcome_frames(self, attempt: str) -> list[dict[str, Any]]:
        """What a process that has just connected must know: it was told to others before."""
        return self.members.welcome_frames(self._member(attempt, f"welcome {attempt}"))

    # --- decisions ------------------------------------------------------------------------------------

    def _go_on(self, at: float) -> list[Action]:
        """What the present state asks for."""
        if self.is_over:
            return []
        living = self.members.living()
        if self.end is not None or self._stop_signal:
            self._retry_at = None
            if living and self._kill_at is not None and self._kill_at <= at:
                self._kill_at = at + GRACE_SECONDS
                return [_kill(member, "late") for member in living]
            if living:
                return []
            if self._needs_saver():
                return self._start_saver(at)
            return self._close(self._failed() if self.end is not None else self._stopped())
        if all(member.has_ended_well for member in self.members):
            return self._close(End(0))
        overdue = self._end_overdue(at)
        if overdue:
            return overdue
        if not any(member.has_failed for member in self.members):
            return []
        staying = [m for m in living if m.has_joined or self._can_join]
        if len(staying) < len(living):
            return [_kill(m, "others") for m in living if not (m.has_joined or m.killed_for)]
        if any(member.killed_for for member in living):
            return []  # its end is awaited first: a generation begins when all who leave are reaped
        if self._retry_at is not None and at < self._retry_at:
            return []
        return self._form(at)

    def _form(self, at: float) -> list[Action]:
        """The next generation: survivors are told, all other places get a new process."""
        self._retry_at = None
        members = self.members
        survivors, new = members.form(at)
        actions: list[Action] = [Tell(m.attempt, members.reform_frame(m)) for m in survivors]
        actions += [Start(m.attempt, m.rank, m.generation, members.num_ranks) for m in new]
        self._remember(f"formed {members.generation}")
        return actions

    def _start_saver(self, at: float) -> list[Action]:
        """Nobody is left who could save: one process, alone, finds the state, saves it and leaves."""
        if self._kill_at is not None:
            self._kill_at = at + self._entries.saver_seconds()
        new = self.members.form_of_saver(at)
        self._remember(f"saver {new.attempt}")
        return [Start(new.attempt, 0, new.generation, 1, is_saving=True)]

    def _needs_saver(self) -> bool:
        ended_well = {member.attempt: member.has_ended_well for member in self.members}
        return self._training.needs_saver(ended_well)

    def _note_saver_end(self, member: Member, at: float) -> None:
        exit = member.exit
        assert exit is not None
        if member.killed_for:
            self._training.note_saver_end(
                f"took longer than {at - member.started_at:.0f} s", is_unlucky=False
            )
        else:
            is_unlucky = was_unlucky(exit.code, exit.signal)
            self._training.note_saver_end(exit.describe(), is_unlucky=is_unlucky)

    def _expected(self) -> list[tuple[float, Member]]:
        """When each member that has not come to train should have."""
        late = [m for m in self.members.living() if not (m.has_entered or m.killed_for)]
        found = ((self._entries.expected_at(member.started_at), member) for member in late)
        return [(at, member) for at, member in found if at is not None]

    def _end_overdue(self, at: float) -> list[Action]:
        """A member that hangs before it trains is known to no peer: it is killed here."""
        actions: list[Action] = []
        for member in [member for due, member in self._expected() if due <= at]:
            seconds = at - member.started_at
            reason = f"rank {member.rank} has not come to train in {seconds:.0f} s, as others have"
            actions += _kill_hung(member, reason)
        return actions

    def _count(self, member: Member, at: float) -> list[Action]:
        """One more failure: go on within the budget, else end with it."""
        assert member.exit is not None
        exit = member.exit
        if exit.is_refusal:
            return self._finish(End(exit.code or 1, "", exit.error, is_refusal=True))
        failure = self._classify(member)
        if not failure:
            return []
        life = self._life_of(member, at)
        self.failures.add(failure, at, life, self.members.generation)
        who = f"rank {member.rank} {exit.describe()}"
        why = self.failures.why_given_up(failure, life)
        if why:
            return self._give_up(End(exit.shell_code, f"{who}; {why}", exit.error), at)
        wait = self.failures.wait_seconds()
        self._retry_at = at + wait if wait else self._retry_at
        which = self.failures.describe_restart(failure)
        where = f"; its traceback is in {ERRORS}" if exit.error else ""
        return [Announce(f"{who}; it is started again ({which}){where}")]

    def _life_of(self, member: Member, at: float) -> Life:
        assert member.exit is not None
        return Life(
            error=member.exit.error,
            since=min(member.places),
            is_long=at - member.started_at >= LONG_SECONDS,
            has_progressed=any(each.has_progressed for each in self.members),
        )

    def _classify(self, member: Member) -> str:
        """The budget that a failure is charged to; empty: it followed from another one, or we did it."""
        assert member.exit is not None
        if member.killed_for:
            return "hang" if member.killed_for == "hang" else ""
        if member.exit.signal in (SIGKILL, SIGTERM):
            return "host"
        has_other = any(other.has_failed for other in self.members if other is not member)
        return "" if has_other and is_peer_loss(member.exit.error) else "user"

    def _suspect(self, message: Mapping[str, Any]) -> list[Action]:
        """A member does not answer the others: it is killed, so that its memory can be given away."""
        generation, rank = message.get("generation"), message.get("rank")
        for member in self.members.living():
            if isinstance(generation, int) and member.places.get(generation) == rank:
                if member.killed_for or self.end is not None:
                    return []
                reason = message.get("reason") or "no reason given"
                return _kill_hung(member, f"rank {rank} hangs: {reason}")
        return []

    def _give_up(self, end: End, at: float) -> list[Action]:
        """End it after too many failures; what was trained is saved, by those who live or by one more."""
        self._has_given_up = True
        if not self._needs_saver():
            return self._finish(end)
        self.end = end
        self._retry_at, self._kill_at = None, at + GRACE_SECONDS
        return [Signal(member.attempt, SIGTERM) for member in self.members.living()]

    def _finish(self, end: End) -> list[Action]:
        """End all that live; the household is over when they are reaped."""
        self.end = end
        self._retry_at, self._training.is_closed = None, True
        living = self.members.living()
        if not living:
            return self._close(self._failed())
        return [Signal(member.attempt, SIGKILL) for member in living]

    def _failed(self) -> End:
        """Why it failed, and if it has given up what that has cost."""
        assert self.end is not None
        loss = self._training.describe_loss() if self._has_given_up else ""
        return replace(self.end, text=f"{self.end.text}{loss}")

    def _stopped(self) -> End:
        """Asked to stop: not a success, and a failure if a process failed at leaving."""
        for member in self.members:
            exit = member.exit
            if exit is not None and exit.code and exit.error:
                who = f"rank {member.rank} {exit.describe()}"
                return End(exit.code, f"{who}; it had been asked to stop", exit.error)
        text = f"stopped{self._training.describe_loss()}"
        return End(128 + self._stop_signal, text, is_stop=True)

    def _close(self, end: End) -> list[Action]:
        exit = None if self._blamed is None else self._bad_exits.get(self._blamed)
        if exit is not None:
            text = f"{end.text} (rank {self._blamed} {exit.describe()})"
            end = End(exit.shell_code, text, exit.error)
        self.end = end
        self.is_over = True
        return [end]

    # --- the story ------------------------------------------------------------------------------------

    def _member(self, attempt: str, event: str) -> Member:
        self._remember(event)
        member = self.members.find(attempt)
        if member is None:
            raise InvariantError(f"no member is {attempt}", story=self._story)
        return member

    def _remember(self, event: str) -> None:
        self._story.append(event)
        del self._story[:-_MOST_STORY]


def _kill(member: Member, why: str) -> Signal:
    member.killed_for = why
    return Signal(member.attempt, SIGKILL)


def _kill_hung(member: Member, reason: str) -> list[Action]:
    kill = _kill(member, "hang")
    return [TakeStacks(reason), Announce(f"{reason}; it is killed"), kill]
