"""Whose a prefix is: each session that uploads there takes the next number, and only the highest may go on.

Two runs that were given one prefix by mistake are told so before a byte is sent. A run that goes on elsewhere from what it loaded there keeps it: the
store on disk takes the identity of the prefix, or of the store that it was resumed from. Needs nothing of the store but puts that create. No torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import time
from pathlib import Path

import msgspec

from argosy.checkpoint import names
from argosy.checkpoint.directio import disk_error
from argosy.checkpoint.tiers.buckets import Bucket
from argosy.errors import ConfigError, TimedOut

_LOG = logging.getLogger("argosy.checkpoint")
_WRITERS = "writers"
_HEIR = "heir of "
"""In the file of an identity that a store has from another, with the number of that one's claim: the first claim after it may be of a run of another name."""
_ATTEMPTS = 5
_LOOK_SECONDS = 0.1


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """writers/<number>.json."""

    store: str
    run: str = ""
    host: str = ""
    pid: int = 0
    since: float = 0.0


def identity_of(store: Path) -> str:
    """What names a store on disk; made when it is first asked for."""
    path = store / names.IDENTITY
    try:
        return path.read_text(encoding="utf-8").partition("\n")[0]
    except FileNotFoundError:
        return _write(path, secrets.token_hex(8))
    except OSError as failure:
        raise disk_error(failure, f"{path} cannot be read")


def adopt(bucket: Bucket, store: Path) -> None:
    """A store goes on with what was uploaded there: it takes the identity of the prefix."""
    claim, _ = newest(bucket)
    if claim is not None and claim.store:
        store.mkdir(parents=True, exist_ok=True)
        _write(store / names.IDENTITY, claim.store)


def inherit(bucket: Bucket, old: Path, new: Path) -> None:
    """A run that goes on with another one's checkpoints in a directory of its own also goes on with what that one has uploaded: as long as nobody else has, and once."""
    if not (old / names.IDENTITY).exists() or (new / names.IDENTITY).exists():
        return
    last, number = newest(bucket)
    if last is not None and last.store == identity_of(old):
        new.mkdir(parents=True, exist_ok=True)
        _write(new / names.IDENTITY, f"{last.store}\n{_HEIR}{number}")


def _is_heir(store: Path, number: int) -> bool:
    """Of the claim with this number."""
    lines = (store / names.IDENTITY).read_text(encoding="utf-8").splitlines()
    return lines[1:] == [f"{_HEIR}{number}"]


def owner_if_foreign(bucket: Bucket, store: Path, *, has_steps: bool) -> str:
    """Which other run the prefix belongs to; nothing when it is this store's or nobody's, or when the store is new and may go on with it."""
    found, _ = newest(bucket)
    is_new = not has_steps and not (store / names.IDENTITY).exists()
    if found is None or is_new or found.store == identity_of(store):
        return ""
    return _who(found)


def claim(bucket: Bucket, store: Path, run: str) -> int:
    """Be the one session that uploads there; the number to show at each commit. ConfigError names the other run."""
    mine = identity_of(store)
    for _ in range(_ATTEMPTS):
        last, number = newest(bucket)
        is_other_run = last is not None and bool(run and last.run and run != last.run)
        if last is not None and (
            last.store != mine or (is_other_run and not _is_heir(store, number))
        ):
            raise ConfigError(
                f"{bucket.url} is uploaded into by {_who(last)}",
                fix="give each run a prefix of its own; to go on with that run here, load from it into an empty directory",
            )
        record = Claim(
            store=mine, run=run, host=socket.gethostname(), pid=os.getpid(), since=time.time()
        )
        if bucket.create(_path(number + 1), msgspec.json.encode(record)):
            if is_other_run:
                _write(store / names.IDENTITY, mine)
            bucket.remove([_path(old) for old in range(max(1, number - 2), number)])
            return number + 1
    raise ConfigError(
        f"{bucket.url} is claimed by several sessions at once", fix="let one run upload there"
    )


def renew(bucket: Bucket, store: Path, run: str, number: int) -> int:
    """The number to go on with: the same, or the next when another process of this host has uploaded from the same store meanwhile."""
    if number:
        last, newer = newest(bucket)
        if newer == number:
            return number
        if last is not None and last.host != socket.gethostname():
            check(bucket, number)
    return claim(bucket, store, run)


def check(bucket: Bucket, number: int) -> None:
    """ConfigError when another session has taken over."""
    last, newer = newest(bucket)
    if newer > number and last is not None:
        raise ConfigError(
            f"{bucket.url} has been taken over by {_who(last)}",
            fix="let one run upload there: give each a prefix of its own",
        )


def newest(bucket: Bucket) -> tuple[Claim | None, int]:
    """The claim with the highest number, and that."""
    numbers = [number for path in bucket.list(_WRITERS) if (number := _number_of(path))]
    if not numbers:
        return None, 0
    number = max(numbers)
    try:
        return msgspec.json.decode(bucket.read(_path(number)) or b"{}", type=Claim), number
    except msgspec.DecodeError:
        raise ConfigError(
            f"{bucket.url}/{_path(number)} cannot be read",
            fix="see who wrote it; remove it if nobody uploads there",
        )


def lock_uploads(store: Path, deadline: float) -> int:
    """Be the one process of this host that uploads from a store; a session that was killed may have left one that finishes, which is waited for."""
    path = store / names.UPLOADER
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as failure:
        raise disk_error(failure, f"{path} cannot be made")
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise TimedOut(
                    f"another process still uploads from {store}", fix="wait for it, or end it"
                )
        time.sleep(_LOOK_SECONDS)


def _who(claim: Claim) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(claim.since))
    run = f"the run {claim.run!r}" if claim.run else "another run"
    return f"{run} on {claim.host or 'an unknown host'}, process {claim.pid}, since {since}"


def _path(number: int) -> str:
    return f"{_WRITERS}/{number:09d}.json"


def _number_of(path: str) -> int:
    stem = path.rpartition("/")[2].removesuffix(".json")
    return int(stem) if stem.isdigit() and len(stem) == 9 else 0


def _write(path: Path, text: str) -> str:
    """Whole or not at all, and durable."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(beside, path)
    except OSError as failure:
        raise disk_error(failure, f"{path} cannot be written")
    return text
