"""The directory of a run: its newest checkpoint, and the record of its config, `config.json`, written once and compared ever after.

Called by `launch` and the household. A new directory is never made over an old run; going on with one (`--resume`) takes over its
config, and only what `--set` names may differ from it. Inside a cluster the directory is the run's own, and every rank compares its
config with the first one's. The format: docs/reference/launch.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from argosy.errors import ConfigError, HomeError, NotFoundError
from argosy.worker.settings import flatten, parse_keys
from argosy.worker.sources import find_changed, is_replaced

Record = dict[str, Any]
_OF_A_START = ("name", "digest", "threads", "source")
"""What may be another at a resume."""


def make_directory(name: str, wanted: str) -> Path:
    """A new directory for a run: the one that was asked for, or `runs/NAME-TIME`."""
    if wanted:
        directory = Path(wanted).absolute()
        if config_path(directory).exists():
            raise ConfigError(
                f"{wanted} holds a run already", fix=f"go on with it: --resume {wanted}"
            )
        return _make(directory, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs").absolute()
    for number in range(1, 1000):
        suffix = f"-{number}" if number > 1 else ""
        try:
            return _make(base / f"{name}-{stamp}{suffix}", exist_ok=False)
        except FileExistsError:
            continue
    raise HomeError(f"{base} is full of runs of this second", fix="use --directory DIR")


def config_path(directory: Path) -> Path:
    """Where the record is."""
    return directory / "config.json"


def read_record(directory: Path) -> Record:
    """The record of an earlier run."""
    path = config_path(directory)
    try:
        record = json.loads(path.read_bytes())
        if isinstance(record, dict) and {"config", "digest", "overrides"} <= record.keys():
            return record
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} is not the directory of a run: there is no config.json in it",
            fix=_advise(directory),
        )
    except (OSError, ValueError):
        pass
    above = _run_above(directory)
    if above is not None:
        raise ConfigError(f"{directory} is not the directory of a run", fix=_name(above))
    raise ConfigError(f"{path} cannot be read", fix="restore it, or begin a new run")


def _advise(directory: Path) -> str:
    above = _run_above(directory)
    if above is not None:
        return _name(above)
    return "name the directory that holds the run's config.json and checkpoints/"


def _name(run: Path) -> str:
    return f"name the run's own directory: --resume {run}"


def _run_above(directory: Path) -> Path | None:
    """The run that the directory is a part of, if it is: its checkpoints and its logs lie below it."""
    above = directory.absolute().parents[:2]
    return next((one for one in above if config_path(one).exists()), None)


def write_first(directory: Path, record: Record) -> None:
    """Write the record unless there is one; one with another config is refused."""
    path, draft = config_path(directory), directory / f"config.json.{os.getpid()}"
    _write(draft, record)
    try:
        os.link(draft, path)
    except FileExistsError:
        written = read_record(directory)
        if written["digest"] != record["digest"]:
            keys = ", ".join(find_differences(written["config"], record["config"]))
            raise ConfigError(
                f"this process has another config than its run began with: {keys or 'the seed'}",
                fix="was the script changed meanwhile? start a new run",
            )
    finally:
        draft.unlink()


def write_changed(directory: Path, record: Record) -> None:
    """Put the record of a run that goes on in place of the older one, unless it says the same: another rank may have been first."""
    before = read_record(directory)
    if all(before.get(key) == record[key] for key in _OF_A_START):
        return
    draft = directory / f"config.json.{os.getpid()}"
    _write(draft, record)
    draft.replace(config_path(directory))


def discard_unused(directory: Path) -> None:
    """Remove the directory of a run in which nothing has happened yet: one with more in it than its records stays."""
    with contextlib.suppress(OSError):
        left = [path.name for path in directory.iterdir()]
        if set(left) <= {"config.json", "peers.json"}:
            for name in left:
                (directory / name).unlink()
            directory.rmdir()
            if directory.parent == Path("runs").absolute():
                directory.parent.rmdir()  # if there are no others


def find_newest_save(directory: Path | str) -> tuple[int, Path] | None:
    """The newest checkpoint of a run and where it is, whoever has made it; None: there is none, or nobody can look."""
    from argosy.checkpoint.listings import Listing
    from argosy.train.saver import FOLDER

    listing = Listing(Path(directory) / FOLDER)
    try:
        steps = listing.steps()
        return (steps[-1], listing.directory_of(steps[-1])) if steps else None
    except (OSError, NotFoundError):
        return None  # also one that was removed in this moment: the run has ended all the same


def find_differences(before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ."""
    old, new = flatten(before), flatten(after)
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def check_consent(
    before: Record, after: Record, overrides: Iterable[str], allowed: Collection[str] = ()
) -> list[str]:
    """What the present words change of a run that goes on, one line each; what they do not name must be as it was."""
    named = set(parse_keys(overrides))
    lines = []
    for key, (old, new) in find_differences(before["config"], after["config"]).items():
        if key not in named and key not in flatten(after["config"]):
            raise ConfigError(
                f"the run began with {key} = {old!r}, and the program has no {key} now",
                fix="resume with the program that the run began with, or begin a new run",
            )
        if key not in named:
            raise ConfigError(
                f"the run began with {key} = {old!r}, the program now says {new!r}",
                fix=f"say which: --set {key}={old} or --set {key}={new}",
            )
        lines.append(f"{key}: {old!r} -> {new!r}")
    lines += _check_source(before, after, is_allowed="source" in allowed)
    numbers = [key for key in ("seed", "threads") if before.get(key) != after.get(key)]
    return lines + [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in numbers]


def _check_source(before: Record, after: Record, *, is_allowed: bool) -> list[str]:
    """What of the program has changed, one line each."""
    old, new = before.get("source", {}), after.get("source", {})
    script, now = before.get("script", ""), after.get("script", "")
    if new and is_replaced(script, old, new):
        if not is_allowed:
            raise ConfigError(
                f"the run began with {script}, and {now} is another program",
                fix=f"resume with {script}, or consent: --allow-source",
            )
        return [f"source: {script} -> {now}"]
    changed = find_changed(old, new)
    if changed and not is_allowed:
        raise ConfigError(
            f"{changed[0]} has changed since the run began"
            + (f", and {len(changed) - 1} more" if len(changed) > 1 else ""),
            fix="resume with the source that it began with, or consent: --allow-source",
        )
    return [f"source: {name}" for name in changed]


def _make(directory: Path, *, exist_ok: bool) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok:
            raise ConfigError(f"{directory} is a file", fix="name a directory")
        raise
    except OSError as error:
        raise HomeError(f"{directory} cannot be made: {error.strerror}", fix="use --directory DIR")
    return directory


def _write(path: Path, record: Record) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise HomeError(f"{path} cannot be written: {error.strerror}", fix="make room for it")
