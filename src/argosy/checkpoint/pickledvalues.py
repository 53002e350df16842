"""Values of a pickle without running it: plain ones as they are, objects as their class's name and what they were made from.

torch's distributed checkpoints describe themselves in a pickle. Nothing named in it is imported or called here: opcodes are read one by one by the
standard library's disassembler, and only those that build data are known. Used by imports.py.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from argosy.errors import CheckpointDamaged

_PLAIN = {
    "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "INT", "BINFLOAT", "FLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BINSTRING", "SHORT_BINSTRING",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_MARK = object()
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Name:
    """A class or function, by its name only."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """An object: what it would have been made by, from what, and the state it would have been given."""

    by: Name
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the state."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def read(data: bytes, what: str) -> Any:
    """The value; CheckpointDamaged for what is no pickle of data."""
    if len(data) > _MOST_BYTES:
        raise CheckpointDamaged(f"{what} has {len(data)} bytes: more than allowed")
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as failure:
        raise CheckpointDamaged(f"{what} cannot be read: {failure}", fix="use another checkpoint")
    raise CheckpointDamaged(f"{what} has no end", fix="use another checkpoint")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """One opcode."""
        if name in _PLAIN:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            self.stack.append(_MARK)
        elif name not in ("PROTO", "FRAME"):
            own = getattr(self, f"_{name.lower()}", None)
            if own is None:
                raise ValueError(f"the opcode {name} does more than data needs")
            own(argument)

    def _since_mark(self) -> list[Any]:
        found: list[Any] = []
        while (one := self.stack.pop()) is not _MARK:
            found.append(one)
        return found[::-1]

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _binput(self, argument: Any) -> None:
        self._memo[argument] = self.stack[-1]

    _long_binput = _binput

    def _binget(self, argument: Any) -> None:
        self.stack.append(self._memo[argument])

    _long_binget = _binget

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(Name(module, name))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Name(str(module), str(name)))

    def _newobj(self, _: Any) -> None:
        arguments, by = self.stack.pop(), self.stack.pop()
        self.stack.append(Made(_name(by), tuple(arguments)))

    _reduce = _newobj

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        self.stack[-1].state = state

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _tuple1(self, _: Any) -> None:
        self.stack.append((self.stack.pop(),))

    def _tuple2(self, _: Any) -> None:
        self.stack[-2:] = [tuple(self.stack[-2:])]

    def _tuple3(self, _: Any) -> None:
        self.stack[-3:] = [tuple(self.stack[-3:])]

    def _append(self, _: Any) -> None:
        one = self.stack.pop()
        self.stack[-1].append(one)

    def _appends(self, _: Any) -> None:
        found = self._since_mark()
        self.stack[-1].extend(found)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _items(self.stack[-1])[key] = value

    def _setitems(self, _: Any) -> None:
        found = self._since_mark()
        _items(self.stack[-1]).update(zip(found[::2], found[1::2], strict=True))

    def _additems(self, _: Any) -> None:
        found = self._since_mark()
        self.stack[-1].update(found)


def _name(by: Any) -> Name:
    if not isinstance(by, Name):
        raise ValueError("something that is no class would be called")
    return by


def _items(target: Any) -> dict[Any, Any]:
    found = target.items if isinstance(target, Made) else target
    if not isinstance(found, dict):
        raise ValueError("items for what is no mapping")
    return found
