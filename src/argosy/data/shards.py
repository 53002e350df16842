"""Shards: one piece of work of `argosy data pack`, from input bytes to a file of tokens.

`write_shard` runs in the packer itself or, by `python -m argosy.data.shards DIRECTORY`, in a worker: shards come as lines on stdin, records leave as lines on
stdout, and the worker ends when stdin does, so a killed packer leaves nobody behind. A shard's record appears last, by rename:
with it, the shard is done and is never done again.
"""

from __future__ import annotations

import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from argosy.data.inputs import PackSettings, Piece, Shard, read_piece
from argosy.data.tokenfiles import DTYPES
from argosy.data.tokenizers import Tokenizer, encode_texts, load_tokenizer
from argosy.errors import ArgosyError, DataError

_SNIFF_BYTES = 8192


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished shard."""

    identity: str
    tokens: int
    documents: int
    skipped: int
    crc32: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says instead of a record."""

    what: str
    fix: str


def write_shard(
    directory: Path, shard: Shard, settings: PackSettings, tokenizer: Tokenizer
) -> Record:
    """Tokenize the shard's pieces and leave three files in the directory."""
    found = [pair for piece in shard.pieces for pair in _read_texts(piece, settings)]
    texts = [text for text, _ in found if text is not None]
    tokens, ends = encode_texts(tokenizer, texts, [end for text, end in found if text is not None])
    record = Record(
        identity=shard.identity,
        tokens=len(tokens),
        documents=len(ends),
        skipped=len(found) - len(texts),
        crc32=zlib.crc32(tokens.view(np.uint8).data),
    )
    _write(directory, f"{shard.identity}.tokens", tokens.tobytes())
    _write(directory, f"{shard.identity}.ends", ends.astype("<i8").tobytes())
    _write(directory, f"{shard.identity}.json", msgspec.json.encode(record))
    return record


def find_record(directory: Path, shard: Shard, dtype: str) -> Record | None:
    """The record of a shard that an earlier packer finished, if its files are whole."""
    try:
        text = (directory / f"{shard.identity}.json").read_bytes()
        record = msgspec.json.decode(text, type=Record)
        sizes = [
            (directory / f"{shard.identity}.{kind}").stat().st_size for kind in ("tokens", "ends")
        ]
    except (OSError, msgspec.DecodeError):
        return None
    is_whole = sizes == [record.tokens * DTYPES[dtype].itemsize, record.documents * 8]
    return record if is_whole else None


def read_shard(
    directory: Path, record: Record, dtype: str
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Tokens and document ends of a finished shard."""
    tokens = np.fromfile(directory / f"{record.identity}.tokens", DTYPES[dtype])
    if zlib.crc32(tokens.view(np.uint8).data) != record.crc32:
        raise DataError(
            f"{directory}/{record.identity}.tokens is damaged",
            fix=f"remove {directory}, pack again",
        )
    return tokens, np.fromfile(directory / f"{record.identity}.ends", "<i8")


def _read_texts(piece: Piece, settings: PackSettings) -> Iterator[tuple[bytes | None, bool]]:
    """Texts and whether a document ends with them; None for a file that is no text."""
    # Bytes may be cut anywhere; other tokenizers must not see half a line.
    data = read_piece(
        piece, is_cut_at_lines=settings.kind == "jsonl" or settings.tokenizer != "bytes"
    )
    if settings.kind == "jsonl":
        for text in _read_lines(piece, data, settings.field):
            yield text, True
    elif settings.kind == "code" and b"\0" in data[:_SNIFF_BYTES]:
        yield None, True
    elif piece.size:
        yield data, piece.end == piece.size


def _read_lines(piece: Piece, data: bytes, field: str) -> Iterator[bytes]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in enumerate(data.splitlines()):
        if not line.strip():
            continue
        try:
            text = decoder.decode(line)[field]
        except msgspec.DecodeError as error:
            raise _bad_line(piece, number, f"is no JSON object: {error}")
        except KeyError:
            raise _bad_line(piece, number, f"has no field {field!r}")
        if not isinstance(text, str):
            raise _bad_line(piece, number, f"has no text in {field!r} but {type(text).__name__}")
        if text:
            yield text.encode("utf-8", errors="surrogatepass")


def _bad_line(piece: Piece, number: int, what: str) -> DataError:
    with open(piece.path, "rb") as file:
        before = file.read(piece.start)
    first = before.count(b"\n") + (0 if not before or before.endswith(b"\n") else 1)
    return DataError(
        f"{piece.path}, line {first + number + 1} {what}",
        fix="mend the line, or name the field that holds the text: --jsonl FIELD",
    )


def _write(directory: Path, name: str, data: bytes) -> None:
    temporary = directory / f"{name}.{os.getpid()}.tmp"
    try:
        temporary.write_bytes(data)
        os.replace(temporary, directory / name)
    except OSError as error:
        raise DataError(f"cannot write {directory / name}: {error.strerror}", fix="free some space")


def _serve(directory: Path) -> None:
    """Work for the packer at the other end of stdin and stdout: settings first, then shards."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=PackSettings)
    tokenizer = load_tokenizer(settings.tokenizer)
    for line in sys.stdin.buffer:
        answer: Record | Refusal
        try:
            shard = msgspec.json.decode(line, type=Shard)
            answer = write_shard(directory, shard, settings, tokenizer)
        except ArgosyError as error:
            answer = Refusal(what=error.what, fix=error.fix)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    # Ctrl-C goes to the whole group of processes; the packer decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(Path(sys.argv[1]))
    except BrokenPipeError:
        os._exit(0)
