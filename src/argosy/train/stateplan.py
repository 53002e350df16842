"""What a version of the state consists of and where each piece lies in its memory: master values, optimizer state, averages, buffers, the ledger.

Computed alike by every rank from names, shapes and dtypes. Used by memories.py, which maps it, and by storedstate.py and digests.py, which read it. Pure.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

Kind = Literal["tensor", "int", "float", "bool", "none"]
VALUE, AVERAGE = "value", "ema"
LEDGER_BYTES = 1 << 18
"""With room for the largest state of user code, twice as long as text in text, and the losses of the longest window."""
RESULT_BYTES = 1 << 12
MOST_PARTS = 16
"""Updates in a step."""
_PAGE, _LINE = 4096, 64


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor or number that belongs to a parameter."""

    name: str
    """The parameter, or the buffer."""
    key: str
    """`value`, `ema`, or the optimizer's own name for it."""
    shape: tuple[int, ...]
    dtype: str
    """Name in torch."""
    item_bytes: int
    kind: Kind = "tensor"
    """What the optimizer keeps it as; numbers lie in a tensor without dimensions."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return self.numel * self.item_bytes


class StatePlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All fields of one version, in order."""

    names: tuple[str, ...]
    """Parameters that are trained, then buffers that forward changes."""
    fields: tuple[Field, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each field; large ones begin at memory pages, as they will in a file."""
        found, offset = [], self.head_bytes
        for field in self.fields:
            offset = _up(offset, _PAGE if field.num_bytes >= _PAGE else _LINE)
            found.append(offset)
            offset += field.num_bytes
        return tuple(found)

    @property
    def flags_offset(self) -> int:
        """A word for each name: whether the optimizer has begun its state; the ledger stands before them."""
        return LEDGER_BYTES

    @property
    def head_bytes(self) -> int:
        """Bytes before the first field: the ledger and the flags."""
        return self.flags_offset + _up(8 * max(1, len(self.names)), _PAGE)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of one version."""
        if not self.fields:
            return self.head_bytes
        return _up(self.offsets[-1] + self.fields[-1].num_bytes, _PAGE)

    @cached_property
    def by_name(self) -> dict[str, list[int]]:
        """Positions of the fields of each name."""
        found: dict[str, list[int]] = {name: [] for name in self.names}
        for place, field in enumerate(self.fields):
            found[field.name].append(place)
        return found

    @cached_property
    def digest(self) -> str:
        """Equal for equal plans only."""
        import hashlib

        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def _up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit
