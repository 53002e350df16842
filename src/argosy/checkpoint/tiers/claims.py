"""Whose a prefix is: each session that uploads there takes the next number, and only the highest may go on.

Two runs that were given one prefix by mistake are told so before a byte is sent. A run that goes on elsewhere from what was uploaded there is its heir: its
store notes whose claim it takes over, and from its first claim on the prefix is another's to whoever had it. Needs nothing of the store but puts that create.
No torch.
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
from argosy.errors import ArgosyError, ConfigError, TimedOut

_LOG = logging.getLogger("argosy.checkpoint")
_WRITERS = "writers"
_HEIR = "heir of "
"""The second line of an identity's file: the identity and, where it is known, the number of the claim that the store may take over."""
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
    return _identity(store)[0]


def adopt(bucket: Bucket, store: Path) -> None:
    """A store goes on with what was uploaded there."""
    last, number = newest(bucket)
    if last is not None and last.store:
        store.mkdir(parents=True, exist_ok=True)
        _write(store, identity_of(store), f"{last.store} {number}")


def inherit(bucket: Bucket, old: Path, new: Path) -> None:
    """A run that goes on with another one's checkpoints, or its own under another name, also goes on with what was uploaded of them: unless somebody else has meanwhile.

    Where the store cannot be asked, that is raised when it is noted all the same.
    """
    if not (old / names.IDENTITY).exists() or (old != new and (new / names.IDENTITY).exists()):
        return
    new.mkdir(parents=True, exist_ok=True)
    (theirs, heir), mine = _identity(old), identity_of(new)
    try:
        last, number = newest(bucket)
    except ArgosyError:
        _write(new, mine, heir or theirs)
        raise
    if last is not None and last.store == theirs:
        _write(new, mine, f"{theirs} {number}")
    elif last is not None and heir in _names(last, number):
        # It was an heir itself, and has uploaded nothing.
        _write(new, mine, heir)


def owner_if_foreign(bucket: Bucket, store: Path, *, has_steps: bool) -> str:
    """Which other run the prefix belongs to; nothing when it is this store's or nobody's, or when the store is new and may go on with it."""
    found, number = newest(bucket)
    is_new = not has_steps and not (store / names.IDENTITY).exists()
    if found is None or is_new:
        return ""
    mine, heir = _identity(store)
    return "" if found.store == mine or heir in _names(found, number) else _who(found)


def claim(bucket: Bucket, store: Path, run: str) -> int:
    """Be the one session that uploads there; the number to show at each commit. ConfigError names the other run."""
    mine, heir = _identity(store)
    for _ in range(_ATTEMPTS):
        last, number = newest(bucket)
        if last is not None and heir not in _names(last, number):
            is_same_run = not run or not last.run or run == last.run
            if last.store != mine or not is_same_run:
                raise ConfigError(
                    f"{bucket.url} is uploaded into by {_who(last)}",
                    fix="give each run a prefix of its own; to go on with that run here, load from it into an empty directory",
                )
        record = Claim(
            store=mine, run=run, host=socket.gethostname(), pid=os.getpid(), since=time.time()
        )
        if bucket.create(_path(number + 1), msgspec.json.encode(record)):
            if heir:
                _write(store, mine)
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


def _names(claim: Claim, number: int) -> tuple[str, str]:
    """By which an heir knows a claim."""
    return claim.store, f"{claim.store} {number}"


def _identity(store: Path) -> tuple[str, str]:
    """A store's own, made when there is none, and the claim that it may take over, or nothing."""
    path = store / names.IDENTITY
    try:
        own, _, more = path.read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        return _write(store, secrets.token_hex(8)), ""
    except OSError as failure:
        raise disk_error(failure, f"{path} cannot be read")
    return own, more.strip().removeprefix(_HEIR) if more.startswith(_HEIR) else ""


def _write(store: Path, own: str, heir: str = "") -> str:
    """Whole or not at all, and durable; the identity."""
    path = store / names.IDENTITY
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(f"{own}\n" + (f"{_HEIR}{heir}\n" if heir else ""))
            file.flush()
            os.fsync(file.fileno())
        os.rename(beside, path)
    except OSError as failure:
        raise disk_error(failure, f"{path} cannot be written")
    return own
