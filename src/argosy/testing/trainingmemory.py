"""TrainingMemory: what the members of a simulated training run share, as plain objects in place of arenas.

Rows of the roster, entries, blocks of lanes, votes, pages of the next version, the state word, tallies of evaluations. Every decision about a word is taken by the functions that the real
exchange and the roster use (move/rounds.py, move/trees.py, train/musters.py); every write is seen by the truth. It outlives every member, as an arena of the run does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from argosy.move import rounds, trees
from argosy.move.rounds import Round, State
from argosy.move.trees import Node
from argosy.testing.trainingtruth import Page, Sample, TrainingTruth
from argosy.train.musters import Muster

NUM_SLOTS = 3
RING = 24
"""Records of each rank in the tally."""


class Block(NamedTuple):
    """Finished lanes."""

    node: Node
    samples: tuple[Sample, ...]


@dataclass(slots=True)
class Version:
    """A slot of the state."""

    pages: dict[str, Page] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=lambda: {"step": 0, "turn": 0, "state": 0})
    outcome: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """One lane of an evaluation in the tally."""

    key: Any
    lane: int
    pid: int
    sums: list[tuple[int, int]] | None = None
    """None while it is computed."""
    progress: int = 0


class Numbers:
    """Words that nobody else changes while one looks at them."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def load(self, offset: int) -> int:
        """A word."""
        return self._numbers.get(offset, 0)

    def swap(self, offset: int, expected: int, desired: int) -> bool:
        """Compare-and-swap."""
        is_same = self.load(offset) == expected
        if is_same:
            self._numbers[offset] = desired
        return is_same


class TrainingMemory:
    """The shared memory of one run on one host."""

    def __init__(self, truth: TrainingTruth) -> None:
        self.truth = truth
        self.num_lanes, self.costs = truth.num_lanes, truth.costs
        self.processes: dict[int, Any] = {}
        """All that have ever enlisted, by their ids."""
        self.muster = Muster(Numbers(), 0, truth.num_lanes, self._start_of)
        self.entered: dict[int, int] = {}
        self.state = State(0, 0)
        self.versions = [Version() for _ in range(NUM_SLOTS)]
        self.versions[0].pages = dict.fromkeys(self.costs, Page(None, ()))
        self.weights = dict.fromkeys(self.costs, 0)
        self.done: dict[str, int] = {}
        """The newest version that a page is done of."""
        self.blocks: dict[Round, dict[Node, Block]] = {}
        self.votes: dict[Round, dict[str, bool]] = {}
        self.again = (0, 0)
        self.stop = 0
        self.saved = 0
        """The newest step that is saved."""
        self.failures: dict[tuple[int, int, str], str] = {}
        self.agreed: dict[tuple[int, str], Any] = {}
        self.snapshot: tuple[int, int] | None = None
        """The pinned version and its slot."""
        self.signs: dict[tuple[str, int], tuple[int, int]] = {}
        """What processes show of themselves, by kind and rank: the process id, and a count that grows."""
        self.records: dict[tuple[int, int], Record] = {}
        self.totals: dict[Any, Mapping[int, Any]] = {}
        self.turns: dict[int, int] = {}
        """The state of user code that each turn began with."""
        self.asked: dict[int, tuple[int, int]] = {}
        self.waiting: dict[int, Callable[[], None]] = {}
        """Who sleeps until something happens, by process id."""

    def tell(self) -> None:
        """Wake all who wait."""
        waiting, self.waiting = self.waiting, {}
        for wake in waiting.values():
            wake()

    # --- the roster -----------------------------------------------------------------------------------------------

    def enlist(self, generation: int, rank: int, process: Any) -> None:
        """A process is ready for a generation."""
        self.processes[process.pid] = process
        self.muster.enlist(generation, rank, process.pid)

    def process_of(self, generation: int, rank: int) -> Any:
        """Who has enlisted as that rank; None: nobody has."""
        return self.processes.get(self.muster.pid_of(generation, rank))

    def _start_of(self, pid: int) -> int:
        return int(self.processes[pid].is_alive)

    def attempt_of(self, version: int) -> int:
        """How often the step from this version was computed in vain."""
        return self.again[1] if self.again[0] == version else 0

    def compute_again(self, version: int, attempt: int) -> None:
        """The step from this version is computed again."""
        self.again = max(self.again, (version, attempt))

    def note_failure(self, step: int, lane: int, text: str, author: str) -> bool:
        """Whether this has failed like that in another process before."""
        return self.failures.setdefault((step, lane, text), author) != author

    def sign(self, kind: str, rank: int, pid: int, count: int) -> None:
        """A process shows, under its rank, that it looks up, gets on, or is between two steps (an odd count)."""
        self.signs[kind, rank] = (pid, count)

    def sign_of(self, kind: str, pid: int) -> int:
        """The last sign of a process, whatever rank it has: it or who looks may not know yet that it has another."""
        counts = [c for (k, _), (owner, c) in self.signs.items() if (k, owner) == (kind, pid)]
        return max(counts, default=0)

    # --- a round --------------------------------------------------------------------------------------------------

    @property
    def committed(self) -> Version:
        """The state that is committed."""
        return self.versions[self.state.slot]

    def is_over(self, round: Round) -> bool:
        """Whether others have finished a round."""
        done = [self.done.get(name, 0) > round.version for name in self.costs]
        return rounds.is_over(self.state, round, done)

    def publish(self, round: Round, block: Block) -> None:
        """A block is finished; only rounds from the committed version on are looked at."""
        for past in [each for each in self.blocks if each.version < self.state.version]:
            del self.blocks[past]
            self.votes.pop(past, None)
        known = self.blocks.setdefault(round, {}).setdefault(block.node, block)
        same = [sample._replace(is_finite=True) for sample in known.samples]
        self.truth.check(
            round.version < self.state.version
            or same == [sample._replace(is_finite=True) for sample in block.samples],
            lambda: f"{block} and {known} are the same lanes of {round}",
        )

    def missing(self, round: Round) -> list[int]:
        """Lanes that no finished block has."""
        return trees.missing(self.blocks.get(round, {}), self.num_lanes)

    def gather(self, round: Round) -> tuple[Sample, ...] | None:
        """All lanes from the blocks that cover them; None while some are missing."""
        blocks = self.blocks.get(round, {})
        if trees.missing(blocks, self.num_lanes):
            return None
        cover = trees.cover(blocks, self.num_lanes)
        return tuple(sample for node in cover for sample in blocks[node].samples)

    def unvoted(self, round: Round) -> list[str]:
        """Pages whose vote is missing."""
        votes = self.votes.get(round, {})
        return [name for name in self.costs if name not in votes]

    # --- versions -------------------------------------------------------------------------------------------------

    def begin(self, version: int) -> int | None:
        """The slot of the next version; None while none is free."""
        pinned = {self.snapshot[1]} if self.snapshot is not None else set()
        begun = rounds.begun(self.state, pinned, NUM_SLOTS)
        if begun is None or begun.version + 1 != version:
            return None
        self.state = begun
        return begun.coming

    def undone(self, version: int) -> list[str]:
        """Pages that the version lacks."""
        return [name for name in self.costs if self.done.get(name, 0) < version]

    def write(self, version: int, slot: int, name: str, page: Page) -> None:
        """A page of the next version is done; whoever makes it again makes the same."""
        if self.state.version >= version:
            return
        if self.done.get(name, 0) >= version:
            known = self.versions[slot].pages[name]
            self.truth.check(known == page, lambda: f"{page} of {name} is not the {known} before")
        self.versions[slot].pages[name] = page
        self.done[name] = version

    def flip(self, version: int, who: str) -> bool:
        """Commit the version if all its pages are done; whether it is committed."""
        if self.state.version >= version:
            return True
        done = [i for i, name in enumerate(self.costs) if self.done.get(name, 0) >= version]
        state = rounds.flipped(self.state, version, done, len(self.costs))
        if state is None:
            return False
        self.state = state
        now = self.committed
        self.truth.flipped(who, version, now.pages, now.ledger, now.outcome)
        self.tell()
        return True

    def keep_snapshot(self, every: int) -> None:
        """Pin the committed version when its turn has come."""
        if self.snapshot is None or int(self.committed.ledger["step"]) % every == 0:
            self.snapshot = (self.state.version, self.state.slot)

    # --- evaluations ----------------------------------------------------------------------------------------------

    def entries(self, key: Any) -> list[Record]:
        """What is known of an evaluation's lanes."""
        return [record for record in self.records.values() if record.key == key]
