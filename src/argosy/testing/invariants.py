"""Invariants: what must hold after every event of a simulated cluster, whatever fails.

Fed with what really happens to processes and with what is durable in the log; each check costs a few dictionary lookups.
A broken one raises InvariantError with the last things that happened.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from argosy.control.coordinator import PUT_ASIDE
from argosy.errors import InvariantError
from argosy.protocol.facts import (
    AttemptExited,
    AttemptPlanned,
    AttemptStarted,
    AttemptSuspected,
    CommandAccepted,
    CommandDone,
    Event,
    GangResized,
    GenerationFormed,
    Note,
    RunEnded,
    RunsForgotten,
    RunSubmitted,
)
from argosy.testing.processes import SimulatedProcess

Gang = tuple[str, str]


class Invariants:
    """The truth about one simulated cluster."""

    def __init__(self) -> None:
        self.story: deque[str] = deque(maxlen=60)
        self.num_checks = 0
        self.live: dict[str, SimulatedProcess] = {}
        self.commands: dict[str, str] = {}
        self._slots: dict[tuple[str, str, int], str] = {}
        self._of_run: dict[str, dict[str, None]] = {}
        self._ever: set[str] = set()
        self._planned: set[str] = set()
        self._ended: set[str] = set()
        self._runs: set[str] = set()
        self._members: dict[tuple[str, str, int], list[int]] = {}
        self._newest: dict[Gang, GenerationFormed] = {}
        self._resizes: dict[str, GangResized] = {}
        self._gang_of: dict[str, Gang] = {}
        self._suspected: set[str] = set()
        self._ranks: dict[tuple[str, str, int, int], str] = {}
        self._gangs: dict[Gang, dict[str, None]] = {}
        self._sources: set[tuple[str, int]] = set()
        self._seq = 0
        self._started: set[str] = set()
        self._exited: set[str] = set()
        self._emitted: dict[tuple[str, int], dict[str, Any]] = {}

    def tell(self, text: str) -> None:
        """Remember something for the story."""
        self.story.append(text)

    def _check(self, holds: bool, what: str) -> None:
        self.num_checks += 1
        if not holds:
            raise InvariantError(what, story=list(self.story))

    # --- processes ----------------------------------------------------------------------------------------------

    def started(self, process: SimulatedProcess) -> None:
        """A process exists from now on."""
        name = process.attempt
        self.tell(f"{process.host} started {name} generation {process.generation} {process.state}")
        self._check(name not in self._ever, f"{name} was started twice")
        self._check(name in self._planned, f"{name} was started before its plan was durable")
        self._check(process.run not in self._ended, f"{name} was started after its run had ended")
        slot = (process.run, process.role, process.index)
        self._check(slot not in self._slots, f"{name} and {self._slots.get(slot)} are both alive")
        self._ever.add(name)
        self._slots[slot] = name
        self.live[name] = process
        self._of_run.setdefault(process.run, {})[name] = None
        if process.is_gang:
            self._gangs.setdefault((process.run, process.role), {})[name] = None
        if process.rank is not None:
            self.ranked(process)

    def ranked(self, process: SimulatedProcess) -> None:
        """A process takes a rank in a generation."""
        key = (process.run, process.role, process.generation)
        members = self._members.get(key)
        self._check(
            members is not None, f"{process.attempt} is in a generation that is not durable"
        )
        assert members is not None
        assert process.rank is not None
        self._check(
            process.rank < len(members) and members[process.rank] == process.index,
            f"{process.attempt} has rank {process.rank}, which is not its own",
        )
        owner = self._ranks.setdefault((*key, process.rank), process.attempt)
        self._check(owner == process.attempt, f"{process.attempt} and {owner} have the same rank")
        for name in self._gangs.get((process.run, process.role), ()):
            other = self.live[name]
            if other.state == "parked" or other.generation >= process.generation:
                continue
            self._check(
                (other.is_joined or other.kind in ("joiner", "trainer")) and other.index in members,
                f"{process.attempt} runs in generation {process.generation} while {name} "
                f"of generation {other.generation} is not reaped",
            )

    def exited(self, process: SimulatedProcess) -> None:
        """A process was reaped, its tree swept."""
        self.tell(f"{process.host} reaped {process.attempt}")
        del self.live[process.attempt]
        del self._slots[process.run, process.role, process.index]
        del self._of_run[process.run][process.attempt]
        if process.is_gang:
            del self._gangs[process.run, process.role][process.attempt]

    def emitted(self, keeper: str, number: int, event: dict[str, Any]) -> None:
        """A keeper gave an event a number."""
        if event["event"] in ("started", "exited"):
            self._emitted[keeper, number] = event

    # --- the log ------------------------------------------------------------------------------------------------

    def durable(self, event: Event) -> None:
        """An event is in the log for good."""
        fact = event.fact
        self.story.append(f"log {event.seq} {fact}")
        self._check(event.seq == self._seq + 1, f"event {event.seq} follows {self._seq}")
        self._seq = event.seq
        if event.source is not None:
            self._check(event.source not in self._sources, f"{event.source} is in the log twice")
            self._sources.add(event.source)
        if isinstance(fact, AttemptPlanned):
            self._planned.add(fact.attempt)
            self._gang_of[fact.attempt] = (fact.run, fact.role)
        elif isinstance(fact, GenerationFormed):
            self._check(len(set(fact.members)) == len(fact.members), f"{fact} has a member twice")
            self._members[fact.run, fact.role, fact.generation] = fact.members
            self._newest[fact.run, fact.role] = fact
        elif isinstance(fact, AttemptStarted):
            self._check(fact.attempt not in self._started, f"{fact.attempt} started twice")
            self._started.add(fact.attempt)
        elif isinstance(fact, AttemptExited):
            self._check(fact.attempt not in self._exited, f"{fact.attempt} exited twice")
            self._check(fact.attempt not in self.live, f"{fact.attempt} exited and is alive")
            self._exited.add(fact.attempt)
        elif isinstance(fact, RunEnded):
            left = self._of_run.get(fact.run)
            self._check(not left, f"run {fact.run} ended with {list(left or ())} alive")
            self._ended.add(fact.run)
        elif isinstance(fact, RunSubmitted):
            self._check(fact.run not in self._runs, f"the id of run {fact.run} was given twice")
            self._runs.add(fact.run)
        elif isinstance(fact, Note):
            # In a cluster it costs one run; here it is the bug that is looked for.
            self._check(not fact.text.startswith(PUT_ASIDE), fact.text)
        elif isinstance(fact, RunsForgotten):
            early = [run for run in fact.runs if run not in self._ended]
            self._check(not early, f"{early} were forgotten and have not ended")
        elif isinstance(fact, CommandAccepted):
            self._check(fact.command not in self.commands, f"{fact.command} accepted twice")
            self.commands[fact.command] = ""
        elif isinstance(fact, CommandDone | GangResized | AttemptSuspected):
            self._durable_change(fact)

    def _durable_change(self, fact: CommandDone | GangResized | AttemptSuspected) -> None:
        """Gangs that are resized or lose a suspect, and what became of commands."""
        if isinstance(fact, GangResized):
            self._check(fact.run not in self._ended, f"{fact} of a run that has ended")
            self._resizes[fact.command] = fact
            return
        if isinstance(fact, AttemptSuspected):
            newest = self._newest[self._gang_of[fact.attempt]]
            # Members may still work in a generation that is past: they name a process.
            self._check(newest.generation >= fact.generation, f"{fact} is before its time")
            self._check(fact.attempt not in self._suspected, f"{fact.attempt} suspected twice")
            self._suspected.add(fact.attempt)
            return
        self._check(self.commands.get(fact.command) == "", f"{fact.command} done twice")
        self.commands[fact.command] = fact.outcome
        resize = self._resizes.get(fact.command)
        if resize is not None and fact.outcome == "ok":
            newest = self._newest[resize.run, resize.role]
            has_size = len(newest.members) == resize.size
            self._check(has_size, f"{resize} is done, and {newest} is formed")

    def taken(self, cursors: dict[str, int]) -> None:
        """How far a controller that read the log believes to be with each source."""
        for source, number in self._sources:
            self._check(
                cursors.get(source, 0) >= number,
                f"{number} of {source} was logged, and a replay would take it again",
            )

    def at_rest(self, dead_keepers: set[str]) -> None:
        """Nothing is under way any more: what must have happened by now."""
        self._check(not self.live, f"{list(self.live)} are alive at the end")
        open_commands = [name for name, outcome in self.commands.items() if not outcome]
        self._check(not open_commands, f"{open_commands} were accepted and have no outcome")
        for (keeper, number), event in self._emitted.items():
            name = event["attempt"]
            table = self._exited if event["event"] == "exited" else self._started
            self._check(
                keeper in dead_keepers or name in table,
                f"the log misses that {name} {event['event']} ({keeper} {number})",
            )
        missing = self._planned - self._exited
        self._check(not missing, f"{missing} were planned and never ended")
