"""A checkpoint into a state: names matched by rules, boxes turned into reads, every byte checked on its way.

The state may be laid out in any way over any number of processes: each reads what it holds. Shapes, dtypes and names are compared before the first
byte moves, so that a refusal leaves the state as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from argosy.checkpoint import reads
from argosy.checkpoint.books import Book, Part
from argosy.checkpoint.entries import Entry
from argosy.checkpoint.fetches import THREADS, Statistics
from argosy.checkpoint.headers import FROM_FILE
from argosy.checkpoint.neighbours import Visit
from argosy.checkpoint.opened import Opened
from argosy.checkpoint.reads import Request
from argosy.config.nearest import nearest
from argosy.errors import ConfigError, MismatchError
from argosy.move.dtypes import can_cast

Strictness = Literal["exact", "subset", "any"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How names and dtypes of a checkpoint may differ from the state's.

    `exact`: both have the same tensors under the keys that are loaded. `subset`: all of the state is in the checkpoint, which may have more.
    `any`: what is in both is loaded. `rename` turns the state's names of a module's tensors into the checkpoint's: (regular expression, replacement) pairs, or a
    function. What an optimizer keeps for a parameter follows the parameter.
    """

    strict: Strictness = "exact"
    rename: Sequence[tuple[str, str]] | Callable[[str], str] = ()
    cast: bool = False
    threads: int = THREADS

    def __post_init__(self) -> None:
        if self.strict not in get_args(Strictness):
            raise ConfigError(
                f"strict = {self.strict!r}", fix="use 'exact', 'subset' or 'any' (what is in both)"
            )
        if callable(self.rename):
            return
        for pair in self.rename:
            try:
                pattern, replacement = pair
                re.sub(pattern, replacement, "")
            except (re.error, TypeError, ValueError) as failure:
                raise ConfigError(
                    f"rename has {pair!r}: {failure}",
                    fix=r"give (regular expression, replacement) pairs: [(r'^backbone\.', '')], or a function",
                )

    def stored_name(self, name: str) -> str:
        """What the checkpoint calls it."""
        if callable(self.rename):
            return self.rename(name)
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return name


@dataclass(kw_only=True)
class Loaded:
    """What a load came to."""

    step: int
    where: str = ""
    """The directory or the address that it came from."""
    values: dict[str, Any] = field(repr=False)
    """What each key of the state has become; numbers and texts are found here alone."""
    missing: list[str] = field(default_factory=list)
    """Values and tensors of the state that the checkpoint lacks."""
    unused: list[str] = field(default_factory=list)
    """Tensors under the loaded keys that the state has no place for."""
    statistics: Statistics = field(default_factory=Statistics)
    """Bytes that were read from the files, and those that ranks of this host read for each other."""
    skipped: list[str] = field(default_factory=list)
    """Newer checkpoints that could not be used, and why."""

    @property
    def how(self) -> str:
        """How this process read: "alone", or "shared" when ranks of the host read for each other."""
        is_shared = self.statistics.bytes_given or self.statistics.bytes_taken
        return "shared" if is_shared else "alone"


def load(
    opened: Opened,
    parts: Mapping[str, Part],
    rules: Rules | None = None,
    *,
    rank: int = 0,
    visit: Visit | None = None,
) -> Loaded:
    """Fill the parts of a state from a checkpoint, with a visit together with other processes of this host."""
    rules = rules or Rules()
    book = Book(rank, rename=rules.stored_name)
    stored = opened.trees()
    lacking = _lacking(opened, parts, stored, rules)
    with opened.naming_tensors():
        for key, part in parts.items():
            part.prepare(book, opened, stored.get(key))
    found, missing = _match(opened, book, rules)
    unused = _unused(opened, book, set(parts), rules)
    work: dict[str, list[Request]] = {}
    for entry, name in found:
        for held in entry.held:
            for file, request in opened.requests(name, held, entry.buffers[held.buffer]):
                work.setdefault(file, []).append(request)
    with opened.naming_tensors():
        jobs = [(opened.stored(file), requests) for file, requests in sorted(work.items())]
        statistics = reads.read(jobs, threads=rules.threads, files=opened.files, visit=visit)
    values = {key: part.finish() for key, part in parts.items()}
    return Loaded(
        step=opened.step,
        values=values,
        missing=[*lacking, *missing],
        unused=unused,
        statistics=statistics,
    )


def _lacking(
    opened: Opened, parts: Mapping[str, Part], stored: Mapping[str, Any], rules: Rules
) -> list[str]:
    """Keys of values under which the checkpoint has none: who went on without would not notice."""
    lacking = [
        key for key, part in parts.items() if key not in stored and getattr(part, "is_value", False)
    ]
    if lacking and rules.strict != "any":
        near = nearest(lacking[0], list(stored))
        raise MismatchError(
            f"{opened.path.name} has nothing under {lacking[0]!r}"
            + (f"; the nearest it has is {near!r}" if near else ""),
            fix='leave that key out of the load, or give Rules(strict="any") to keep what the state has',
        )
    return lacking


def _match(opened: Opened, book: Book, rules: Rules) -> tuple[list[tuple[Entry, str]], list[str]]:
    """Entries with the checkpoint's names, and those that it lacks."""
    known = set(opened.names())
    found, missing = [], []
    for entry in book.entries:
        name = book.stored_name(entry.name)
        if name not in known:
            missing.append(entry.name)
            continue
        _compare(opened, entry, name, rules)
        found.append((entry, name))
    if missing and rules.strict != "any":
        near = nearest(book.stored_name(missing[0]), known)
        raise MismatchError(
            f"{opened.path.name} lacks {len(missing)} tensors of the state, first {missing[0]!r}"
            + (f"; the nearest it has is {near!r}" if near else ""),
            fix='load with Rules(rename=…), or Rules(strict="any") to keep what the state has',
        )
    return found, missing


def _compare(opened: Opened, entry: Entry, name: str, rules: Rules) -> None:
    record = opened.record(name)
    if record.shape != entry.shape or record.meaning != entry.meaning:
        raise MismatchError(
            f"{entry.name} has shape {entry.shape} in the state and {record.shape} in {opened.path.name}",
            fix="load into a model of the same shape, or leave the tensor out",
        )
    stored = FROM_FILE[record.dtype]
    if stored != entry.dtype and not (rules.cast and can_cast(stored, entry.dtype)):
        raise MismatchError(
            f"{entry.name} is {entry.dtype} in the state and {stored} in {opened.path.name}",
            fix="load with Rules(cast=True) if rounding is wanted"
            if can_cast(stored, entry.dtype)
            else "load into a state of the same dtype",
        )


def _unused(opened: Opened, book: Book, keys: set[str], rules: Rules) -> list[str]:
    """Tensors of the loaded keys that nothing was filled from."""
    taken = {book.stored_name(entry.name) for entry in book.entries}
    taken |= {book.stored_name(name) for name in book.aliases}
    taken |= {opened.manifest.aliases.get(name, name) for name in taken}
    own_rank = f"rank-{book.rank:05d}/"
    unused = []
    for name, record in opened.manifest.tensors.items():
        head, slash, rest = name.partition("/")
        key = head if slash or record.kind in ("optimizer", "extra") else "model"
        is_other_rank = rest.startswith("rank-") and not rest.startswith(own_rank)
        if key in keys and name not in taken and not is_other_rank and name not in book.read:
            unused.append(name)
    if unused and rules.strict == "exact":
        raise MismatchError(
            f"{opened.path.name} has {len(unused)} tensors that the state lacks, first {unused[0]!r}",
            fix='load with Rules(strict="subset") to leave them out',
        )
    return unused
