"""The plain save: the committed version in one safetensors file with a commit record, written on stop and read on resume.

One rank writes, with the version pinned: beside, flushed, read back and compared, then renamed. A resume checks the digest, the plan, the data and the numerics fingerprint before anything is trained. No pickle.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from argosy.errors import DataError, HomeError, MismatchError
from argosy.train import digests, fingerprint
from argosy.train.memories import Version
from argosy.train.stateplan import StatePlan

_RECORD, _TENSORS = "SAVE.json", "state.safetensors"
_FORMAT = 1
_IMAGE = "optimizer"
_WAIT_SECONDS = 20.0


def save(
    directory: Path, version: Version, facts: Mapping[str, Any], ledger: Mapping[str, Any]
) -> Path:
    """Write a version with its ledger; the directory appears when it is whole."""
    step = int(ledger["step"])
    target = directory / f"step-{step:09d}"
    if target.exists():
        return target
    beside = directory / f".{target.name}.{os.getpid()}"
    beside.mkdir(parents=True, exist_ok=True)
    try:
        named = dict(zip(_keys(version.plan), version.tensors, strict=True))
        if version.image is not None:
            named[_IMAGE] = version.image
        save_file({key: tensor.contiguous() for key, tensor in named.items()}, beside / _TENSORS)
        record = {
            **facts,
            "format": _FORMAT,
            "step": step,
            "ledger": ledger,
            "begun": [name for name in version.plan.names if version.has_begun(name)],
            "digest": digests.of_version(version),
            "plan": version.plan.digest,
        }
        _verify(beside / _TENSORS, named)
        (beside / _RECORD).write_text(json.dumps(record, indent=1))
        for path in (beside / _TENSORS, beside / _RECORD, beside):
            _flush(path)
        beside.rename(target)
        _flush(directory)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return target


def newest(directory: Path) -> Path | None:
    """The newest whole save in a directory, or the directory itself if it is one."""
    if (directory / _RECORD).exists():
        return directory
    found = sorted(path for path in directory.glob("step-*") if (path / _RECORD).exists())
    return found[-1] if found else None


def record_of(path: Path) -> dict[str, Any]:
    """What a save says of itself."""
    try:
        found: dict[str, Any] = json.loads((path / _RECORD).read_text())
        if found["format"] == _FORMAT:
            return found
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{path / _RECORD} cannot be read", fix="use an older save")
    raise DataError(
        f"{path} has format {found['format']}, this version reads {_FORMAT}",
        fix="resume with the version of Argosy that saved it",
    )


def load(path: Path, version: Version) -> None:
    """Fill a version from a save; MismatchError when it is not what it says it is."""
    record = record_of(path)
    if record["plan"] != version.plan.digest:
        raise MismatchError(
            f"{path} was saved by another model or optimizer",
            fix="resume with the model and optimizer it was made with",
        )
    try:
        stored = load_file(path / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path / _TENSORS} cannot be read: {error}", fix="use an older save")
    for key, tensor in zip(_keys(version.plan), version.tensors, strict=True):
        tensor.copy_(stored[key])
    for name in version.plan.names:
        version.set_begun(name, name in set(record["begun"]))
    version.ledger = record["ledger"]
    if version.image is not None:
        version.image.copy_(stored[_IMAGE])
    if digests.of_version(version) != record["digest"]:
        raise DataError(
            f"{path} does not have the digest it was saved with", fix="use an older save"
        )


def check_facts(path: Path, facts: Mapping[str, Any], *, allow_drift: bool = False) -> None:
    """Refuse a resume with other data or under another numerics fingerprint."""
    record = record_of(path)
    if record["data"] != facts["data"]:
        raise MismatchError(
            f"{path} was trained on other data, another batch size, other lanes or another seed",
            fix="resume with the same data and seed, or start a new run",
        )
    changed = fingerprint.differences(record["fingerprint"], facts["fingerprint"])
    if changed and not allow_drift:
        raise MismatchError(
            f"{path} was saved under another numerics fingerprint: {'; '.join(changed)}",
            fix="resume where it was saved, or give --allow-drift: bits will differ",
        )


def save_once(
    directory: Path, step: int, write: Callable[[], object], is_turn: Callable[[], bool]
) -> None:
    """One of the ranks that stop saves; the others wait for it, and take its place if it ends before."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while step and time.monotonic() < deadline:
        if (directory / f"step-{step:09d}" / _RECORD).exists():
            return
        if is_turn():
            write()
            return
        time.sleep(0.02)


def _verify(path: Path, named: Mapping[str, torch.Tensor]) -> None:
    """What was written is read again and compared, byte by byte."""
    stored = load_file(path)
    for key, tensor in named.items():
        if digests.of_tensor(stored[key]) != digests.of_tensor(tensor):
            raise HomeError(f"{key!r} was not written as it is", fix="look at the disk")


def _keys(plan: StatePlan) -> list[str]:
    return [f"{field.name}/{field.key}" for field in plan.fields]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
