"""What was written down about peers: `peers.json` in the directory of a run, and in a store that is copied to them.

It says under which name the memory of peers has the checkpoints: a resume finds them when the store is lost, the command line finds them, and a new run
in a directory of the same name never goes on with another's. Written by the trainer and the checkpointer. No torch.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from argosy.checkpoint.directio import disk_error
from argosy.checkpoint.peers.settings import Peers
from argosy.errors import ConfigError

NOTE = "peers.json"


def note(peers: Peers, directory: Path) -> Peers:
    """These settings with the name of the run, which is the first that anybody has noted there; written down when it returns."""
    name = peers.run or f"{directory.absolute()}#{secrets.token_hex(8)}"
    named = msgspec.structs.replace(peers, run=name)
    before = noted(directory)
    if before is None:
        _write(named, directory, is_first=True)
        before = noted(directory)
    if before is not None and not peers.run:
        named = msgspec.structs.replace(peers, run=before.run)
    if before != named:
        _write(named, directory, is_first=False)
    return named


def noted(directory: Path) -> Peers | None:
    """What was written down; None when nothing was."""
    path = directory / NOTE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Peers)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as failure:
        raise disk_error(failure, f"{path} cannot be read")
    except msgspec.DecodeError as failure:
        raise ConfigError(
            f"{path} cannot be understood: {failure}",
            fix="remove it: what peers hold of this run is not found then",
        )


def _write(named: Peers, directory: Path, *, is_first: bool) -> None:
    """Whole or not at all; `is_first`: unless another process has."""
    path, draft = directory / NOTE, directory / f".{NOTE}.{secrets.token_hex(4)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(msgspec.json.encode(named) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if not is_first:
            draft.rename(path)
            return
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # of another rank of the run: its name is the run's
        finally:
            draft.unlink()
    except OSError as failure:
        raise disk_error(failure, f"{path} cannot be written")
