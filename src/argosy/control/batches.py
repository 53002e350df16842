"""Frames for the keeper, built from launches: batches, stores, releases and messages to members.

Follows docs/reference/keeper-protocol.md. Called by HostSide alone; pure. The values of the submitter's environment are
not known here: a batch's `zygote` names the blob as `env_blob`, and the agent's I/O replaces it by `env`, the blob's
variables that are read when libraries are loaded.
"""

from __future__ import annotations

from typing import Any

from argosy.control.identity import token
from argosy.protocol.messages import Launch

Frame = dict[str, Any]
Key = tuple[str, str, int]

LOOPBACK = "127.0.0.1"


def group_key(launch: Launch) -> tuple[str, str, int, bool]:
    """Launches with the same key go into one batch."""
    return (launch.run, launch.role, launch.generation, launch.parked)


def store_key(launch: Launch) -> Key:
    """The generation whose store a launch needs."""
    return (launch.run, launch.role, launch.generation)


def spawn_frame(launches: list[Launch], secret: str) -> Frame:
    """One batch of like launches."""
    first = launches[0]
    return {
        "type": "spawn",
        "batch": {
            "run": first.run,
            "role": first.role,
            "generation": first.generation,
            "zygote": _zygote(first),
            "store": {"host": LOOPBACK} if first.gang and not first.parked else None,
            "attempts": [_order(launch, secret) for launch in launches],
        },
    }


def store_frame(launch: Launch, secret: str) -> Frame:
    """The store of a generation, asked for by a member that is there already.

    The keeper knows the member and starts nothing; the reply comes when it is known who hosts. That the member is named
    lets the agent's I/O choose the same warm parent for the store's host as for the members.
    """
    frame = spawn_frame([launch], secret)
    frame["batch"]["store"] = {"host": LOOPBACK}
    return frame


def release_frame(launch: Launch, store: dict[str, Any]) -> Frame:
    """Open a spare's gate with its rank and the generation's store."""
    env = {
        **launch.env,
        "MASTER_ADDR": str(store["host"]),
        "MASTER_PORT": str(store["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": str(bool(store.get("hosted", True))),
    }
    gang = {
        "generation": launch.generation,
        "rank": launch.rank,
        "world_size": launch.world_size,
    }
    return {"type": "release", "attempt": launch.attempt, "env": env, "gang": gang}


def reform_frame(attempt: str, reform: dict[str, Any], store: dict[str, Any]) -> Frame:
    """Tell a member that joined about its new generation."""
    message = {
        "tell": "reform",
        **reform,
        "master_addr": store["host"],
        "master_port": store["port"],
        "hosted": bool(store.get("hosted", True)),
    }
    return {"type": "tell", "attempt": attempt, "message": message}


def late_place_frame(attempt: str, reform: dict[str, Any]) -> Frame:
    """The place of a member that ended before it could be told; nobody hears it but those who would wait for it."""
    return {"type": "tell", "attempt": attempt, "message": {"tell": "reform", **reform}}


def fault_frame(attempt: str, fault: dict[str, Any]) -> Frame:
    """Tell a member what to break in itself."""
    return {"type": "tell", "attempt": attempt, "message": fault}


def stop_frame(attempt: str, launch: Launch | None) -> Frame:
    """Stop signal, then after the grace the whole tree."""
    return {
        "type": "stop",
        "attempt": attempt,
        "signal": launch.stop_signal if launch is not None else "SIGTERM",
        "grace_seconds": launch.grace_seconds if launch is not None else 10.0,
    }


def _zygote(launch: Launch) -> dict[str, Any] | None:
    if not launch.warm:
        return None
    return {
        "python": launch.python,
        "preload": list(launch.preload),
        "env_blob": launch.env_blob,
    }


def _order(launch: Launch, secret: str) -> dict[str, Any]:
    return {
        "attempt": launch.attempt,
        "run": launch.run,
        "role": launch.role,
        "index": launch.index,
        "generation": launch.generation,
        "token": token(launch.attempt, secret),
        "program": launch.program,
        "python": launch.python,
        "env_blob": launch.env_blob,
        "env": launch.env,
        "cwd": launch.cwd,
        "umask": launch.umask,
        "limits": {name: list(limit) for name, limit in launch.limits.items()},
        "affinity": launch.affinity,
        "stdout": launch.stdout,
        "stderr": launch.stderr,
        "tty": launch.tty,
        "error_file": launch.error_file,
        "threads": launch.threads,
        "nice": launch.nice,
        "memory_bytes": launch.memory_bytes,
        "secret_blobs": launch.secret_blobs,
        "parked": launch.parked,
        "join": None,
    }
