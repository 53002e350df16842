"""Queue: which waiting run is admitted next. Priority first, then fair share by name, then age.

The share that uses least comes first; of those that use the same, the one whose last turn is longest ago.
A run that does not fit is overtaken by smaller ones, but only so often: then the room is kept for it. Every operation
costs O(log N) in the number of waiting runs. Folded from facts by the coordinator; pure.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from argosy.config.spec import RunSpec
from argosy.control.placement import Placement, need_of

MOST_OVERTAKEN = 16
# Candidates looked at behind one that does not fit, for each decision.
MOST_LOOKED_AT = 32


_Head = tuple[float, int, int, str]
"""(use, last turn, number of the oldest run, name) of a share with waiting runs."""


@dataclass(slots=True)
class Entry:
    """A waiting run."""

    run: str
    spec: RunSpec
    seq: int
    share: str
    overtaken: int = 0
    possible: tuple[int, bool] = (-1, False)
    """Whether it would fit on empty hosts, and for which version of their sizes that was found."""


@dataclass(slots=True)
class _Share:
    """Runs of one share and priority, oldest first."""

    entries: list[tuple[int, str]] = field(default_factory=list)


class Queue:
    """All waiting runs, and what each share uses at present. Within a share runs start in order."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.entries: dict[str, Entry] = {}
        self._at_once: dict[str, Entry] = {}
        self._running: dict[str, tuple[str, float]] = {}
        self._use: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        """When each share was admitted last, counted in admissions."""
        self._num_admitted = 0
        self._levels: dict[int, dict[str, _Share]] = {}
        self._places: dict[str, int] | None = None
        self._heads: dict[int, list[_Head]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, run: str, spec: RunSpec, seq: int) -> None:
        """A run was submitted."""
        entry = Entry(run, spec, seq, spec.share or spec.name.partition("[")[0])
        self.entries[run] = entry
        self._places = None
        if not spec.queued:
            self._at_once[run] = entry
            return
        shares = self._levels.setdefault(spec.priority, {})
        share = shares.setdefault(entry.share, _Share())
        heappush(share.entries, (seq, run))
        if share.entries[0][1] == run:
            self._push_head(spec.priority, entry.share)

    def admit(self, run: str, hosts: dict[str, list[str]]) -> None:
        """A run was admitted: it uses its share from now on."""
        entry = self.entries[run]
        self.placement.take(entry.spec, hosts)
        if entry.spec.queued:
            head = next(self._candidates(), None)
            if head is not None and head.run != run:
                head.overtaken += 1
            use = _use_of(entry.spec)
            self._running[run] = (entry.share, use)
            self._take_turn(entry.share)
            self._set_use(entry.share, use)
        self.remove(run)

    def release(self, run: str, spec: RunSpec, hosts: dict[str, list[str]]) -> None:
        """An admitted run is over."""
        self.placement.give_back(spec, hosts)
        share, use = self._running.pop(run, ("", 0.0))
        if use:
            self._set_use(share, -use)

    def remove(self, run: str) -> None:
        """Admitted or cancelled: it waits no longer."""
        entry = self.entries.pop(run, None)
        self._at_once.pop(run, None)
        self._places = None
        if entry is None:
            return
        shares = self._levels.get(entry.spec.priority, {})
        share = shares.get(entry.share)
        if share is None or not entry.spec.queued:
            return
        was_head = bool(share.entries) and share.entries[0][1] == run
        while share.entries and share.entries[0][1] not in self.entries:
            heappop(share.entries)
        if not share.entries:
            del shares[entry.share]
        elif was_head:
            self._push_head(entry.spec.priority, entry.share)

    def memory(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """What past admissions have led to: their number, the shares' last turns, how often waiting runs were overtaken."""
        overtaken = {run: entry.overtaken for run, entry in self.entries.items() if entry.overtaken}
        return self._num_admitted, dict(self._turns), overtaken

    def remember(self, num_admitted: int, turns: dict[str, int], overtaken: dict[str, int]) -> None:
        """Take over what `memory` gave, for a log in which some of those admissions are missing."""
        self._num_admitted, self._turns = num_admitted, dict(turns)
        self._places = None
        for run, entry in self.entries.items():
            entry.overtaken = overtaken.get(run, 0)
        for priority, shares in self._levels.items():
            for share in shares:
                self._push_head(priority, share)

    def _take_turn(self, share: str) -> None:
        self._num_admitted += 1
        self._turns[share] = self._num_admitted
        if len(self._turns) > 64 + 2 * (len(self._use) + len(self.entries)):
            waiting = {entry.share for entry in self.entries.values()}
            kept = self._use.keys() | waiting | {share}
            self._turns = {name: turn for name, turn in self._turns.items() if name in kept}

    def _set_use(self, share: str, change: float) -> None:
        self._places = None
        use = self._use.get(share, 0.0) + change
        if use <= 1e-9:
            self._use.pop(share, None)
        else:
            self._use[share] = use
        for priority, shares in self._levels.items():
            if share in shares:
                self._push_head(priority, share)

    def _push_head(self, priority: int, share: str) -> None:
        entries = self._levels[priority][share].entries
        heads = self._heads.setdefault(priority, [])
        heappush(
            heads, (self._use.get(share, 0.0), self._turns.get(share, 0), entries[0][0], share)
        )
        if len(heads) > 64 + 4 * len(self._levels[priority]):
            self._heads[priority] = [key for key in set(heads) if self._is_current(priority, key)]
            heapify(self._heads[priority])

    def _is_current(self, priority: int, key: _Head) -> bool:
        use, turn, seq, name = key
        share = self._levels.get(priority, {}).get(name)
        if share is None or not share.entries:
            return False
        is_same_turn = self._turns.get(name, 0) == turn
        is_same_use = abs(self._use.get(name, 0.0) - use) < 1e-12
        return share.entries[0][0] == seq and is_same_turn and is_same_use

    def _candidates(self) -> Generator[Entry, None, None]:
        """Waiting runs, best first: heads of shares, then what lies behind them."""
        for priority in sorted(self._levels, reverse=True):
            heads = self._heads.get(priority, [])
            taken: list[_Head] = []
            seen: set[str] = set()
            try:
                while heads:
                    key = heappop(heads)
                    name = key[-1]
                    if name in seen or not self._is_current(priority, key):
                        continue
                    seen.add(name)
                    taken.append(key)
                    yield self.entries[self._levels[priority][name].entries[0][1]]
            finally:
                for key in taken:
                    heappush(heads, key)

    def next_admission(self) -> tuple[str, dict[str, list[str]]] | None:
        """The run to admit now and where it goes; None: nothing can start."""
        for run, entry in self._at_once.items():
            hosts = self.placement.place(entry.spec, is_accounted=False)
            if hosts is not None:
                return run, hosts
            break  # there is no host yet
        blocked: Entry | None = None
        looked_at = 0
        candidates = self._candidates()
        try:
            for entry in candidates:
                hosts = self.placement.place(entry.spec, is_accounted=True)
                if hosts is not None:
                    return entry.run, hosts
                looked_at += 1
                if blocked is None and self._is_possible(entry):
                    blocked = entry
                    if entry.overtaken >= MOST_OVERTAKEN:
                        return None  # the room that comes free is kept for it
                if looked_at >= MOST_LOOKED_AT:
                    return None
        finally:
            candidates.close()
        return None

    def unplaceable(self, errors: tuple[type[Exception], ...]) -> list[tuple[str, str]]:
        """The waiting runs that cannot even be looked at, and why."""
        found = []
        for run, entry in self.entries.items():
            try:
                self.placement.place(entry.spec, is_accounted=entry.spec.queued)
                self._is_possible(entry)
            except errors as error:
                found.append((run, repr(error)))
        return found

    def _is_possible(self, entry: Entry) -> bool:
        version = self.placement.sizes_version
        if entry.possible[0] != version:
            entry.possible = (version, self.placement.could_ever(entry.spec))
        return entry.possible[1]

    def waiting(self, run: str) -> str:
        """Why a run is not admitted, for people."""
        entry = self.entries.get(run)
        if entry is None:
            return ""
        if not self.placement.hosts:
            return "waits for a host"
        need = need_of(entry.spec)
        text = f"queued: needs {need.describe()}"
        if not self._is_possible(entry):
            return f"{text}, which is never free: {self.placement.describe()}"
        ahead = self._positions()[run]
        runs = "1 run" if ahead == 1 else f"{ahead} runs"
        free = f"{max(0.0, self.placement.free_cpus):g}"
        if need.memory:
            free += f" and {max(0, self.placement.free_memory) / (1 << 30):.1f} GiB"
        return f"{text}, {free} free, {runs} ahead"

    def in_order(self) -> list[Entry]:
        """Waiting runs as they would start if nothing ended or came: by priority, then turn and turn about by share."""
        use = dict(self._use)
        rows = []
        for entry in sorted(self.entries.values(), key=lambda entry: entry.seq):
            turn = use.get(entry.share, 0.0)
            use[entry.share] = turn + _use_of(entry.spec)
            rows.append((entry.spec.queued, -entry.spec.priority, turn, entry.seq, entry))
        return [row[-1] for row in sorted(rows, key=lambda row: row[:-1])]

    def _positions(self) -> dict[str, int]:
        """Place of each waiting run; found again only after a change."""
        if self._places is None:
            self._places = {entry.run: place for place, entry in enumerate(self.in_order())}
        return self._places


def _use_of(spec: RunSpec) -> float:
    # A run without requests counts a little: fair share orders those too.
    return need_of(spec).cpus or 0.001
