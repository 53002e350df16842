"""Resharding: fill a destination's tensors from a source's, whatever their meshes, between the processes of one host.

`reshard` for once, `prepare` for a transfer that repeats. All ranks describe what they hold, plan alike, map each other's memory and copy: every
element is read once, by its destination, in one strided pass. Nothing is written before all ranks have agreed that everything can be done.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Mapping as Dictionary
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from argosy.errors import ArgosyError, ConfigError, MismatchError, NoRoute, ProtocolError
from argosy.move import broker, counters, handover, hostmemory, placements
from argosy.move import plans as planning
from argosy.move.boxes import TensorSpec
from argosy.move.copies import copy_from_process, copy_mapped, round_through
from argosy.move.mapping import Mapping, span_bytes
from argosy.move.meetings import DONE, ENTERED, Meeting, current_group, is_one_sided
from argosy.move.overlaps import RESIDENT
from argosy.move.placements import Local, State, assemble, describe
from argosy.move.plans import Copy, Plan
from argosy.move.regions import Regions, read_process_bytes
from argosy.move.spans import Span, check_spans

SECONDS = 300.0
_VERSION = 1
_MOST_PLANS = 16
_LARGE_BYTES = 16 << 20
"""From here on a transfer goes past the caches."""

_plans: OrderedDict[str, Plan] = OrderedDict()


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a source's local tensor lies: in a handed-over descriptor, or (-1) at an address of its process."""

    name: str
    buffer: int
    descriptor: int
    position: int
    elements: int
    dtype: str


class Introduction(msgspec.Struct, frozen=True):
    """What one rank says of its part of a transfer."""

    version: int
    refused: str
    source: list[Local]
    destination: list[Local]
    places: list[Place]
    spans: list[Span]
    wire: dict[str, str]
    num_descriptors: int


class _Versioned(msgspec.Struct, frozen=True):
    """The one field that an introduction of every version has."""

    version: int


class Verdict(msgspec.Struct, frozen=True):
    """Whether one rank can do its part; `unreadable` are ranks whose private memory it may not read."""

    refused: str = ""
    unreadable: list[int] = []
    number: int = 0


def reshard(
    source: State,
    destination: State,
    group: dist.ProcessGroup | None = None,
    *,
    wire: Dictionary[str, torch.dtype] | None = None,
    timeout: float = SECONDS,
) -> Plan:
    """Fill `destination` from `source`, tensors by name; returns the plan that was carried out.

    Every rank of the group calls it with what it holds: plain tensors, DTensors on any mesh and placement, `Pieces`; a rank without a part gives
    an empty dict. Dtypes may differ where a cast exists. `wire` names dtypes through which values are rounded. When the call returns, the source
    may be changed again. A refusal is raised on all ranks, before anything was written.
    """
    with prepare(source, destination, group, wire=wire, timeout=timeout) as prepared:
        prepared.run()
        return prepared.plan


def prepare(
    source: State,
    destination: State,
    group: dist.ProcessGroup | None = None,
    *,
    wire: Dictionary[str, torch.dtype] | None = None,
    timeout: float = SECONDS,
    refusal: ArgosyError | None = None,
) -> Reshard:
    """Everything but the copying, for tensors that stay where they are: `run()` then moves their values as often as wanted.

    `refusal` is what a caller has found wrong on this rank already: it is raised here, and told to all other ranks.
    """
    meeting = Meeting(current_group(group), timeout)
    try:
        return Reshard(meeting, source, destination, wire or {}, refusal)
    except BaseException as failure:
        if is_one_sided(failure):
            meeting.break_off(failure)
        meeting.close()
        raise


class Reshard:
    """A transfer that is ready to run; every rank of the group runs it the same number of times."""

    def __init__(
        self,
        meeting: Meeting,
        source: State,
        destination: State,
        wire: Dictionary[str, torch.dtype],
        refusal: ArgosyError | None = None,
    ) -> None:
        self._meeting = meeting
        self._open = contextlib.ExitStack()
        self._turn = 0
        self._is_closed = False
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._memories: dict[tuple[int, str, int], torch.Tensor | _Private] = {}
        self._sources: dict[str, list[torch.Tensor]] = {}
        self._targets: dict[str, list[torch.Tensor]] = {}
        self._bytes = 0
        self._seconds = 0.0
        self._descriptors: list[int] = []
        refusal, mine = self._introduction(source, destination, wire, refusal)
        texts = meeting.introduce(msgspec.msgpack.encode(mine))
        _check_versions(texts, meeting.rank)
        said = [msgspec.msgpack.decode(text, type=Introduction) for text in texts]
        _check_introductions(said, meeting.rank, refusal)
        hosts = [""] * meeting.size
        self.plan = _cached_plan(
            assemble([one.source for one in said], hosts, "source"),
            assemble([one.destination for one in said], hosts, "destination"),
            mine.wire,
        )
        check_spans([one.spans for one in said])
        self._mine = self.plan.for_rank(meeting.rank)
        self._wires = {
            name: placements.dtype_of(dtype)
            for name, dtype in mine.wire.items()
            if {dtype}
            - {self.plan.tensors[name].source.dtype, self.plan.tensors[name].destination.dtype}
        }
        volume = sum(copy.volume for copy in self._mine.copies)
        self._is_large = volume * 4 >= _LARGE_BYTES
        self._reach(said)

    # --- preparation -------------------------------------------------------------------------------

    def _introduction(
        self,
        source: State,
        destination: State,
        wire: Dictionary[str, torch.dtype],
        refusal: ArgosyError | None,
    ) -> tuple[ArgosyError | None, Introduction]:
        """What this rank says; what it cannot move it refuses, and says so, so that all ranks stop."""
        try:
            if refusal is not None:
                raise refusal
            placements.check_states(source, destination, wire)
            wires = {name: placements.dtype_name(dtype) for name, dtype in wire.items()}
            given = [describe(name, v, is_destination=False) for name, v in source.items()]
            wanted = [describe(name, v, is_destination=True) for name, v in destination.items()]
        except ArgosyError as found_wrong:
            return found_wrong, Introduction(_VERSION, found_wrong.what, [], [], [], [], {}, 0)
        self._sources = {name: placements.buffers(value) for name, value in source.items()}
        self._targets = {name: placements.buffers(value) for name, value in destination.items()}
        known = Regions()
        places: list[Place] = []
        spans: list[Span] = []
        descriptors: dict[int, int] = {}
        for local in given:
            for number, tensor in enumerate(self._sources[local.name]):
                found = known.find(tensor)
                spans.append(Span.of(tensor, found, local, number, is_target=False))
                index, position = -1, tensor.data_ptr()
                if found is not None:
                    region, position = found
                    index = descriptors.setdefault(region.descriptor, len(descriptors))
                elements = span_bytes(tensor.shape, tensor.stride(), tensor.dtype)
                elements //= tensor.element_size()
                places.append(Place(local.name, number, index, position, elements, local.dtype))
        for local in wanted:
            for number, tensor in enumerate(self._targets[local.name]):
                spans.append(Span.of(tensor, known.find(tensor), local, number, is_target=True))
        self._descriptors = list(descriptors)
        count = len(descriptors)
        return None, Introduction(_VERSION, "", given, wanted, places, spans, wires, count)

    def _reach(self, said: list[Introduction]) -> None:
        """Map what others hold, try what must be read through the kernel, and agree that all can do their part."""
        meeting = self._meeting
        given = meeting.hand_over(self._descriptors, [one.num_descriptors for one in said])
        try:
            self._memories, verdict = self._map(said, given)
        finally:
            handover.close_all(one for descriptors in given.values() for one in descriptors)
        verdicts = self._agree(verdict)
        staging = sorted({rank for one in verdicts for rank in one.unreadable})
        if staging:
            self._stage(said, staging)

    def _map(
        self, said: list[Introduction], given: dict[int, list[int]]
    ) -> tuple[dict[tuple[int, str, int], torch.Tensor | _Private], Verdict]:
        memories: dict[tuple[int, str, int], torch.Tensor | _Private] = {}
        mapped: dict[tuple[int, int], Mapping] = {}
        unreadable: set[int] = set()
        needed = {(copy.source_rank, copy.tensor, copy.source_buffer) for copy in self._mine.copies}
        me = self._meeting.rank
        try:
            for rank, one in enumerate(said):
                for place in one.places:
                    key = (rank, place.name, place.buffer)
                    if key not in needed or rank == me:
                        continue
                    if place.descriptor >= 0:
                        memories[key] = _mapped(place, rank, given[rank], mapped)
                    else:
                        memories[key] = _Private(self._meeting.pid_of(rank), place.position)
                        if not _is_readable(memories[key], place):
                            unreadable.add(rank)
        except ArgosyError as refusal:
            return memories, Verdict(refused=refusal.what)
        for key in needed:
            if key[0] == me:
                memories[key] = self._sources[key[1]][key[2]]
        return memories, Verdict(unreadable=sorted(unreadable))

    def _stage(self, said: list[Introduction], staging: list[int]) -> None:
        """The kernel forbids reading another process: who holds tensors outside arenas copies them into one before each run."""
        meeting = self._meeting
        places: dict[int, list[tuple[Place, int]]] = {}
        for rank in staging:
            offset, found = 0, []
            for place in said[rank].places:
                if place.descriptor < 0:
                    found.append((place, offset))
                    size = place.elements * placements.dtype_of(place.dtype).itemsize
                    offset += hostmemory.round_up(size)
            places[rank] = [*found]
        refused = ""
        own = -1
        try:
            if meeting.rank in staging:
                own = self._make_staging(places[meeting.rank])
        except ArgosyError as failure:
            refused = failure.what
        self._agree(Verdict(refused=refused))
        counts = [int(rank in staging) for rank in range(meeting.size)]
        given = meeting.hand_over([own] if own >= 0 else [], counts)
        try:
            mapped: dict[tuple[int, int], Mapping] = {}
            for rank in staging:
                for place, offset in places[rank]:
                    key = (rank, place.name, place.buffer)
                    if key in self._memories and rank != meeting.rank:
                        moved = msgspec.structs.replace(place, descriptor=0, position=offset)
                        self._memories[key] = _mapped(moved, rank, given[rank], mapped)
        finally:
            handover.close_all(one for descriptors in given.values() for one in descriptors)

    def _make_staging(self, places: list[tuple[Place, int]]) -> int:
        last, offset = places[-1]
        size = offset + hostmemory.round_up(
            last.elements * placements.dtype_of(last.dtype).itemsize
        )
        descriptor = broker.memfd("staging", max(hostmemory.PAGE, size))
        self._open.callback(os.close, descriptor)
        hostmemory.reserve(descriptor, size, "staging for tensors outside arenas")
        memory = Mapping(descriptor, size, is_private=False, is_prefaulted=True)
        for place, start in places:
            tensor = self._sources[place.name][place.buffer]
            into = memory.tensor(start, tensor.shape, tensor.dtype, tensor.stride())
            self._staged.append((into, tensor))
        return descriptor

    def _agree(self, mine: Verdict) -> list[Verdict]:
        said = [
            msgspec.json.decode(text, type=Verdict)
            for text in self._meeting.agree(msgspec.json.encode(_short(mine)))
        ]
        for rank, verdict in enumerate(said):
            if verdict.refused:
                raise NoRoute(
                    f"rank {rank} cannot do its part: {verdict.refused}",
                    fix="nothing was written; mend that rank and call again on all",
                )
        return said

    # --- the transfer ------------------------------------------------------------------------------

    def run(self, *, timeout: float | None = None) -> None:
        """Move the values as they are now. Returns when this rank's destination is filled and its source is free to change.

        After an error the transfer is over, on all ranks: make a new group and prepare it there.
        """
        self._check_open()
        with self._meeting.in_step():
            self._run(timeout)

    def _run(self, timeout: float | None) -> None:
        began = time.monotonic()
        meeting = self._meeting
        deadline = began + (meeting.timeout if timeout is None else timeout)
        self._turn += 1
        with torch.no_grad():
            for into, tensor in self._staged:
                into.copy_(tensor)
                counters.own.copied(tensor.nbytes)
            meeting.post(ENTERED, self._turn)
            entered: set[int] = set()
            for copy in self._mine.copies:
                if copy.source_rank not in entered:
                    meeting.wait(ENTERED, copy.source_rank, self._turn, deadline)
                    entered.add(copy.source_rank)
                self._copy(copy)
        meeting.post(DONE, self._turn)
        for reader in self._mine.read_by:
            meeting.wait(DONE, reader, self._turn, deadline)
        self._seconds += time.monotonic() - began

    def _copy(self, copy: Copy) -> None:
        target = self._targets[copy.tensor][copy.buffer]
        memory = self._memories[copy.source_rank, copy.tensor, copy.source_buffer]
        wire = self._wires.get(copy.tensor)
        tensor = self.plan.tensors[copy.tensor]
        if isinstance(memory, torch.Tensor):
            if memory.data_ptr() == target.data_ptr() and copy.source_rank == self._meeting.rank:
                return  # the same tensor on both sides, as check_spans has seen
            copy_mapped(copy, target, memory, wire, is_streamed=self._is_large)
        else:
            dtype = placements.dtype_of(tensor.source.dtype)
            try:
                copy_from_process(copy, target, memory.pid, memory.address, dtype)
            except OSError as failure:
                self._meeting.check_alive(copy.source_rank)
                raise NoRoute(
                    f"{copy.tensor}: the memory of rank {copy.source_rank} cannot be read any more: {failure.strerror}",
                    fix="keep the source alive and in place until all ranks are done, or put it into an arena",
                )
            # The number of a process that has ended may be another's by now: what was read then came from a stranger.
            self._meeting.check_alive(copy.source_rank, 0)
            if wire is not None:
                round_through(target, wire, copy)
        if copy.how != RESIDENT:
            moved = copy.volume * placements.dtype_of(tensor.wire).itemsize
            self._bytes += moved
            counters.own.shared_memory_bytes += moved
            counters.own.shared_memory_calls += 1

    def agree_all_done(self, number: int = 0) -> int:
        """Wait until all ranks have come here, PeerLost when one never will; the largest number that a rank has given."""
        self._check_open()
        with self._meeting.in_step():
            return max(verdict.number for verdict in self._agree(Verdict(number=number)))

    def _check_open(self) -> None:
        """Before anybody is met: a slip of one rank is no reason to end the group for all."""
        if self._is_closed:
            raise ConfigError("this transfer is closed", fix="prepare a new one on all ranks")

    def statistics(self) -> dict[str, int | float]:
        """Runs, bytes taken from other processes, seconds in `run`, sources by way."""
        memories = self._memories.values()
        return {
            "num_runs": self._turn,
            "num_copies": len(self._mine.copies),
            "moved_bytes": self._bytes,
            "run_seconds": self._seconds,
            "num_mapped": sum(isinstance(memory, torch.Tensor) for memory in memories),
            "num_private": sum(not isinstance(memory, torch.Tensor) for memory in memories),
            "num_staged": len(self._staged),
        }

    def close(self) -> None:
        """Give up mappings and descriptors. Again is fine."""
        self._is_closed = True
        self._memories.clear()
        self._staged.clear()
        self._open.close()
        self._meeting.close()

    def __enter__(self) -> Reshard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Private(NamedTuple):
    """A tensor in the memory of another process."""

    pid: int
    address: int


def _mapped(
    place: Place, rank: int, given: list[int], mapped: dict[tuple[int, int], Mapping]
) -> torch.Tensor:
    """The elements of a source's local tensor as one flat tensor; reads share the owner's pages."""
    key = (rank, place.descriptor)
    if key not in mapped:
        descriptor = given[place.descriptor]
        size = os.fstat(descriptor).st_size
        mapped[key] = Mapping(descriptor, size, is_private=True, is_prefaulted=False)
    dtype = placements.dtype_of(place.dtype)
    return mapped[key].tensor(place.position, (place.elements,), dtype)


def _is_readable(memory: torch.Tensor | _Private, place: Place) -> bool:
    assert isinstance(memory, _Private)
    if memory.pid <= 0 or place.elements == 0:
        return memory.pid > 0
    return read_process_bytes(memory.pid, place.position, 1) is not None


def _check_versions(texts: list[bytes], rank: int) -> None:
    """Before anything else is read: what another version says may look otherwise."""
    for other, text in enumerate(texts):
        try:
            version: int | str = msgspec.msgpack.decode(text, type=_Versioned).version
        except msgspec.MsgspecError:
            version = "of an unknown form"
        if version != _VERSION:
            raise ProtocolError(
                f"rank {other} speaks version {version} of resharding, rank {rank} version {_VERSION}",
                fix="install one version of this package for all ranks",
            )


def _check_introductions(said: list[Introduction], rank: int, refusal: ArgosyError | None) -> None:
    """The same verdict on all ranks, before anything is mapped or written."""
    if refusal is not None:
        raise refusal
    for other, one in enumerate(said):
        if one.refused:
            raise ConfigError(
                f"rank {other} refuses the transfer: {one.refused}",
                fix="nothing was written; mend that rank and call again on all",
            )
        if one.wire != said[rank].wire:
            raise MismatchError(
                f"rank {rank} asks for wire dtypes {said[rank].wire}, rank {other} for {one.wire}",
                fix="give the same arguments on all ranks",
            )


def _cached_plan(
    source: list[TensorSpec], destination: list[TensorSpec], wire: dict[str, str]
) -> Plan:
    """Plans are pure: the same specs give the same plan, which is kept for the next time."""
    key = planning.key(source, destination, wire)
    found = _plans.pop(key, None) or planning.plan(source, destination, wire=wire)
    _plans[key] = found
    while len(_plans) > _MOST_PLANS:
        _plans.popitem(last=False)
    return found


def _short(verdict: Verdict) -> Verdict:
    return msgspec.structs.replace(verdict, refused=verdict.refused[:1000])
