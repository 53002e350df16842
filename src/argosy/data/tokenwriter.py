"""Token writer: makes a token file, its document index and its sidecar, so that they appear whole or not at all.

Used by packing.py and corpus.py. Writes into temporary files on the target's file system; `close()` makes them durable and renames them,
the tokens last. Hashes are computed on the way, so nothing is read twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from argosy.data.tokenfiles import DTYPES, Sidecar, documents_path, hash_spots, sidecar_path
from argosy.data.tokenizers import Tokenizer, encode_texts
from argosy.errors import DataError


class TokenWriter:
    """`append` documents, then `close`; leaving the `with` block by an exception removes what was written."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, *, made_from: str = "", scratch: Path | None = None
    ) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._made_from = made_from
        self._dtype = DTYPES[tokenizer.dtype]
        self._digest, self._ends_digest = hashlib.sha256(), hashlib.sha256()
        self._count = self._num_documents = self._last_end = 0
        self._scratch = scratch or path.parent
        self._tokens_file = _temporary(self._scratch, path)
        self._ends_file = _temporary(self._scratch, documents_path(path))

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens_file, self._ends_file):
            with contextlib.suppress(OSError):  # a full disk refuses the last buffer again
                file.close()
            Path(file.name).unlink(missing_ok=True)

    def append(self, tokens: npt.NDArray[Any], ends: npt.ArrayLike) -> None:
        """Tokens, and where documents end, counted from the first of these tokens."""
        data = np.ascontiguousarray(tokens, dtype=self._dtype)
        absolute = np.asarray(ends, np.int64).astype("<u8") + np.uint64(self._count)
        self._digest.update(data.view(np.uint8).data)
        self._ends_digest.update(absolute.tobytes())
        with _explained(self.path):
            self._tokens_file.write(data.data)
            self._ends_file.write(absolute.tobytes())
        self._count += len(data)
        self._num_documents += len(absolute)
        if len(absolute):
            self._last_end = int(absolute[-1])

    def append_documents(self, texts: Sequence[bytes]) -> None:
        """Texts that are whole documents."""
        self.append(*encode_texts(self._tokenizer, texts, [True] * len(texts)))

    def close(self) -> Sidecar:
        """Make it durable and give it its name."""
        if not self._count:
            raise DataError(
                f"no tokens to write into {self.path}", fix="the inputs are empty; name others"
            )
        if self._last_end != self._count:
            self.append(np.empty(0, self._dtype), [0])
        with _explained(self.path):
            return self._publish()

    def _publish(self) -> Sidecar:
        for file in (self._tokens_file, self._ends_file):
            file.flush()
            os.fsync(file.fileno())
        sidecar = self._describe(hash_spots(np.memmap(self._tokens_file.name, self._dtype, "r")))
        beside = _temporary(self._scratch, sidecar_path(self.path))
        with beside:
            beside.write(msgspec.json.format(msgspec.json.encode(sidecar), indent=2) + b"\n")
            beside.flush()
            os.fsync(beside.fileno())
        os.replace(self._ends_file.name, documents_path(self.path))
        os.replace(beside.name, sidecar_path(self.path))
        os.replace(self._tokens_file.name, self.path)
        _sync_directory(self.path.parent)
        return sidecar

    def _describe(self, spots: str) -> Sidecar:
        return Sidecar(
            dtype=self._tokenizer.dtype,
            count=self._count,
            tokenizer=self._tokenizer.name,
            tokenizer_sha256=self._tokenizer.sha256,
            vocabulary_size=self._tokenizer.vocabulary_size,
            end_of_document=self._tokenizer.end_of_document,
            sha256=self._digest.hexdigest(),
            spots_sha256=spots,
            documents=self._num_documents,
            documents_sha256=self._ends_digest.hexdigest(),
            made_from=self._made_from,
        )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}",
            fix="name a directory that exists, is writable and has room",
        )


def _temporary(directory: Path, path: Path) -> Any:
    with _explained(path):
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - the writer closes it
            dir=directory, prefix=f".{path.name}.", suffix=".tmp", delete=False
        )
    os.fchmod(file.fileno(), 0o666 & ~_umask())
    return file


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
