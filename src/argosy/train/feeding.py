"""`step.feed(produce)`: batches that user code makes while it trains, such as rollouts.

`produce(lane)` is called on the rank that computes the lane, once; what it returns lies in the run's memory until the step is committed, so whoever has to compute the lane again, after a death or for the audit,
computes it from the same bytes. With `record=True` they are kept in the run's directory too, where `read` finds them for a replay. Called by parts.py before a lane is seeded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from safetensors.torch import load, save

from argosy.data.batches import Batch
from argosy.errors import ConfigError
from argosy.move import arenas
from argosy.move.words import Memory
from argosy.train import modes
from argosy.train.seeds import mix, seed_all

Produce = Callable[[int], Mapping[str, torch.Tensor]]
_RECORD_BYTES = 64
_TAG, _CLASS, _LENGTH = 0, 8, 16
_SMALLEST_CLASS = 12
_SALT = 0xFEED


class Feeding(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's batches come from, when user code makes them."""

    produce: Produce
    directory: Path | None = None
    """Where they are recorded; None: nowhere."""


class Unfed:
    """The data of a trainer that was made without any: every step is fed."""

    fingerprint = "fed"
    num_batches = None
    has_generators = True
    """Nothing is to be computed ahead."""

    def __init__(self, *, lanes: int, seed: int) -> None:
        self.lanes, self.seed = lanes, seed

    def batch(self, index: int, lane: int) -> NoReturn:
        """Refuse: this step was not fed."""
        raise ConfigError(
            f"there is no batch {index}: this trainer has no data",
            fix="call step.feed(produce) before the step, or give run.trainer(data=…)",
        )

    def describe(self) -> dict[str, Any]:
        """Small, JSON."""
        return {"kind": "fed", "lanes": self.lanes, "seed": self.seed}


class Pantry:
    """The batches of the step in flight, in memory that outlives ranks."""

    def __init__(self, prefix: str, num_lanes: int, seed: int) -> None:
        self._prefix = prefix
        self._num_lanes = num_lanes
        self._seed = seed
        self._board: Memory | None = None
        self._shelves: dict[tuple[int, int], tuple[arenas.Arena, torch.Tensor]] = {}

    def batch(
        self, feeding: Feeding, model: torch.nn.Module, place: tuple[int, int, int], lane: int
    ) -> Batch:
        """A lane's batch; `place` is (version, step, index)."""
        version, step, index = place
        tag = mix(version, step) | 1
        body = self._find(tag, lane)
        if body is None:
            body = self._make(feeding, model, index, lane)
            if feeding.directory is not None:
                _write(path_of(feeding.directory, step, lane), body)
            self._put(tag, lane, body)
        return Batch(load(body), index=index, lane=lane)

    def has(self, place: tuple[int, int, int], lane: int) -> bool:
        """Whether a lane's batch is made."""
        return self._memory().load(lane * _RECORD_BYTES + _TAG) == mix(*place[:2]) | 1

    def _make(self, feeding: Feeding, model: torch.nn.Module, index: int, lane: int) -> bytes:
        """Call user code, in evaluation mode and without gradients, with generators of its own: others when a batch was left out."""
        seed_all(self._seed, index, lane, _SALT)
        with modes.evaluating(model), torch.no_grad():
            made: Any = feeding.produce(lane)
        if not isinstance(made, Mapping) or not all(map(torch.is_tensor, made.values())):
            raise ConfigError(
                f"step.feed() was given {type(made).__name__} for lane {lane}",
                fix='return named tensors: {"tokens": …, "rewards": …}',
            )
        # Clones: names may share memory, files of tensors may not.
        return save(
            {str(name): value.detach().clone().contiguous() for name, value in made.items()}
        )

    def _find(self, tag: int, lane: int) -> bytes | None:
        memory, at = self._memory(), lane * _RECORD_BYTES
        if memory.load(at + _TAG) != tag:
            return None
        shelf = self._shelf(lane, memory.load(at + _CLASS))
        return shelf[: memory.load(at + _LENGTH)].numpy().tobytes()

    def _put(self, tag: int, lane: int, body: bytes) -> None:
        memory, at = self._memory(), lane * _RECORD_BYTES
        size = max(_SMALLEST_CLASS, (len(body) - 1).bit_length())
        memory.store(at + _TAG, 0)
        shelf = self._shelf(lane, size)
        shelf[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        memory.store(at + _CLASS, size)
        memory.store(at + _LENGTH, len(body))
        memory.store(at + _TAG, tag)

    def _memory(self) -> Memory:
        if self._board is None:
            region, arena = _map(f"{self._prefix}.fed", self._num_lanes * _RECORD_BYTES)
            self._arena = arena
            self._board = Memory(region, arena.fileno())
        return self._board

    def _shelf(self, lane: int, size: int) -> torch.Tensor:
        """Room for a lane's batch, by power of two."""
        found = self._shelves.get((lane, size))
        if found is None:
            region, arena = _map(f"{self._prefix}.fed.{lane}.{size}", 1 << size)
            found = self._shelves[lane, size] = (arena, region)
        return found[1]


def read(directory: str | os.PathLike[str], step: int, lane: int) -> dict[str, torch.Tensor]:
    """A batch that was recorded: `step.feed(lambda lane: feeding.read(directory, step.index, lane))` replays a run."""
    path = path_of(Path(directory), step, lane)
    if not path.exists():
        raise ConfigError(
            f"step {step}, lane {lane} is not recorded in {directory}",
            fix="give the directory `fed` of a run that was fed with record=True",
        )
    found: dict[str, torch.Tensor] = load(path.read_bytes())
    return found


def path_of(directory: Path, step: int, lane: int) -> Path:
    """The file of a recorded batch."""
    return directory / f"step-{step:09d}" / f"lane-{lane:04d}.safetensors"


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(body)
    beside.rename(path)


def _map(name: str, num_bytes: int) -> tuple[torch.Tensor, arenas.Arena]:
    arena = arenas.create(name, num_bytes, scope="run", prefault=False)
    if arena.find("bytes") is None:
        try:
            arena.empty((num_bytes,), torch.uint8, name="bytes")
        except ConfigError:
            pass  # another process was first
    return arena.tensor("bytes"), arena
