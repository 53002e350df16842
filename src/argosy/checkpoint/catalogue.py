"""What a store holds: its steps, the newest that can be used, and whether a checkpoint is still what was saved.

Only reads. Who may delete is decided by retention, who loads asks here which checkpoint to try next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from argosy.checkpoint import headers, names, reads
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.opened import Opened
from argosy.errors import ArgosyError, CheckpointDamaged, ConfigError, NotFoundError


@dataclass(kw_only=True)
class Report:
    """What a verification found."""

    step: int
    faults: list[str] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def is_good(self) -> bool:
        """Nothing is wrong."""
        return not self.faults


class Catalogue:
    """A store, seen from outside."""

    def __init__(self, path: Path | str, *, files: Files = FILES) -> None:
        self.path = Path(path)
        self._files = files

    def steps(self) -> list[int]:
        """Steps that have a directory, rising; whether they can be used is found by opening them."""
        try:
            listed = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(step for name in listed if (step := names.step_of(name)) is not None)

    def open(self, step: int) -> Opened:
        """A checkpoint; NotFoundError names those that are there."""
        names.check_step(step)
        known = self.steps()
        if step not in known:
            raise NotFoundError(
                f"{self.path} has no step {step}",
                fix=f"it has {_listed(known)}" if known else "nothing was saved there yet",
            )
        opened = Opened(self.path / names.step_name(step), files=self._files)
        if opened.step != step:
            opened.close()
            raise CheckpointDamaged(
                f"{opened.path.name} holds step {opened.step}: it was renamed or swapped",
                fix="give it its own name back",
            )
        return opened

    def candidates(self) -> Iterator[int]:
        """Steps to try, the newest first."""
        yield from reversed(self.steps())

    def pins(self) -> dict[int, str]:
        """Pinned steps with their reasons."""
        found = {}
        try:
            for entry in os.scandir(self.path / names.PINS):
                step = names.step_of(entry.name)
                if step is not None:
                    found[step] = Path(entry.path).read_text(errors="replace").strip()
        except FileNotFoundError:
            pass
        return found

    def verify(self, step: int, *, threads: int = reads.THREADS) -> Report:
        """Read every byte of a checkpoint and compare it with the manifest; headers too."""
        report = Report(step=step)
        try:
            opened = self.open(step)
        except (CheckpointDamaged, ConfigError) as failure:
            report.faults.append(failure.what)
            return report
        with opened:
            for name in sorted(opened.manifest.files):
                try:
                    with opened.naming_tensors():
                        stored = opened.stored(name)
                        statistics = reads.verify([stored], threads=threads, files=self._files)
                    report.bytes_read += statistics.bytes_read
                    if name.endswith(names.SUFFIX):
                        check_header(opened, name)
                except ArgosyError as failure:
                    report.faults.append(failure.what)
        return report

    def newest_verified(self) -> int | None:
        """The newest step whose every byte is right; None when there is none."""
        return next((step for step in self.candidates() if self.verify(step).is_good), None)


def check_header(opened: Opened, name: str) -> None:
    """The header of a data file says of each tensor what the manifest says."""
    stored = opened.stored(name)
    what = f"{name} of {opened.path.name}"
    beginning = reads.read_bytes(stored, 0, min(8, stored.size), files=opened.files)
    length = headers.header_bytes(beginning, stored.size, what)
    header = reads.read_bytes(stored, 0, length, files=opened.files)
    places, _ = headers.decode(header, stored.size, what)
    in_file = {(one.name, one.dtype, one.shape, one.start) for one in places}
    in_manifest = {
        (key, record.dtype, record.box_of(part).sizes, part.offset)
        for key, record in opened.manifest.tensors.items()
        for part in record.parts
        if part.file == name
    }
    odd = sorted(in_file ^ in_manifest)
    if odd:
        raise CheckpointDamaged(
            f"{what}: header and manifest disagree about {odd[0][0]}", fix="use another checkpoint"
        )


def _listed(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-5:]))
    return f"{shown} and {len(steps) - 5} older ones" if len(steps) > 5 else shown
