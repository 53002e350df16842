"""The environment of an attempt, whole: the submitter's, the role's, and what the keeper adds.

Values come from sealed blobs and go only into processes; none is logged or written to disk.
"""

from __future__ import annotations

import json
import os
import stat

from argosy.control.keeper.arenas import ArenaError
from argosy.control.keeper.attempts import Attempt, OrderError
from argosy.control.keeper.state import Keeper


def build_environment(keeper: Keeper, attempt: Attempt, store: dict[str, str]) -> dict[str, str]:
    """Blob, then env, then the keeper's own variables; raises OrderError when the blob is lost."""
    env: dict[str, str] = {}
    name = attempt.order.get("env_blob")
    if name:
        try:
            content = json.loads(keeper.blobs.get(name))
            env.update({str(key): str(value) for key, value in content.items()})
        except ArenaError as error:
            raise OrderError(f"its environment is lost: {error}")
        except (ValueError, AttributeError):
            raise OrderError(f"blob {name!r} is no environment")
    env.update(attempt.order.get("env") or {})
    env.update(store)
    env["ARGOSY_MARK"] = keeper.mark(attempt.attempt)
    env["ARGOSY_ATTEMPT"] = attempt.attempt
    if attempt.is_guest:
        # A command beside a process has nothing to say to the keeper: `argosy exec … env` shows no token.
        for name in ("ARGOSY_KEEPER_SOCKET", "ARGOSY_TOKEN"):
            env.pop(name, None)
    else:
        env["ARGOSY_KEEPER_SOCKET"] = keeper.socket_path
        env["ARGOSY_TOKEN"] = attempt.token
    if attempt.order.get("error_file"):
        env.setdefault("TORCHELASTIC_ERROR_FILE", attempt.order["error_file"])
    return env


def secret_names(attempt: Attempt) -> list[str]:
    """In the order in which their descriptors are passed."""
    return sorted(attempt.order.get("secret_blobs") or {})


def build_limits(keeper: Keeper, attempt: Attempt) -> dict[str, tuple[int, int]]:
    """The submitter's limits; open files never stay at what the keeper raised its own to."""
    limits = {
        name: (int(limit[0]), int(limit[1]))
        for name, limit in (attempt.order.get("limits") or {}).items()
    }
    limits.setdefault("nofile", keeper.before.open_files)
    return limits


def build_affinity(keeper: Keeper, attempt: Attempt) -> list[int]:
    """The CPUs ordered, else those the keeper itself was started with."""
    return list(attempt.order.get("affinity") or keeper.before.affinity)


def open_log(path: str) -> int:
    """An O_APPEND descriptor; makes parent directories. Raises OSError."""
    # Not blocking: somebody may have put a FIFO there, and nobody may read it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    os.set_blocking(fd, True)
    return fd


def read_regular(path: str, most_bytes: int) -> str:
    """The beginning of a plain file; empty when it is missing or anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return os.read(fd, most_bytes).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
