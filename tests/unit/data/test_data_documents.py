"""packing="documents": rows begin with documents, labels stay inside them, and no token is lost or doubled."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.documents import IGNORED, fill_row, find_ends, plan_rows
from argosy.data.tokenizers import ByteTokenizer
from argosy.data.tokens import Tokens
from argosy.data.tokenwriter import TokenWriter
from argosy.errors import ConfigError

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, length=st.integers(1, 24))
def test_rows_cover_every_token_once_and_cut_only_long_documents(sizes, length):
    ends = np.cumsum(sizes)
    rows = plan_rows(ends, length)
    assert rows[0] == 0
    assert rows[-1] == ends[-1]
    widths = np.diff(rows)
    assert widths.min() >= 1
    assert widths.max() <= length
    starts = {0, *ends.tolist()}
    for row in rows[:-1].tolist():
        if row not in starts:
            document = int(np.searchsorted(ends, row, side="right"))
            begin = int(ends[document - 1]) if document else 0
            assert sizes[document] > length
            assert (row - begin) % length == 0


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, length=st.integers(1, 24))
def test_each_token_but_the_first_of_a_document_is_foretold_once(sizes, length):
    ends = np.cumsum(sizes)
    tokens = np.arange(ends[-1]) + 1
    rows = plan_rows(ends, length).tolist()
    foretold = []
    for bounds in itertools.pairwise(rows):
        row, labels, numbers = fill_row(tokens, bounds, ends, length, padding=0)
        size = bounds[1] - bounds[0]
        assert row[:size].tolist() == tokens[bounds[0] : bounds[1]].tolist()
        assert not row[size:].any()
        assert set(numbers[size:].tolist()) <= {-1}
        assert (np.diff(numbers[:size]) >= 0).all()
        assert numbers[0] == 0
        known = labels != IGNORED
        assert (labels[known] == row[known] + 1).all()
        foretold += labels[known].tolist()
    firsts = {end - size + 1 for end, size in zip(ends.tolist(), sizes, strict=True) if size}
    assert sorted(foretold) == [token for token in tokens.tolist() if token not in firsts]


@pytest.fixture
def packed(tmp_path):
    with TokenWriter(tmp_path / "d.bin", ByteTokenizer()) as writer:
        writer.append_documents([b"one", b"fourteen chars", b"two", b"x" * 40])
        writer.close()
    return tmp_path / "d.bin"


def test_rows_of_a_packed_file(packed):
    tokens = Tokens(packed, sequence_length=16, packing="documents")
    feed = tokens.feed(batch_size=tokens.num_samples)
    batch = feed.batch(0, 0)
    texts = sorted(ByteTokenizer().decode(row.numpy()).rstrip("␄") for row in batch.tokens)
    assert texts == ["fourteen chars", "one", "two", "x" * 8, "x" * 16, "x" * 16]
    assert set(batch) == {"tokens", "labels", "documents"}
    assert batch.labels.dtype == torch.int64
    one = [ByteTokenizer().decode(row.numpy())[:3] for row in batch.tokens].index("one")
    assert batch.labels[one, :5].tolist() == [*b"ne", 256, IGNORED, IGNORED]
    assert batch.documents[one, :5].tolist() == [0, 0, 0, 0, -1]
    again = Tokens(packed, sequence_length=16).feed(batch_size=2)
    assert (
        again.fingerprint
        != Tokens(packed, sequence_length=16, packing="documents").feed(2).fingerprint
    )


def test_a_raw_file_needs_the_token_that_ends_documents(tmp_path):
    raw = np.array([1, 2, 0, 3, 0, 4, 5, 6], dtype="<u2")
    raw.tofile(tmp_path / "raw.bin")
    assert find_ends([raw], 0).tolist() == [3, 5, 8]
    assert find_ends([raw[:3], raw[3:]], 9).tolist() == [8]
    with pytest.raises(ConfigError, match="where its documents end"):
        Tokens(tmp_path / "raw.bin", "uint16", sequence_length=4, packing="documents")
    tokens = Tokens(
        tmp_path / "raw.bin", "uint16", sequence_length=4, packing="documents", end_of_document=0
    )
    assert sorted(row.tolist() for row in tokens.feed(3).batch(0, 0).tokens) == [
        [1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0]]  # fmt: skip
