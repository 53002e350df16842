"""From the status of a collective to the error that a person reads: who is lost, who is missing, who called something else.

The routes call `raise_for`; a broken group stays broken, and says so with its first reason. Texts of mismatched calls are exchanged
through the segment, with a bound: a rank that cannot answer does not keep the others from their error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NoReturn

from argosy.errors import ArgosyError, ConfigError, MismatchError, PeerLost, TimedOut
from argosy.move import calls, callsites
from argosy.move.segment import BROKEN, REASON_SHIFT, Segment
from argosy.native import loader

ABORTED = 7
"""In the broken word: a rank has called abort()."""
_TEXT_SECONDS = 2.0


@dataclass(slots=True)
class Place:
    """One process's place in a segment: its index, and the program's own ranks of all indices."""

    segment: Segment
    index: int
    ranks: list[int]
    group: str


def raise_for(status: int, lost: int, call: calls.Call, place: Place) -> NoReturn:
    """Raise what a status means for this call."""
    if status == loader.MISMATCH:
        raise _mismatch(lost, call, place)
    if status == loader.BAD:
        raise ConfigError(
            f"{call} in group {place.group}: the kernels refuse it", fix="report this call"
        )
    word = place.segment.word(BROKEN)
    if status == loader.BROKEN and word:
        status, lost = word >> REASON_SHIFT, (word & ((1 << REASON_SHIFT) - 1)) - 1
    raise broken_error(status, lost, call, place)


def broken_error(status: int, lost: int, call: calls.Call, place: Place) -> ArgosyError:
    """The error of a group that cannot go on."""
    rank = place.ranks[lost] if 0 <= lost < len(place.ranks) else -1
    if status == loader.PEER_LOST:
        return PeerLost(rank, f"{call} in group {place.group}")
    if status == loader.TIMEOUT and rank < 0:
        # The last one arrived between the deadline and the look at who was missing.
        return TimedOut(
            f"{call} in group {place.group}: not all ranks came in time",
            fix="give the group a longer timeout",
        )
    if status == loader.TIMEOUT:
        what, count, number = place.segment.last_said(lost)
        last = f"call {number}, {calls.describe(what, count, call.ranks)}" if number else "none yet"
        return TimedOut(
            f"{call} in group {place.group}: rank {rank} did not come in time; its last call here: {last}",
            fix=f"see where rank {rank} is (`argosy stacks`), or give the group a longer timeout",
        )
    who = f"rank {rank} has aborted it" if status == ABORTED else "it has failed before"
    return ConfigError(
        f"group {place.group} cannot be used any more: {who}",
        fix="destroy the process group and make a new one",
    )


def _mismatch(lost: int, call: calls.Call, place: Place) -> MismatchError:
    segment, ranks = place.segment, place.ranks
    # All ranks have made equally many calls: the number tells this mismatch's text from an earlier one's.
    number = segment.last_said(place.index)[2]
    segment.write_text(place.index, number, told(call))
    deadline = time.monotonic() + _TEXT_SECONDS
    while not segment.read_text(lost, number) and time.monotonic() < deadline:
        time.sleep(0.001)
    theirs = segment.read_text(lost, number) or "(it did not say)"
    return mismatch(
        place.group,
        f"    rank {ranks[place.index]}: {told(call)}",
        f"    rank {ranks[lost]}: {theirs}",
    )


def mismatch(group: str, mine: str, theirs: str) -> MismatchError:
    """The error of calls that differ; both sides are lines that begin with a rank."""
    return MismatchError(
        f"ranks of group {group} called different things:\n{mine}\n{theirs}",
        fix="make all ranks call the same collectives in the same order with equal sizes and dtypes",
    )


def told(call: calls.Call) -> str:
    """A call with its tensors and its call site."""
    tensors = call.inputs or call.outputs
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
    more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
    shape = f", shape {shapes}{more}" if tensors else ""
    return f"{call}{shape} at {call.site or callsites.find()}"
