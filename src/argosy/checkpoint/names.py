"""Names and limits of the checkpoint format: steps, staging directories, data files, tensors.

Everybody who makes or reads a name in a store asks here, so that nothing read from a disk can lead out of its directory.
Pure; docs/reference/checkpoint-format.md is the law.
"""

from __future__ import annotations

import operator
import re
import zlib
from typing import Literal, get_args

from argosy.errors import CheckpointDamaged, ConfigError

Kind = Literal["frozen", "model", "optimizer", "extra"]
"""Mutability class of a tensor and of its file."""
KINDS: tuple[Kind, ...] = get_args(Kind)

FORMAT = "argosy-checkpoint"
VERSION = 1
MANIFEST = "MANIFEST.json"
SIGNATURE = "MANIFEST.sig"
INDEX = "model.safetensors.index.json"
VALUES = "extra.json"
ENCRYPTED = "aes-256-gcm"
"""What a manifest requires of a reader when it is sealed."""
LOCK = ".writer"
IDENTITY = ".identity"
"""Names the store to an object store."""
UPLOADER = ".uploader"
"""Locked by the process that uploads from here."""
SESSIONS = ".sessions"
"""How many sessions have failed, and how long all of them have lasted."""
PINS = "pins"
HOLDERS = 1
"""Version of what is said to the holders of peers' memory."""
SUFFIX = ".safetensors"

MOST_MANIFEST_BYTES = 256 << 20
MOST_VALUES_BYTES = 256 << 20
MOST_HEADER_BYTES = 100_000_000
MOST_FILES = 1 << 16
MOST_TENSORS = 1 << 22
MOST_PARTS = 1 << 24
MOST_DIMS = 16
MOST_DEPTH = 64
LARGEST = (1 << 63) - 1

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEP = re.compile(r"step-(\d{9,19})")
_STAGING = re.compile(r"\.(staging|removed)-(\d{9,19})-([A-Za-z0-9-]+)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def step_name(step: int) -> str:
    """Directory of a committed checkpoint."""
    return f"step-{check_step(step):09d}"


def step_of(name: str) -> int | None:
    """The step of a directory's name; None when it is no checkpoint's."""
    found = _STEP.fullmatch(name)
    if found is None or int(found[1]) > LARGEST or name != f"step-{int(found[1]):09d}":
        return None
    return int(found[1])


def staging_name(step: int, nonce: str) -> str:
    """Directory of a save that is under way."""
    return f".staging-{check_step(step):09d}-{nonce}"


def removed_name(step: int, nonce: str) -> str:
    """Directory of a checkpoint that is being deleted."""
    return f".removed-{check_step(step):09d}-{nonce}"


def socket_name(host: str) -> str:
    """Where the writer process of a host listens; short, as addresses of sockets are."""
    return f".writer-{re.sub(r'[^A-Za-z0-9.-]', '_', host)[:40]}"


def holder_name(host: str) -> str:
    """Where the holder of a host's memory listens: one of another version is another; what cannot stay of a name is told apart by a checksum."""
    plain = re.sub(r"[^A-Za-z0-9.-]", "_", host)[:40]
    apart = "" if plain == host else f"-{zlib.crc32(host.encode()):08x}"
    return f"holder-{HOLDERS}-{plain}{apart}"


def damaged_name(step: int) -> str:
    """A mark beside a checkpoint that was read and is not whole: no file is linked from it."""
    return f".damaged-{check_step(step):09d}"


def sessions_draft(pid: int) -> str:
    """A new text of the file of sessions, until it takes the old one's place."""
    return f"{SESSIONS}-{pid}"


def is_draft(name: str) -> bool:
    """Whether it is one of those."""
    return name.startswith(f"{SESSIONS}-")


def leftover_of(name: str) -> tuple[str, int, str] | None:
    """("staging" or "removed", step, nonce) of a directory that is nobody's to read."""
    found = _STAGING.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), found[3])


def check_step(step: object) -> int:
    """The step itself, if it is one."""
    try:
        found = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if not 0 <= found <= LARGEST:
        raise ConfigError(f"step {step!r} is no step", fix="use a whole number from 0 up")
    return found


def data_file(kind: Kind, number: int, count: int, writer: int | None = None) -> str:
    """Name of a data file; `writer` for files of shards."""
    prefix = "model" if kind == "frozen" else kind
    shard = "" if writer is None else f"shard-{writer:05d}-"
    return f"{shard}{prefix}-{number:05d}-of-{count:05d}{SUFFIX}"


def check_file(name: object, where: str) -> str:
    """A plain file name of the directory it is read from; anything else is refused."""
    if isinstance(name, str) and _FILE.fullmatch(name):
        return name
    raise CheckpointDamaged(
        f"{where} names the file {name!r}, which is no plain name",
        fix="use another checkpoint: this one was not written by Argosy as it is",
    )


def is_attachment(name: str) -> bool:
    """Whether a user's file may lie in a checkpoint under this name."""
    return bool(_FILE.fullmatch(name)) and not name.endswith((SUFFIX, MANIFEST, SIGNATURE))


def is_tensor_name(name: str) -> bool:
    """Whether a tensor may be called so."""
    return bool(name) and len(name.encode("utf-8", "replace")) <= 1024 and not _CONTROL.search(name)
