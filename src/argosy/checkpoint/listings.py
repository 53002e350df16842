"""What a store holds, without torch: its steps, its pins, and whether a checkpoint is still what was saved.

Only reads, but for pins. `Catalogue` adds tensors; the command line, retention and the writer process use this as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from argosy.checkpoint import fetches, headers, names
from argosy.checkpoint.directio import FILES, Files, disk_error
from argosy.checkpoint.fetches import Progress
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.places import Place
from argosy.errors import (
    ArgosyError,
    CheckpointDamaged,
    ConfigError,
    HomeError,
    NotFoundError,
    TimedOut,
)


@dataclass(kw_only=True)
class Report:
    """What a verification found."""

    step: int
    faults: list[str] = field(default_factory=list)
    bytes_read: int = 0
    num_unread: int = 0
    """Faults that say nothing about the bytes: a newer format, a missing key, a disk that cannot be read just now."""

    @property
    def is_good(self) -> bool:
        """Nothing is wrong."""
        return not self.faults

    @property
    def is_unreadable(self) -> bool:
        """It may be whole all the same."""
        return 0 < self.num_unread == len(self.faults)

    def add(self, failure: ArgosyError) -> None:
        """One more thing that is wrong."""
        self.faults.append(failure.what)
        self.num_unread += isinstance(failure, (ConfigError, HomeError, TimedOut))


class Listing:
    """A store, seen from outside."""

    def __init__(self, path: Path | str, *, files: Files = FILES) -> None:
        self.path = Path(path)
        self.where = str(path)
        """For people: a path or an address."""
        self.files = files

    def steps(self) -> list[int]:
        """Steps that have a directory, rising; whether they can be used is found by opening them."""
        try:
            listed = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise NotFoundError(
                f"{self.path} is a file, not a directory of checkpoints",
                fix="give the directory that a run saves into",
            )
        except OSError as failure:
            raise disk_error(failure, f"{self.path} cannot be listed")
        return sorted(step for name in listed if (step := names.step_of(name)) is not None)

    def candidates(self) -> Iterator[int]:
        """Steps to try, the newest first."""
        yield from reversed(self.steps())

    def directory_of(self, step: int) -> Path:
        """Where a step lies; NotFoundError names those that are there."""
        self.check_known(step)
        return self.path / names.step_name(step)

    def check_known(self, step: int) -> None:
        """NotFoundError when the step is not there, naming those that are."""
        names.check_step(step)
        known = self.steps()
        if step not in known:
            raise NotFoundError(
                f"{self.where} has no step {step}",
                fix=f"it has {_listed(known)}" if known else "nothing was saved there yet",
            )

    def place_of(self, step: int) -> Place | Path:
        """What a `Folder` is made from."""
        return self.directory_of(step)

    def folder(self, step: int) -> Folder:
        """A checkpoint's manifest and files."""
        found = Folder(self.place_of(step), files=self.files)
        check_step(found, step)
        return found

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

    def pin(self, step: int, why: str = "") -> None:
        """Keep a step for ever; the text says who and why. Durable when it returns."""
        self.directory_of(step)
        pins = self.path / names.PINS
        try:
            pins.mkdir(exist_ok=True)
            beside = pins / f".{names.step_name(step)}.{os.getpid()}"
            with open(beside, "w", encoding="utf-8") as file:
                file.write(why + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.rename(beside, pins / names.step_name(step))
            self._flush(pins)
            self._flush(self.path)
        except OSError as failure:
            raise disk_error(failure, f"step {step} of {self.path} cannot be pinned")
        # Retention may have removed it between the look and the pin.
        self.directory_of(step)

    def unpin(self, step: int) -> None:
        """Let retention decide again."""
        try:
            os.unlink(self.path / names.PINS / names.step_name(step))
        except FileNotFoundError:
            pinned = sorted(self.pins())
            raise NotFoundError(
                f"step {step} of {self.path} is not pinned",
                fix=f"pinned: {_listed(pinned)}" if pinned else "nothing is pinned there",
            )
        except OSError as failure:
            raise disk_error(failure, f"the pin of step {step} cannot be removed")

    def verify(
        self,
        step: int,
        *,
        threads: int = fetches.THREADS,
        progress: Progress | None = None,
        is_brief: bool = False,
    ) -> Report:
        """Read every byte of a checkpoint and compare it with the manifest; headers and values too. `is_brief`: up to the first file with a fault."""
        report = Report(step=step)
        try:
            folder = self.folder(step)
        except (CheckpointDamaged, ConfigError, HomeError, TimedOut) as failure:
            report.add(failure)
            return report
        with folder:
            verify_folder(folder, report, threads=threads, progress=progress, is_brief=is_brief)
        return report

    def is_whole(self, step: int) -> bool | None:
        """Whether every byte of a step is right; None when it cannot be read."""
        report = self.verify(step, is_brief=True)
        return None if report.is_unreadable else report.is_good

    def newest_verified(self) -> int | None:
        """The newest step whose every byte is right; None when there is none."""
        return next((step for step in self.candidates() if self.verify(step).is_good), None)

    def _flush(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.files.flush_directory(descriptor)
        finally:
            os.close(descriptor)


def check_step(folder: Folder, step: int) -> None:
    """The folder holds the step that its name says; closes it otherwise."""
    if folder.step != step:
        folder.close()
        raise CheckpointDamaged(
            f"{folder.path.name} holds step {folder.step}: it was renamed or swapped",
            fix="give it its own name back",
        )


def verify_folder(
    folder: Folder,
    report: Report,
    *,
    threads: int = fetches.THREADS,
    progress: Progress | None = None,
    is_brief: bool = False,
) -> None:
    """Every byte of every file, and what is no tensor makes sense; what is wrong goes into the report."""
    for name in sorted(folder.manifest.files):
        try:
            with folder.naming_tensors():
                stored = folder.stored(name)
                statistics = fetches.verify(
                    [stored], threads=threads, files=folder.files, progress=progress
                )
            report.bytes_read += statistics.bytes_read
            if name.endswith(names.SUFFIX):
                check_header(folder, name)
            if name == folder.manifest.values:
                folder.check_values()
        except ArgosyError as failure:
            report.add(failure)
            if is_brief:
                return


def check_header(folder: Folder, name: str) -> None:
    """The header of a data file says of each tensor what the manifest says."""
    stored = folder.stored(name)
    what = f"{name} of {folder.path.name}"
    beginning = fetches.read_bytes(stored, 0, min(8, stored.size), files=folder.files)
    length = headers.header_bytes(beginning, stored.size, what)
    header = fetches.read_bytes(stored, 0, length, files=folder.files)
    places, _ = headers.decode(header, stored.size, what)
    in_file = {(one.name, one.dtype, one.shape, one.start) for one in places}
    in_manifest = {
        (key, record.dtype, record.box_of(part).sizes, part.offset)
        for key, record in folder.manifest.tensors.items()
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
    older = len(steps) - 5
    return f"{shown} and {older} older" if older > 0 else shown
