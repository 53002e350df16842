"""Where everything of an exchange lies: parameters in a flat gradient space, pages, gradient slots, words.

A page is 64 Ki elements of one parameter, half as many of float64 (its last page is short); pages are numbered through all parameters. Two processes can
share an exchange only when their layouts are equal: the digest stands in the shared header. Used by exchange.py and remote.py. Pure.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from functools import cached_property

import msgspec

from argosy.errors import ConfigError
from argosy.move.trees import Node, blocks_of

PAGE_ELEMENTS = 1 << 16
ALIGN_ELEMENTS = 16
"""Parameters begin at cache lines: owners of neighbours never write to the same one."""
MOST_LANES = 4095
MOST_RANKS = 4096
MOST_VERSIONS = 15
_MOST_TEXT = 256
_WORD = 8
_LINE = 64
_MEMORY_PAGE = 4096


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the gradient space."""

    name: str
    numel: int
    is_double: bool = False
    """Whether its elements are float64: each takes the place of two of float32."""

    @property
    def room(self) -> int:
        """Elements of float32 that it takes the place of."""
        return 2 * self.numel if self.is_double else self.numel


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What all processes of an exchange must agree on."""

    num_lanes: int
    most_ranks: int
    parameters: tuple[Parameter, ...]
    terms: tuple[str, ...] = ("loss",)
    """Names of the (sum, count) pairs that travel with each block."""
    extra_bytes: int = 0
    """Room for the caller's own bytes in each block."""
    parts: tuple[tuple[str, ...], ...] = ()
    """The parameters of each part of a step, for steps with several losses; one part has all of them if not given."""
    num_versions: int = 3
    """Slots of the state: two, and one more while something is pinned."""
    num_observers: int = 2
    """Processes that are no ranks but may pin versions."""
    num_slots: int = 0
    """Gradient slots; 0 takes one per pair of siblings and one per pair that ranks may have split: then there is always a free one.

    With fewer, finished siblings are added into one slot when room is needed."""

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def slots(self) -> int:
        """Number of gradient slots."""
        # After deaths every pair may have one finished lane, which cannot be added to anything; and each rank writes to one more slot.
        pairs, splits = (self.num_lanes + 1) // 2, min(self.most_ranks, self.num_lanes // 2)
        return self.num_slots or pairs + splits

    @property
    def num_owners(self) -> int:
        """Ranks, then observers."""
        return self.most_ranks + self.num_observers

    def name_of(self, owner: int) -> str:
        """An owner, for people."""
        is_rank = owner < self.most_ranks
        return f"rank {owner}" if is_rank else f"observer {owner - self.most_ranks}"

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First element of each parameter in the flat space."""
        found, start = [], 0
        for parameter in self.parameters:
            found.append(start)
            start += _up(parameter.room, ALIGN_ELEMENTS)
        return tuple(found)

    @cached_property
    def num_elements(self) -> int:
        """Length of the flat space, gaps included."""
        return self.starts[-1] + _up(self.parameters[-1].room, ALIGN_ELEMENTS)

    @cached_property
    def first_pages(self) -> tuple[int, ...]:
        """First page of each parameter."""
        found, page = [], 0
        for parameter in self.parameters:
            found.append(page)
            page += _pages(parameter)
        return tuple(found)

    @cached_property
    def num_pages(self) -> int:
        """Pages of all parameters."""
        return self.first_pages[-1] + _pages(self.parameters[-1])

    @cached_property
    def indices(self) -> dict[str, int]:
        """Position of each parameter by its name."""
        return {parameter.name: i for i, parameter in enumerate(self.parameters)}

    def index_of(self, name: str) -> int:
        """A parameter's position, which is also its bit in a block's bitmap."""
        found = self.indices.get(name)
        if found is None:
            raise ConfigError(
                f"the layout has no parameter {name!r}", fix="use the names it was made with"
            )
        return found

    @property
    def all_touched(self) -> int:
        """The bitmap of all parameters."""
        return (1 << len(self.parameters)) - 1

    def names_of(self, touched: int) -> frozenset[str]:
        """The parameters of a bitmap."""
        if touched == self.all_touched:
            return self.all_names
        return frozenset(p.name for i, p in enumerate(self.parameters) if touched >> i & 1)

    @cached_property
    def all_names(self) -> frozenset[str]:
        """Of all parameters."""
        return frozenset(self.indices)

    def span(self, name: str) -> tuple[int, int]:
        """(start, stop) of a parameter's place in the flat space."""
        index = self.index_of(name)
        return self.starts[index], self.starts[index] + self.parameters[index].room

    def pages_of(self, name: str) -> range:
        """The pages of a parameter."""
        index = self.index_of(name)
        first = self.first_pages[index]
        return range(first, first + _pages(self.parameters[index]))

    @cached_property
    def pages_of_parts(self) -> tuple[tuple[int, ...], ...]:
        """The pages of each part, ascending."""
        if not self.parts:
            return (tuple(range(self.num_pages)),)
        return tuple(
            tuple(sorted(page for name in part for page in self.pages_of(name)))
            for part in self.parts
        )

    def pages_of_part(self, part: int) -> tuple[int, ...]:
        """The pages that a round of this part concerns; none for a number beyond the parts: lanes without an update."""
        return self.pages_of_parts[part] if part < len(self.pages_of_parts) else ()

    @cached_property
    def double_pages(self) -> frozenset[int]:
        """The pages whose elements are float64."""
        names = [parameter.name for parameter in self.parameters if parameter.is_double]
        return frozenset(page for name in names for page in self.pages_of(name))

    def parameter_of(self, page: int) -> int:
        """Position of the parameter that a page belongs to."""
        if not 0 <= page < self.num_pages:
            raise ConfigError(f"page {page} of {self.num_pages}", fix="stay inside the pages")
        return bisect_right(self.first_pages, page) - 1

    def bounds(self, page: int) -> tuple[int, int]:
        """(start, stop) of a page's elements in the flat space."""
        if not 0 <= page < self.num_pages:
            raise ConfigError(f"page {page} of {self.num_pages}", fix="stay inside the pages")
        return self._bounds[page]

    def bounds_of(self, pages: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The bounds of some pages, in their order."""
        return tuple(self.bounds(page) for page in pages)

    @cached_property
    def _bounds(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._find_bounds(page) for page in range(self.num_pages))

    def _find_bounds(self, page: int) -> tuple[int, int]:
        index = self.parameter_of(page)
        offset = (page - self.first_pages[index]) * PAGE_ELEMENTS
        start = self.starts[index] + offset
        return start, start + min(PAGE_ELEMENTS, self.parameters[index].room - offset)

    def share(self, position: int, count: int) -> list[str]:
        """Whole parameters for one of `count` owners: contiguous, of about equal numbers of elements."""
        if not 0 <= position < count:
            raise ConfigError(f"owner {position} of {count}", fix="count owners from 0")
        total = self.num_elements
        found = []
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            middle = start + parameter.room / 2
            if min(count - 1, int(middle * count / total)) == position:
                found.append(parameter.name)
        return found

    def blocks(self, first: int, count: int) -> list[Node]:
        """The blocks that a rank with these lanes computes, in order."""
        return blocks_of(first, count, self.num_lanes)

    @cached_property
    def digest(self) -> int:
        """A number of 64 bits, never 0, equal for equal layouts only."""
        text = msgspec.json.encode(self) + b"argosy exchange 1"
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") | 1

    # --- the shared memory, in bytes ----------------------------------------------------------

    @cached_property
    def places(self) -> Places:
        """Offsets of all words and slots."""
        return _place(self)


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Byte offsets in the shared memory; words are 64 bits."""

    digest: int
    progress: int
    state: int
    entered: int
    """Per owner, a cache line: the generation it is in, plus one; and the round without an update that it has read."""
    pins: int
    """Per owner and state slot: the version it pins, plus one."""
    done: int
    refreshed: int
    vote_rounds: int
    vote_values: int
    headers: int
    header_bytes: int
    slots: int
    slot_bytes: int
    total: int


SEAL, CLAIM, VERSION, STEP, PART, FIRST, COUNT, OWNER, BITMAP = range(9)
"""Words of a block's header; the bitmap, the terms and the extra bytes follow it."""


def bitmap_words(layout: Layout) -> int:
    """Words of the bitmap of parameters."""
    return (len(layout.parameters) + 63) // 64


def _place(layout: Layout) -> Places:
    owners, pages = layout.num_owners, layout.num_pages
    extra = _up(layout.extra_bytes, _WORD)
    header = (BITMAP + bitmap_words(layout) + 2 * len(layout.terms)) * _WORD + extra
    header = _up(header, _LINE)
    slot = _up(layout.num_elements * 4, _MEMORY_PAGE)
    offset = 3 * _LINE
    offsets = {"digest": 0, "progress": _LINE, "state": 2 * _LINE}
    for name, num_bytes in (
        ("entered", owners * _LINE),
        ("pins", owners * _up(layout.num_versions * _WORD, _LINE)),
        ("done", pages * _WORD),
        ("refreshed", pages * _WORD),
        ("vote_rounds", pages * _WORD),
        ("vote_values", pages * _WORD),
        ("headers", layout.slots * header),
    ):
        offsets[name] = offset
        offset = _up(offset + num_bytes, _LINE)
    slots = _up(offset, _MEMORY_PAGE)
    return Places(
        **offsets,
        header_bytes=header,
        slots=slots,
        slot_bytes=slot,
        total=slots + layout.slots * slot,
    )


def _check(layout: Layout) -> None:
    names = [parameter.name for parameter in layout.parameters]
    doubled = (
        next((name for name in names if names.count(name) > 1), None) if _doubled(names) else None
    )
    limits = (
        ("num_lanes", layout.num_lanes, 1, MOST_LANES),
        ("most_ranks", layout.most_ranks, 1, MOST_RANKS),
        ("num_versions", layout.num_versions, 2, MOST_VERSIONS),
        ("num_observers", layout.num_observers, 0, MOST_RANKS),
        ("extra_bytes", layout.extra_bytes, 0, 1 << 30),
        ("terms", len(layout.terms), 0, 64),
    )
    for name, value, least, most in limits:
        if not least <= value <= most:
            raise ConfigError(f"{name} = {value}", fix=f"use {least} to {most}")
    if not names:
        raise ConfigError("a layout without parameters", fix="give those that get gradients")
    if doubled is not None:
        raise ConfigError(f"parameter {doubled!r} is there twice", fix="give each name once")
    for parameter in layout.parameters:
        if parameter.numel <= 0 or len(parameter.name) > _MOST_TEXT:
            raise ConfigError(
                f"parameter {parameter.name[:_MOST_TEXT]!r} has {parameter.numel} elements",
                fix="leave out what is empty; names have at most 256 characters",
            )
    if len(set(layout.terms)) != len(layout.terms):
        raise ConfigError(f"terms {layout.terms} repeat a name", fix="give each term once")
    parted = [name for part in layout.parts for name in part]
    if layout.parts and sorted(parted) != sorted(names):
        raise ConfigError(
            "the parts of the step do not have each parameter exactly once",
            fix="give every parameter to one part",
        )
    each = -(-layout.num_lanes // layout.most_ranks)
    least = min((layout.num_lanes + 1) // 2, layout.most_ranks * each.bit_length())
    if layout.num_slots and layout.num_slots < least:
        raise ConfigError(
            f"num_slots = {layout.num_slots} for {layout.num_lanes} lanes and "
            f"{layout.most_ranks} ranks",
            fix=f"use {least} or more, or 0",
        )


def _doubled(names: list[str]) -> bool:
    return len(set(names)) != len(names)


def _pages(parameter: Parameter) -> int:
    return (parameter.room + PAGE_ELEMENTS - 1) // PAGE_ELEMENTS


def _up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit
