"""What the keeper leaves on disk for whoever comes after it: keeper.json, attempts/, exits/.

Written by rename, so a reader never sees half a record. A full or broken disk is an answer (False), never an exception:
the keeper goes on and says so. Read by sweeps and by the next keeper.
"""

from __future__ import annotations

import json
import os
from typing import Any

from argosy.control.keeper.census import safe_name

_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Records:
    """The records in one cluster directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.attempts = f"{directory}/attempts"
        self.exits = f"{directory}/exits"
        self.keeper = f"{directory}/keeper.json"
        self.last_error = ""

    def make_directories(self) -> None:
        """Make sure the directories are there; raises OSError."""
        for path in (self.directory, self.attempts, self.exits):
            os.makedirs(path, mode=0o700, exist_ok=True)

    def write_keeper(self, content: dict[str, Any]) -> bool:
        """Say who keeps this cluster."""
        return self._write(self.keeper, content)

    def read_keeper(self) -> dict[str, Any]:
        """Who kept it last; empty when nobody did or it ended cleanly."""
        return read_json(self.keeper)

    def remove_keeper(self) -> None:
        """Nobody keeps it any more."""
        _unlink(self.keeper)

    def write_attempt(self, attempt: str, content: dict[str, Any]) -> bool:
        """A process exists that a sweep must find. Not by rename: marks and cgroups cover half a record."""
        path = f"{self.attempts}/{file_name(attempt)}"
        return self._write(path, content, path)

    def remove_attempt(self, attempt: str) -> None:
        """It does not exist any more."""
        _unlink(f"{self.attempts}/{file_name(attempt)}")

    def read_attempts(self) -> list[dict[str, Any]]:
        """All attempts that were alive when the last record was written."""
        return [content for _, content in _read_directory(self.attempts)]

    def remove_attempts(self) -> None:
        """None of them exists any more."""
        for path, _ in _read_directory(self.attempts, all_files=True):
            _unlink(path)

    def write_exit(self, keeper: str, number: int, event: dict[str, Any]) -> bool:
        """An exit that nobody has acknowledged yet; takes the place of the attempt's record."""
        # The same file, renamed: a new inode for each would cost more than the process's fork.
        temporary = f"{self.attempts}/{file_name(event['attempt'])}"
        return self._write(f"{self.exits}/{keeper}-{number}.json", event, temporary)

    def remove_exit(self, keeper: str, number: int) -> None:
        """It is durable elsewhere."""
        _unlink(f"{self.exits}/{keeper}-{number}.json")

    def read_exits(self) -> list[tuple[str, int, dict[str, Any]]]:
        """(keeper, number, event) of every unacknowledged exit, of whichever keeper, in order."""
        found = []
        for path, content in _read_directory(self.exits):
            keeper, _, number = os.path.basename(path).removesuffix(".json").rpartition("-")
            if keeper and number.isdigit() and isinstance(content.get("attempt"), str):
                found.append((keeper, int(number), content))
        return sorted(found, key=lambda entry: (entry[2].get("at", 0.0), entry[0], entry[1]))

    def _write(self, path: str, content: dict[str, Any], temporary: str | None = None) -> bool:
        try:
            write_json(path, content, temporary or f"{path}.new")
        except OSError as error:
            self.last_error = f"{path}: {error.strerror}"
            return False
        return True


def write_json(path: str, content: dict[str, Any], temporary: str) -> None:
    """Write the temporary file (0600), then rename it; equal paths: in place. Raises OSError, leaves no half file."""
    try:
        data = _ENCODER.encode(content).encode()
        # Not emptied first: a file system may take that as a wish to have the new content on the disk at once.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if os.fstat(fd).st_size > len(data):
                os.ftruncate(fd, len(data))
        finally:
            os.close(fd)
        if temporary != path:
            os.rename(temporary, path)
    except OSError:
        _unlink(temporary)
        raise


def read_json(path: str) -> dict[str, Any]:
    """The object in the file; empty when it is missing or broken."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def file_name(attempt: str) -> str:
    """The record's name of an attempt: no path can leave the directory."""
    return f"{safe_name(attempt)}.json"


def _read_directory(path: str, *, all_files: bool = False) -> list[tuple[str, dict[str, Any]]]:
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return []
    found = []
    for name in names:
        if name.endswith(".json"):
            content = read_json(f"{path}/{name}")
            if content or all_files:
                found.append((f"{path}/{name}", content))
        elif all_files:
            found.append((f"{path}/{name}", {}))
    return found


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
