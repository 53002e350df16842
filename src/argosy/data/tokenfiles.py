"""Token files: `code.bin` holds nothing but tokens, `code.bin.json` beside it says what they are.

Opening one costs a few reads: size, dtype and a hash of 64 spots are compared; `verify()` reads all of it. A file that is
not what its sidecar says, or that changes while it is open, is refused. Used by tokens.py and by `argosy data`; needs no torch.
The format: docs/reference/data.md.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from argosy.errors import DataError

FORMAT = 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SPOTS = 64
SPOT_BYTES = 4096
_PIECE_TOKENS = 2 << 20
_WARM_BYTES = 1 << 30
_LOOK_TOKENS = 1 << 16


class Sidecar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in `code.bin.json`."""

    format: int = FORMAT
    dtype: Literal["uint16", "uint32"]
    count: int
    tokenizer: str
    tokenizer_sha256: str = ""
    vocabulary_size: int
    end_of_document: int | None = None
    sha256: str
    spots_sha256: str
    documents: int = 0
    documents_sha256: str = ""
    made_from: str = ""


class TokenFile:
    """One open token file, mapped read-only."""

    def __init__(self, path: str | os.PathLike[str], dtype: str | None = None) -> None:
        self.path = Path(path).absolute()
        self._name = os.fspath(self.path)
        self._state = _look(self._name)
        self.sidecar = read_sidecar(self.path)
        self.dtype = self._choose_dtype(dtype)
        size, width = self._state[0], DTYPES[self.dtype].itemsize
        self._check_size(size, width)
        self.count = size // width
        self.tokens = _map(self.path, DTYPES[self.dtype])
        self._spots = hash_spots(self.tokens)
        self._check_content()

    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path, str]]:
        """Another process opens it again; the tokens are not sent."""
        return TokenFile, (self.path, self.dtype)

    @property
    def fingerprint(self) -> str:
        """Of the bytes: the SHA-256 in the sidecar, else of the spots and the size."""
        if self.sidecar:
            return f"{self.dtype}:{self.count}:sha256:{self.sidecar.sha256}"
        return f"{self.dtype}:{self.count}:spots:{self._spots}"

    def check_unchanged(self) -> None:
        """Cheap enough for every batch: refuses when the file was replaced, cut or written to since it was opened."""
        state = _look(self._name)
        if state == self._state:
            return
        # Touched or copied over with equal bytes is no change; a smaller file must not be read through the map.
        is_same_size = state[0] == self._state[0]
        if is_same_size and hash_spots(_map(self.path, self.tokens.dtype)) == self._spots:
            self._state = state
            return
        raise DataError(
            f"{self.path} has changed since the run began",
            fix="bring back the file the run began with, or start a new run with this one",
        )

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """All tokens in order, by ordinary reads: the map is set up for reading here and there."""
        with open(self.path, "rb", buffering=0) as file:
            while len(piece := np.fromfile(file, self.tokens.dtype, _PIECE_TOKENS)):
                yield piece

    def verify(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Read everything and compare with the SHA-256 of the sidecar."""
        if not self.sidecar:
            raise DataError(f"{self.path} has no sidecar to compare with", fix=_REPACK)
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.view(np.uint8).data)
            if on_bytes:
                on_bytes(piece.nbytes)
        if digest.hexdigest() != self.sidecar.sha256:
            raise DataError(f"{self.path} does not have the SHA-256 of its sidecar", fix=_REPACK)
        ends = hashlib.sha256(self.ends().tobytes())
        if self.sidecar.documents and ends.hexdigest() != self.sidecar.documents_sha256:
            raise DataError(f"{documents_path(self.path)} is damaged", fix=_REPACK)

    def ends(self) -> npt.NDArray[np.uint64]:
        """Where each document ends (the token after its last one), in order; empty when the file does not say."""
        if not self.sidecar or not self.sidecar.documents:
            return np.empty(0, np.uint64)
        path = documents_path(self.path)
        try:
            ends: npt.NDArray[np.uint64] = np.fromfile(path, dtype="<u8")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", fix=_REPACK)
        if len(ends) != self.sidecar.documents or int(ends[-1]) != self.count:
            raise DataError(f"{path} does not belong to {self.path.name}", fix=_REPACK)
        return ends

    def _choose_dtype(self, asked: str | None) -> str:
        if asked is not None and asked not in DTYPES:
            raise DataError(f"dtype = {asked!r}", fix="tokens are uint16 or uint32")
        if self.sidecar is None:
            if asked is None:
                raise DataError(
                    f"{self.path} has no {sidecar_path(self.path).name} that says what it holds",
                    fix='give Tokens(…, dtype="uint16"), or pack it with `argosy data pack`',
                )
            return asked
        if asked is not None and asked != self.sidecar.dtype:
            raise DataError(
                f"{self.path} holds {self.sidecar.dtype}, not {asked}",
                fix=f'leave dtype out, or say "{self.sidecar.dtype}"',
            )
        return self.sidecar.dtype

    def _check_size(self, size: int, width: int) -> None:
        if size == 0:
            raise DataError(f"{self.path} is empty", fix="pack it again: `argosy data pack`")
        if self.sidecar and size != self.sidecar.count * width:
            more = "cut short" if size < self.sidecar.count * width else "too long"
            raise DataError(
                f"{self.path} is {more}: {size} bytes, its sidecar says {self.sidecar.count * width}",
                fix=_REPACK,
            )
        if size % width:
            raise DataError(
                f"{self.path} has {size} bytes, no whole number of {self.dtype} tokens",
                fix="it is cut short, or of another dtype",
            )

    def _check_content(self) -> None:
        if self.sidecar:
            if self._spots != self.sidecar.spots_sha256:
                raise DataError(
                    f"{self.path} has other bytes than its sidecar says",
                    fix=_REPACK,
                )
            return
        if bytes(self.tokens[:4].tobytes()[:6]) == b"\x93NUMPY":
            raise DataError(
                f"{self.path} is a .npy file, not plain tokens",
                fix='convert it once: numpy.load(path).astype("uint16").tofile("tokens.bin")',
            )
        other = _suspect_dtype(self.tokens)
        if other:
            raise DataError(
                f"{self.path} does not look like {self.dtype} but like {other}",
                fix=f'give dtype="{other}", or pack it with `argosy data pack`',
            )


_REPACK = "pack it again, or copy it again together with the files beside it"


def sidecar_path(path: Path) -> Path:
    """`code.bin.json`."""
    return path.with_name(path.name + ".json")


def documents_path(path: Path) -> Path:
    """`code.bin.documents`."""
    return path.with_name(path.name + ".documents")


def read_sidecar(path: Path) -> Sidecar | None:
    """The sidecar beside the file, or None."""
    beside = sidecar_path(path)
    try:
        sidecar = msgspec.json.decode(beside.read_bytes(), type=Sidecar)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{beside} cannot be read: {error.strerror}", fix="mend its permissions")
    except msgspec.DecodeError as error:
        raise DataError(f"{beside} is no sidecar of a token file: {error}", fix=_REPACK)
    if sidecar.format != FORMAT:
        raise DataError(
            f"{beside} has format {sidecar.format}, this version reads {FORMAT}",
            fix="use the version of Argosy that packed it, or pack it again",
        )
    return sidecar


def hash_spots(tokens: npt.NDArray[Any]) -> str:
    """SHA-256 of the first and the last 4 KiB and of 62 evenly between: changes everywhere are seen without reading all."""
    digest = hashlib.sha256(len(tokens).to_bytes(8, "little"))
    width = SPOT_BYTES // tokens.itemsize
    last = max(len(tokens) - width, 0)
    for start in sorted({last * spot // (SPOTS - 1) for spot in range(SPOTS)}):
        digest.update(tokens[start : start + width].tobytes())
    return digest.hexdigest()


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The file's bytes as a read-only array."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        # Rows are read in shuffled order: reading megabytes around each of them costs milliseconds per row.
        mapped.madvise(mmap.MADV_RANDOM)
        if len(mapped) <= _WARM_BYTES:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    return np.frombuffer(mapped, dtype)


def _suspect_dtype(tokens: npt.NDArray[Any]) -> str:
    """The dtype that a file without a sidecar seems to have, when it is not the one it was opened with."""
    seen = tokens[:_LOOK_TOKENS]
    if tokens.dtype.itemsize == 2:
        # uint32 tokens of small vocabularies: every second half is zero, and the others are not.
        halves = seen[: len(seen) // 2 * 2].reshape(-1, 2)
        return "uint32" if len(halves) > 8 and not halves[:, 1].any() and halves[:, 0].any() else ""
    return "uint16" if len(seen) > 8 and float(np.median(seen)) >= 1 << 24 else ""


def _look(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(
            f"token file {path}: {error.strerror}",
            fix="check the path; `argosy data pack` makes token files",
        )
    if not stat.S_ISREG(found.st_mode):
        raise DataError(
            f"{path} is not a file", fix='name files, or a pattern such as "data/*.bin"'
        )
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev
