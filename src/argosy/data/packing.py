"""Packing: text, JSONL or source code into a token file, in parallel, and again from where it was killed.

`pack` is `argosy data pack`. Work happens in `code.bin.partial/`, shard by shard; the result is put together in order and appears by rename.
The same inputs and settings give the same bytes with any number of workers and after any number of kills. Needs no torch.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeAlias

import msgspec

from argosy.data.inputs import PackSettings, Shard, find_inputs, plan_shards
from argosy.data.shards import Record, Refusal, find_record, read_shard, write_shard
from argosy.data.tokenfiles import Sidecar
from argosy.data.tokenizers import Tokenizer, load_tokenizer
from argosy.data.tokenwriter import TokenWriter
from argosy.errors import ConfigError, DataError

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """What was made."""

    out: str
    tokens: int
    documents: int
    dtype: str
    tokenizer: str
    vocabulary_size: int
    sha256: str
    files: int
    skipped: int
    input_bytes: int
    shards: int
    resumed_shards: int


def pack(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    settings: PackSettings | None = None,
    on_progress: OnProgress | None = None,
) -> Packed:
    """Pack the inputs into the token file `out`; refuses before anything is written."""
    settings = settings or PackSettings()
    target = Path(os.path.expanduser(os.fspath(out))).absolute()
    _check_target(target, settings)
    files = find_inputs(inputs, settings)
    if target in files:
        raise ConfigError(f"{target} is an input and the output", fix="name another --out")
    tokenizer = load_tokenizer(settings.tokenizer)
    shards = plan_shards(files, settings, tokenizer.sha256)
    with _work_directory(target) as directory:
        done = {shard.identity: find_record(directory, shard, tokenizer.dtype) for shard in shards}
        records = {identity: record for identity, record in done.items() if record}
        num_resumed = len(records)
        progress = _Progress(shards, records, on_progress)
        pending = [shard for shard in shards if shard.identity not in records]
        for record in _make(pending, directory, settings, tokenizer):
            records[record.identity] = record
            progress.add(record)
        sidecar = _assemble(target, directory, [records[s.identity] for s in shards], tokenizer)
        shutil.rmtree(directory)
    return Packed(
        out=str(target),
        tokens=sidecar.count,
        documents=sidecar.documents,
        dtype=sidecar.dtype,
        tokenizer=sidecar.tokenizer,
        vocabulary_size=sidecar.vocabulary_size,
        sha256=sidecar.sha256,
        files=len(files),
        skipped=sum(record.skipped for record in records.values()),
        input_bytes=progress.total,
        shards=len(shards),
        resumed_shards=num_resumed,
    )


class _Progress:
    def __init__(
        self, shards: list[Shard], records: dict[str, Record], on_progress: OnProgress | None
    ) -> None:
        self._sizes = {shard.identity: shard.num_bytes for shard in shards}
        self._on_progress = on_progress
        self.total = sum(self._sizes.values())
        self._done = sum(self._sizes[identity] for identity in records)
        self._tell()

    def add(self, record: Record) -> None:
        self._done += self._sizes[record.identity]
        self._tell()

    def _tell(self) -> None:
        if self._on_progress:
            self._on_progress(self._done, self.total)


def _check_target(target: Path, settings: PackSettings) -> None:
    if target.is_dir() or not target.parent.is_dir():
        what = "is a directory" if target.is_dir() else "lies in a directory that does not exist"
        raise ConfigError(f"{target} {what}", fix="name a file to make, e.g. --out code.bin")
    if target.exists() and not settings.should_overwrite:
        raise ConfigError(f"{target} exists", fix="name another --out, or say --overwrite")


@contextmanager
def _work_directory(target: Path) -> Iterator[Path]:
    """`code.bin.partial/`, for one packer at a time; work that was done stays in it when the packer does not come to its end."""
    directory = target.with_name(target.name + ".partial")
    try:
        directory.mkdir(exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}", fix="name another --out")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"another process is packing {target}", fix="wait for it, or name another --out"
        )
    try:
        for left_over in (*directory.glob("*.tmp"), *directory.glob(".*.tmp")):
            left_over.unlink(missing_ok=True)
        yield directory
    except BaseException:
        with suppress(OSError):
            directory.rmdir()  # only if no work is in it
        raise
    finally:
        os.close(lock)


def _make(
    pending: list[Shard], directory: Path, settings: PackSettings, tokenizer: Tokenizer
) -> Iterator[Record]:
    """Records of the shards as they are finished, made here or by workers."""
    asked = settings.workers or len(os.sched_getaffinity(0))
    num_workers = min(asked, len(pending))
    if num_workers <= 1:
        for shard in pending:
            yield write_shard(directory, shard, settings, tokenizer)
        return
    workers = [_start_worker(directory, settings) for _ in range(num_workers)]
    try:
        yield from _distribute(workers, pending)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.communicate()


def _distribute(workers: list[subprocess.Popen[bytes]], pending: list[Shard]) -> Iterator[Record]:
    waiting = iter(pending)
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(_pipe(worker.stdout), selectors.EVENT_READ, worker)
            _hand_out(worker, next(waiting))
        for _ in pending:
            key = selector.select()[0][0]
            line = key.data.stdout.readline()
            if not line:
                raise _worker_lost(key.data)
            answer = msgspec.json.decode(line, type=dict)
            if "what" in answer:
                raise DataError(**msgspec.structs.asdict(msgspec.convert(answer, Refusal)))
            if (shard := next(waiting, None)) is not None:
                _hand_out(key.data, shard)
            yield msgspec.convert(answer, Record)


def _start_worker(directory: Path, settings: PackSettings) -> subprocess.Popen[bytes]:
    # Each worker is one thread of work; the tokenizer library would start as many again.
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "argosy.data.shards", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C is the parent's business, also while a worker is still importing; workers end with their input.
        process_group=0,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"},
    )
    _send(worker, msgspec.json.encode(settings))
    return worker


def _hand_out(worker: subprocess.Popen[bytes], shard: Shard) -> None:
    _send(worker, msgspec.json.encode(shard))


def _send(worker: subprocess.Popen[bytes], line: bytes) -> None:
    try:
        pipe = _pipe(worker.stdin)
        pipe.write(line + b"\n")
        pipe.flush()
    except BrokenPipeError:
        raise _worker_lost(worker)


def _worker_lost(worker: subprocess.Popen[bytes]) -> DataError:
    code = worker.wait()
    how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return DataError(
        f"a packing process was {how}" if code < 0 else f"a packing process {how}",
        fix="the same command goes on where it stopped; with less memory use fewer --workers",
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _assemble(
    target: Path, directory: Path, records: list[Record], tokenizer: Tokenizer
) -> Sidecar:
    with TokenWriter(target, tokenizer, scratch=directory) as writer:
        for record in records:
            writer.append(*read_shard(directory, record, tokenizer.dtype))
        return writer.close()
