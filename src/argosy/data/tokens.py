"""Tokens: a source of fixed-length rows from token files.

`Tokens("code.bin")` inside a mixture, `Tokens("code.bin", sequence_length=256)` alone. A row gives `tokens` and, one place further, `labels`.
Files are memory-mapped; which rows are read when is decided by feeds.py.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from argosy.data.documents import fill_row, find_ends, plan_rows
from argosy.data.feeds import Feed, check_enough, check_sizes
from argosy.data.order import Integers
from argosy.data.tokenfiles import TokenFile
from argosy.errors import ConfigError, DataError

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
Packing: TypeAlias = Literal["stream", "documents"]


class Tokens:
    """Token files as one source: a path, several, a directory of `*.bin`, or a pattern."""

    has_generators = False

    def __init__(
        self,
        paths: Paths,
        dtype: str | None = None,
        *,
        sequence_length: int | None = None,
        packing: Packing = "stream",
        end_of_document: int | None = None,
    ) -> None:
        self.files = [TokenFile(path, dtype) for path in find_files(paths)]
        self._check_vocabularies()
        sidecars = [file.sidecar for file in self.files if file.sidecar]
        self.tokenizer = sidecars[0].tokenizer if sidecars else None
        self.vocabulary_size = sidecars[0].vocabulary_size if sidecars else None
        self.end_of_document = end_of_document
        if end_of_document is None and sidecars:
            self.end_of_document = sidecars[0].end_of_document
        self.num_tokens = sum(file.count for file in self.files)
        self.sequence_length: int | None = None
        self.packing: Packing = packing
        self.num_samples = 0
        if sequence_length is not None:
            self._cut(sequence_length, packing)

    def cut(self, sequence_length: int, packing: Packing | None = None) -> Tokens:
        """The same files in rows of this length; a mixture does this with its sources."""
        if self.sequence_length not in (None, sequence_length):
            raise ConfigError(
                f"{self.label} has sequence_length {self.sequence_length}, the mixture {sequence_length}",
                fix="give it once, to the mixture",
            )
        rows = copy.copy(self)
        rows._cut(sequence_length, packing or self.packing)
        return rows

    def _cut(self, sequence_length: int, packing: Packing) -> None:
        _check_shape(sequence_length, packing)
        self.sequence_length, self.packing = sequence_length, packing
        if packing == "documents":
            self._ends = [self._find_ends(file) for file in self.files]
            self._rows = [plan_rows(ends, sequence_length) for ends in self._ends]
            sizes = [len(rows) - 1 for rows in self._rows]
        else:
            # A row reads one token more than its length: the label of its last one.
            sizes = [max(file.count - 1, 0) // sequence_length for file in self.files]
        self._firsts = np.concatenate(([0], np.cumsum(sizes))).tolist()
        self.num_samples = self._firsts[-1]

    def feed(self, batch_size: int, lanes: int = 1, seed: int = 0) -> Feed:
        """Batches of this source alone, shuffled anew in every epoch."""
        check_sizes(batch_size, lanes, seed)
        if self.sequence_length is None:
            raise ConfigError(
                f"{self.label} has no sequence_length",
                fix="Tokens(…, sequence_length=256), or put it into a Mixture that has one",
            )
        check_enough(self.num_samples, batch_size, self.label)
        settings = {"kind": "tokens", **self.shape()}
        return Feed({"": self}, None, settings, batch_size=batch_size, lanes=lanes, seed=seed)

    def sample(self, number: int, *, seed: int, epoch: int) -> Any:
        """Row `number`; neither seed nor epoch changes what is in it."""
        assert self.sequence_length is not None
        which = bisect_right(self._firsts, number) - 1
        number -= self._firsts[which]
        tokens = self.files[which].tokens
        if self.packing == "stream":
            start = number * self.sequence_length
            return tokens[start : start + self.sequence_length + 1]
        rows = self._rows[which]
        bounds = int(rows[number]), int(rows[number + 1])
        padding = self.end_of_document or 0
        return fill_row(tokens, bounds, self._ends[which], self.sequence_length, padding)

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Rows as int64 tensors."""
        if self.packing == "stream":
            whole = np.stack(samples).astype(np.int64)
            parts = {"tokens": whole[:, :-1], "labels": whole[:, 1:]}
        else:
            columns = zip(*samples, strict=True)
            names = ("tokens", "labels", "documents")
            parts = {name: np.stack(part) for name, part in zip(names, columns, strict=True)}
        return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}

    def check_unchanged(self, numbers: Sequence[int]) -> None:
        """Look at the files that these rows are read from."""
        for which in {bisect_right(self._firsts, number) - 1 for number in numbers}:
            self.files[which].check_unchanged()

    def verify(self) -> None:
        """Read all files and compare them with their sidecars."""
        for file in self.files:
            file.verify()

    @property
    def fingerprint(self) -> str:
        """Of all files in order."""
        text = "\n".join(file.fingerprint for file in self.files)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def label(self) -> str:
        """How messages call it."""
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].path.name}{more}"

    def shape(self) -> dict[str, Any]:
        """The settings that decide a row."""
        facts: dict[str, Any] = {"sequence_length": self.sequence_length, "packing": self.packing}
        if self.packing == "documents":
            facts["end_of_document"] = self.end_of_document
        return facts

    def describe(self) -> dict[str, Any]:
        """Small, JSON."""
        return {
            "files": [file.path.name[:64] for file in self.files[:2]],
            "num_files": len(self.files),
            "tokens": self.num_tokens,
            "samples": self.num_samples,
            "tokenizer": self.tokenizer and self.tokenizer[-64:],
            "fingerprint": self.fingerprint,
        }

    def _find_ends(self, file: TokenFile) -> Integers:
        ends = file.ends().astype(np.int64)
        if not len(ends):
            if self.end_of_document is None:
                raise ConfigError(
                    f"{file.path} does not say where its documents end",
                    fix='give Tokens(…, end_of_document=TOKEN), or use packing="stream"',
                )
            ends = find_ends(file.pieces(), self.end_of_document)
        return ends

    def _check_vocabularies(self) -> None:
        first: TokenFile | None = None
        for file in self.files:
            if file.sidecar is None:
                continue
            if first and first.sidecar and tokenizer_of(first) != tokenizer_of(file):
                raise DataError(
                    f"{first.path.name} was packed with {first.sidecar.tokenizer}, "
                    f"{file.path.name} with {file.sidecar.tokenizer}",
                    fix="one source has one vocabulary: pack them with the same tokenizer",
                )
            first = first or file


def tokenizer_of(file: TokenFile) -> tuple[str, int]:
    """What must be equal for two files to be of one vocabulary."""
    assert file.sidecar is not None
    name = file.sidecar.tokenizer_sha256 or file.sidecar.tokenizer
    return name, file.sidecar.vocabulary_size


def find_files(paths: Paths) -> list[Path]:
    """The files meant, patterns and directories in sorted order; refuses when there are none."""
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[Path] = []
    for each in several:
        text = os.path.expanduser(os.fspath(each))
        if os.path.isdir(text):
            matches = sorted(glob.glob(os.path.join(glob.escape(text), "*.bin")))
        elif not os.path.exists(text) and glob.has_magic(text):
            matches = sorted(glob.glob(text, recursive=True))
        else:
            matches = [text]
        if not matches:
            raise DataError(
                f"no token file matches {text!r}",
                fix="check the path; `argosy data pack` makes token files",
            )
        found += map(Path, matches)
    if not found:
        raise DataError("Tokens([]) names no file", fix='example: Tokens("code.bin")')
    return found


def _check_shape(sequence_length: Any, packing: str) -> None:
    is_whole = isinstance(sequence_length, int) and not isinstance(sequence_length, bool)
    if not is_whole or sequence_length < 1:
        raise ConfigError(
            f"sequence_length = {sequence_length!r}", fix="a whole number of at least 1, e.g. 256"
        )
    if packing not in ("stream", "documents"):
        raise ConfigError(f"packing = {packing!r}", fix='"stream" or "documents"')
