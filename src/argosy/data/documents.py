"""Documents: rows that begin where a document begins, for `packing="documents"`.

Documents longer than a row are cut into whole rows and a rest; neighbours are put into one row as long as they fit whole. Rows are
found once, when the file is opened (8 bytes each), by the file and the length alone. Pure; called by tokens.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.order import Integers

IGNORED = -100
"""Label of a place that must not be learned from: `cross_entropy` leaves it out by default."""


def find_ends(pieces: Iterable[npt.NDArray[Any]], end_of_document: int) -> Integers:
    """Where documents end, in a file that has no index but a token that says so; the file comes in pieces."""
    found: list[Integers] = [np.empty(0, np.int64)]
    count = 0
    for piece in pieces:
        found.append(np.flatnonzero(piece == end_of_document) + count + 1)
        count += len(piece)
    ends = np.concatenate(found)
    return ends if len(ends) and int(ends[-1]) == count else np.append(ends, count)


def plan_rows(ends: Integers, length: int) -> Integers:
    """First token of every row, and the end of the last one; a row is at most `length` tokens long."""
    pieces = _cut_long(ends, length)
    starts = np.concatenate(([0], pieces[:-1]))
    following = np.searchsorted(pieces, starts + length, side="right").tolist()
    rows, piece, num_pieces = [], 0, len(pieces)
    while piece < num_pieces:
        rows.append(piece)
        piece = following[piece]
    return np.append(starts[rows], pieces[-1])


def _cut_long(ends: Integers, length: int) -> Integers:
    """Ends of all pieces: a document of 2.5 lengths is two pieces of one length and one of a half."""
    starts = np.concatenate(([0], ends[:-1]))
    sizes = ends - starts
    num_pieces = np.maximum(-(-sizes // length), 1)
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    nth = np.arange(len(first)) - first + 1
    cut = np.minimum(np.repeat(starts, num_pieces) + nth * length, np.repeat(ends, num_pieces))
    pieces = np.unique(cut)
    return pieces[pieces > 0]


def fill_row(
    tokens: npt.NDArray[Any],
    bounds: tuple[int, int],
    ends: Integers,
    length: int,
    padding: int,
) -> tuple[Integers, Integers, Integers]:
    """Tokens, labels and the number of the document in the row; no label reaches into another document."""
    start, end = bounds
    size = end - start
    row = np.full(length, padding, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    numbers = np.full(length, -1, np.int64)
    row[:size] = tokens[start:end]
    following = tokens[start + 1 : end + 1]
    labels[: len(following)] = following
    first, last = (int(place) for place in np.searchsorted(ends, [start, end], side="right"))
    inside = ends[first : last + 1]
    # The last token of a document has nothing to foretell.
    borders = inside[inside <= end] - 1 - start
    labels[borders] = IGNORED
    numbers[:size] = np.searchsorted(inside, np.arange(start, end), side="right")
    return row, labels, numbers
