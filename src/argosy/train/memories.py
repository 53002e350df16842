"""The memories of training on one host: weights that the model sees, and versions of the state that they are derived from.

Weights are one shared copy at fixed addresses, in the compute dtype. A version of the state (master values, optimizer state, buffers, ledger) lies in an arena of its own, made
when its slot is first used: two in turn, a third only while one is pinned. The keeper owns all of them, so they outlive any rank. Without recovery all versions have the tensors of the first
one, and weights that can be are those tensors themselves. Lane slots belong to the exchange. Who may write what and when is decided by transaction.py.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from argosy.checkpoint.lending import Memory
from argosy.errors import ConfigError, MismatchError
from argosy.move import arenas
from argosy.train.stateplan import (
    LEDGER_BYTES,
    MOST_PARTS,
    RESULT_BYTES,
    VALUE,
    Field,
    StatePlan,
)

_REGION = "bytes"
_SMALL_STATE = "keep run.state small: numbers and short texts; tensors belong to the model"
IMAGE = "image"
"""In the ledger: bytes of the optimizer's state, where it is kept as a whole."""


class Region(NamedTuple):
    """Memory that has some of the weights."""

    halves: torch.Tensor
    """Two bytes an element."""
    offsets: dict[str, int]
    """First byte of each parameter."""


class Hold:
    """A lock on the memory of an arena, of one process at a time; the kernel lets the next one in when it ends."""

    def __init__(self, arena: arenas.Arena, *, is_waiting: bool) -> None:
        # A descriptor that was handed over shares its lock with the sender: only one opened here excludes the others.
        self._own = os.open(f"/proc/self/fd/{arena.fileno()}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._own, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
        except BaseException:
            os.close(self._own)
            raise
        self.is_shared = False
        """Whether another process that was given the descriptor may hold it still."""

    @property
    def descriptor(self) -> int:
        """Whoever is given it holds, too."""
        return self._own

    def release(self) -> None:
        """Give it back; a child that was forked meanwhile has a copy of the descriptor."""
        if not self.is_shared:
            fcntl.flock(self._own, fcntl.LOCK_UN)
        os.close(self._own)


class Weights:
    """The parameters of a model in shared memory, one copy for all ranks of a host."""

    def __init__(
        self,
        arena_name: str,
        model: torch.nn.Module,
        dtype: torch.dtype | None,
        lender: Version | None = None,
    ) -> None:
        """`lender`: a version whose values are the weights of all parameters that have the same form there."""
        self.parameters = dict(model.named_parameters())
        lent = {} if lender is None else _lent(lender, self.parameters, dtype)
        shapes = {
            name: (p.shape, _compute_dtype(p, dtype))
            for name, p in self.parameters.items()
            if name not in lent
        }
        offsets, offset = {}, 0
        for name, (shape, kind) in shapes.items():
            offsets[name] = offset
            offset += _up(max(1, shape.numel()) * kind.itemsize)
        size = max(offset, 4096)
        self._arena = arenas.create(arena_name, size, scope="run")
        base = _region(self._arena, size)
        self.regions = [Region(self._arena.at(base, (size // 2,), torch.int16), offsets)]
        if lender is not None and lent:
            self.regions.append(Region(lender.halves, {n: lender.offset_of(n) for n in lent}))
        self.tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            if name in lent:
                self.tensors[name] = lent[name]
                continue
            shape, kind = shapes[name]
            place = base + offsets[name]
            self.tensors[name] = self._arena.at(place, shape, kind, _strides(parameter))

    @property
    def memory(self) -> Memory:
        """Of those that no version lends."""
        return _memory(self._arena)

    def fill(self) -> None:
        """Put the module's own values in, but for those that a version has."""
        for name in self.regions[0].offsets:
            self.tensors[name].copy_(self.parameters[name].detach())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time, of all that map these weights."""
        hold = Hold(self._arena, is_waiting=True)
        try:
            yield
        finally:
            hold.release()

    def bind(self) -> None:
        """Let the module's parameters be the shared ones."""
        for name, parameter in self.parameters.items():
            parameter.data = self.tensors[name]
        self.addresses = [(p, p.data_ptr()) for p in self.parameters.values()]

    def check(self) -> None:
        """ConfigError when a parameter has left its place."""
        for parameter, address in self.addresses:
            if parameter.data_ptr() != address:
                name = next(n for n, p in self.parameters.items() if p is parameter)
                raise ConfigError(
                    f"parameter {name!r} no longer lies in the trainer's memory",
                    fix="build, load and cast the model before run.trainer(); later change values in `with trainer.edit()`",
                )


class Version:
    """One slot of the state, mapped."""

    def __init__(self, arena_name: str, plan: StatePlan, over: Version | None = None) -> None:
        """`over`: a version whose tensors are this one's too; only ledger and flags are its own."""
        self.plan = plan
        self._name = arena_name
        self._images: dict[int, tuple[arenas.Arena, torch.Tensor]] = {}
        size = plan.num_bytes if over is None else plan.head_bytes
        self._arena = arenas.create(arena_name, size, scope="run")
        base = self._base = _region(self._arena, size)
        flags = self._arena.at(base + plan.flags_offset, (len(plan.names),), torch.int64)
        self._flags = flags.numpy()
        self._ledger = self._arena.at(base, (LEDGER_BYTES,), torch.uint8).numpy().data
        self._parsed: tuple[bytes, dict[str, Any]] = b"", {}
        """The ledger when it was last read, as it was written and as it was read."""
        self._index = {name: place for place, name in enumerate(plan.names)}
        self.tensors: list[torch.Tensor] = self._map() if over is None else over.tensors
        self._places = {(f.name, f.key): place for place, f in enumerate(plan.fields)}

    def hold(self) -> Hold | None:
        """Say that this process reads it for longer than a step; None while another one does."""
        try:
            return Hold(self._arena, is_waiting=False)
        except BlockingIOError:
            return None

    def memories(self) -> list[Memory]:
        """In which its tensors and its image lie, where it has them for itself."""
        found = [self._arena]
        image = self.image
        if image is not None:
            found += [arena for arena, _ in self._images.values() if arena.is_inside(image)]
        return [_memory(arena) for arena in found]

    def _map(self) -> list[torch.Tensor]:
        return [
            self._arena.at(self._base + offset, field.shape, getattr(torch, field.dtype))
            for field, offset in zip(self.plan.fields, self.plan.offsets, strict=True)
        ]

    @property
    def halves(self) -> torch.Tensor:
        """All its memory, two bytes an element."""
        return self._arena.at(self._base, (self.plan.num_bytes // 2,), torch.int16)

    def offset_of(self, name: str) -> int:
        """First byte of a value in `halves`."""
        return self.plan.offsets[self._places[name, VALUE]]

    def tensor(self, name: str, key: str = VALUE) -> torch.Tensor:
        """One field."""
        return self.tensors[self._places[name, key]]

    def fields_of(self, name: str) -> list[tuple[Field, torch.Tensor]]:
        """All fields of a parameter."""
        return [(self.plan.fields[i], self.tensors[i]) for i in self.plan.by_name[name]]

    def copy_from(self, other: Version, *names: str) -> None:
        """All fields of some parameters, and whether their states have begun."""
        if names and self.tensors is not other.tensors:
            places = [place for name in names for place in self.plan.by_name[name]]
            torch._foreach_copy_(
                [self.tensors[place] for place in places],
                [other.tensors[place] for place in places],
            )
        for name in names:
            self.set_begun(name, other.has_begun(name))

    def has_begun(self, name: str) -> bool:
        """Whether the optimizer has made its state of this parameter."""
        return bool(self._flags[self._index[name]])

    def set_begun(self, name: str, value: bool) -> None:
        """Remember whether the optimizer has."""
        self._flags[self._index[name]] = value

    @property
    def image(self) -> torch.Tensor | None:
        """The optimizer's state as bytes, where it is kept as a whole (images.py)."""
        num_bytes = self.ledger.get(IMAGE, 0)
        return self.room_for_image(num_bytes) if num_bytes else None

    def room_for_image(self, num_bytes: int) -> torch.Tensor:
        """Memory for so many bytes; its size is a power of two, so that a state that grows needs few of them."""
        size = max(4096, 1 << (num_bytes - 1).bit_length())
        if size not in self._images:
            arena = arenas.create(f"{self._name}.image.{size}", size, scope="run", prefault=False)
            self._images[size] = arena, arena.at(_region(arena, size), (size,), torch.uint8)
        return self._images[size][1][:num_bytes]

    @property
    def ledger(self) -> dict[str, Any]:
        """What is committed with this version besides tensors: the step, the skip list, the user's own state. Not to be changed, but set."""
        body = self._body(0)
        if body != self._parsed[0]:
            self._parsed = body, json.loads(body)
        return self._parsed[1] or {"step": 0}

    @ledger.setter
    def ledger(self, value: dict[str, Any]) -> None:
        self._write(0, LEDGER_BYTES - MOST_PARTS * RESULT_BYTES, value, _SMALL_STATE)

    def result(self, part: int) -> dict[str, Any]:
        """What a part of the step that made this version has come to."""
        found: dict[str, Any] = json.loads(self._body(LEDGER_BYTES - (part + 1) * RESULT_BYTES))
        return found

    def set_result(self, part: int, value: dict[str, Any]) -> None:
        """Written by one owner of the part before its pages are done."""
        at = LEDGER_BYTES - (part + 1) * RESULT_BYTES
        self._write(at, RESULT_BYTES, value, "name fewer terms of the loss, or shorter")

    def _body(self, at: int) -> bytes:
        length = int.from_bytes(self._ledger[at : at + 8], "little")
        return bytes(self._ledger[at + 8 : at + 8 + length]) or b"{}"

    def _write(self, at: int, room: int, value: dict[str, Any], fix: str) -> None:
        body = json.dumps(value, separators=(",", ":")).encode()
        if len(body) > room - 8:
            raise ConfigError(
                f"what is committed with a step takes {len(body)} bytes of {room - 8}", fix=fix
            )
        packed = len(body).to_bytes(8, "little") + body
        self._ledger[at : at + len(packed)] = packed


class Memories:
    """Everything that outlives a rank."""

    def __init__(
        self, prefix: str, weights: Weights, plan: StatePlan, only: Version | None = None
    ) -> None:
        """`only`: slot 0, of which all others have the tensors."""
        self.weights = weights
        self.plan = plan
        self._prefix = prefix
        self._only = only
        self._versions: dict[int, Version] = {} if only is None else {0: only}

    @property
    def is_rotating(self) -> bool:
        """Whether the next version leaves this one as it is."""
        return self._only is None

    def version(self, slot: int) -> Version:
        """The version in a slot; mapped when first asked for."""
        found = self._versions.get(slot)
        if found is None:
            name = f"{self._prefix}.state.{slot}"
            found = self._versions[slot] = Version(name, self.plan, self._only)
        return found

    def refresh(self, slot: int, names: list[str]) -> None:
        """Derive the weights of these parameters from a version: an idempotent copy."""
        version = self.version(slot)
        pairs = [(self.weights.tensors.get(name), version.tensor(name)) for name in names]
        # Buffers are copied by each rank for itself; a weight that a version lends is its value.
        stale = [(to, value) for to, value in pairs if to is not None and to is not value]
        if stale:
            torch._foreach_copy_([to for to, _ in stale], [value for _, value in stale])


def _memory(arena: arenas.Arena) -> Memory:
    return Memory(arena.fileno(), arena.address, arena.memory.nbytes)


def _region(arena: arenas.Arena, num_bytes: int) -> int:
    """Offset of the one allocation of an arena, made by whoever comes first."""
    if arena.find(_REGION) is None:
        try:
            arena.empty((num_bytes,), torch.uint8, name=_REGION)
        except ConfigError:
            pass  # another process was first
    entry = arena.find(_REGION)
    if entry is None or entry.num_bytes < num_bytes:
        raise MismatchError(
            f"arena {arena.name!r} was made for another model or optimizer",
            fix="start a new run: model, optimizer and lanes are fixed for the life of one",
        )
    return entry.offset


def _compute_dtype(parameter: torch.nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not parameter.dtype.is_floating_point:
        return parameter.dtype
    return dtype


def _lent(
    version: Version, parameters: Mapping[str, torch.nn.Parameter], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """The values of a version that are as the module's parameters are to be: of the same dtype, in the same order."""
    found = {}
    for field, value in zip(version.plan.fields, version.tensors, strict=True):
        parameter = parameters.get(field.name) if field.key == VALUE else None
        if parameter is None or _strides(parameter) is not None:
            continue
        if value.dtype == _compute_dtype(parameter, dtype):
            found[field.name] = value
    return found


def _strides(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The parameter's own order of elements, if it fills its memory without gaps; else the plain one."""
    strides = parameter.stride()
    if parameter.is_contiguous():
        return None
    dense = sorted(zip(strides, parameter.shape, strict=True))
    expected = 1
    for stride, size in dense:
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tuple(strides)


def _up(value: int) -> int:
    return (value + 4095) // 4096 * 4096
