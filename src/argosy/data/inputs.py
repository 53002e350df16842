"""Inputs: which files `argosy data pack` reads, and how they are cut into shards.

A shard is what one worker does in one go and what survives a kill; shards depend on the inputs and settings alone, never on the number of
workers, so the result has the same bytes. Finds and reads; encoding and writing are shards.py's.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from argosy.errors import ConfigError, DataError

SHARD_BYTES = 4 << 20
MAX_SHARDS = 4096
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_SOURCE_CODE = [
    "*.py",
    "*.pyi",
    "*.c",
    "*.h",
    "*.cc",
    "*.cpp",
    "*.hpp",
    "*.cu",
    "*.rs",
    "*.go",
    "*.java",
    "*.kt",
    "*.scala",
    "*.js",
    "*.jsx",
    "*.ts",
    "*.tsx",
    "*.rb",
    "*.php",
    "*.pl",
    "*.lua",
    "*.jl",
    "*.r",
    "*.swift",
    "*.m",
    "*.hs",
    "*.ml",
    "*.clj",
    "*.ex",
    "*.erl",
    "*.sh",
    "*.sql",
    "*.md",
    "*.rst",
    "*.toml",
    "*.yaml",
    "*.yml",
]
DEFAULT_GLOBS = {"text": ["*.txt", "*.md"], "jsonl": ["*.jsonl"], "code": _SOURCE_CODE}


class PackSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to pack; `globs` choose files inside directories."""

    kind: Literal["text", "jsonl", "code"] = "text"
    field: str = "text"
    tokenizer: str = "bytes"
    globs: tuple[str, ...] = ()
    workers: int | None = None
    should_overwrite: bool = False


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A file, or the lines of it that begin in [start, end)."""

    path: str
    start: int
    end: int
    size: int
    mtime_ns: int


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces that are packed together; the identity names its files."""

    identity: str
    pieces: list[Piece]

    @property
    def num_bytes(self) -> int:
        """Of input."""
        return sum(piece.end - piece.start for piece in self.pieces)


def find_inputs(inputs: Sequence[str | os.PathLike[str]], settings: PackSettings) -> list[Path]:
    """Files in the order given, those of a directory sorted by name; each once."""
    globs = settings.globs or tuple(DEFAULT_GLOBS[settings.kind])
    found: dict[Path, None] = {}
    for each in inputs:
        path = Path(os.path.expanduser(os.fspath(each))).absolute()
        if path.is_dir():
            inside = _walk(path, globs)
            if not inside:
                raise ConfigError(
                    f"no file in {path} matches {' '.join(globs[:4])}{' …' if len(globs) > 4 else ''}",
                    fix=_advise(path),
                )
            found.update(dict.fromkeys(inside))
        elif path.is_file():
            found[path] = None
        else:
            raise ConfigError(
                f"there is no file {path}", fix="name files or directories that exist"
            )
    if not found:
        raise ConfigError(
            "nothing to pack", fix="example: argosy data pack book.txt --out book.bin"
        )
    return list(found)


def _advise(path: Path) -> str:
    """What would find something: the ending that most files there have."""
    endings = Counter(file.suffix for file in _walk(path, ["*"]))
    if not endings:
        return "name a directory that has files in it; hidden ones do not count"
    ending = endings.most_common(1)[0][0]
    return f"say which files are meant, e.g. --glob '*{ending}'"


def _walk(root: Path, globs: Iterable[str]) -> list[Path]:
    found: list[Path] = []
    for directory, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")
        ]
        for name in names:
            inner = Path(directory, name).relative_to(root).as_posix()
            if any(fnmatch.fnmatchcase(name, g) or fnmatch.fnmatchcase(inner, g) for g in globs):
                found.append(Path(directory, name))
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def plan_shards(
    files: Sequence[Path], settings: PackSettings, tokenizer_sha256: str
) -> list[Shard]:
    """The shards, in the order of the result."""
    whole = [_whole(file) for file in files]
    shard_bytes = SHARD_BYTES
    while sum(piece.size for piece in whole) > shard_bytes * MAX_SHARDS:
        shard_bytes *= 2
    groups: list[list[Piece]] = [[]]
    filled = 0
    for piece in whole:
        for part in _cut(piece, shard_bytes) if settings.kind != "code" else [piece]:
            if filled and filled + part.end - part.start > shard_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(part)
            filled += part.end - part.start
    return [_name(group, settings, tokenizer_sha256) for group in groups if group]


def read_piece(piece: Piece, *, is_cut_at_lines: bool) -> bytes:
    """The bytes of a piece; a line belongs to the piece in which it begins."""
    try:
        with open(piece.path, "rb") as file:
            found = os.fstat(file.fileno())
            if (found.st_size, found.st_mtime_ns) != (piece.size, piece.mtime_ns):
                raise DataError(
                    f"{piece.path} has changed while it was being packed",
                    fix="pack again when nobody writes to it",
                )
            begin = piece.start
            if is_cut_at_lines and begin:
                file.seek(begin - 1)
                file.readline()
                begin = file.tell()
            file.seek(begin)
            data = file.read(max(piece.end - begin, 0))
            if is_cut_at_lines and data and not data.endswith(b"\n"):
                data += file.readline()
            return data
    except OSError as error:
        raise DataError(
            f"{piece.path} cannot be read: {error.strerror}", fix="mend its permissions"
        )


def _whole(file: Path) -> Piece:
    found = file.stat()
    return Piece(
        path=str(file), start=0, end=found.st_size, size=found.st_size, mtime_ns=found.st_mtime_ns
    )


def _cut(piece: Piece, shard_bytes: int) -> list[Piece]:
    if piece.size <= shard_bytes:
        return [piece]
    return [
        msgspec.structs.replace(piece, start=start, end=min(start + shard_bytes, piece.size))
        for start in range(0, piece.size, shard_bytes)
    ]


def _name(pieces: list[Piece], settings: PackSettings, tokenizer_sha256: str) -> Shard:
    deciding = [settings.kind, settings.field, settings.tokenizer, tokenizer_sha256, pieces]
    digest = hashlib.sha256(msgspec.json.encode(deciding)).hexdigest()
    return Shard(identity=digest[:32], pieces=pieces)
