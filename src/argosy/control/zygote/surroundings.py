"""What the zygote's own start fixed and a rank has to undo: search path, coerced locale, thread counts, memory of exec.

Found once, before the first preload; applied in every rank. Reads the process, starts nothing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from argosy.control.zygote.kernel import ExecMemory


@dataclass(frozen=True)
class Surroundings:
    """The zygote as it was before its first preload."""

    memory: ExecMemory
    library_path: tuple[str, ...]
    """`sys.path` without the first entry and without those of PYTHONPATH."""
    coerced_locale: str
    """LC_CTYPE that the interpreter added to its environment at start (PEP 538); empty if it did not."""
    affinity: frozenset[int]

    @classmethod
    def find(cls) -> Surroundings:
        """Look at this process."""
        memory = ExecMemory.find()
        first = 0 if sys.flags.safe_path else 1
        given = set(expand_python_path(os.environ.get("PYTHONPATH", "")))
        library = tuple(entry for entry in sys.path[first:] if entry not in given)
        coerced = ""
        if memory.names and "LC_CTYPE" not in memory.names:
            coerced = os.environ.get("LC_CTYPE", "")
        return cls(memory, library, coerced, frozenset(os.sched_getaffinity(0)))

    def search_path(self, first: str | None, python_path: str) -> list[str]:
        """`sys.path` as a fresh interpreter in this directory with this PYTHONPATH would have it."""
        path = [] if first is None else [first]
        if sys.flags.ignore_environment:
            return path + list(self.library_path)
        given = expand_python_path(python_path)
        return path + given + [entry for entry in self.library_path if entry not in given]


def expand_python_path(value: str) -> list[str]:
    """Entries of PYTHONPATH, absolute and without doubles, as `site` makes them."""
    if not value:
        return []
    here = os.getcwd()
    entries = [
        # Joined by hand: in the root directory the interpreter, too, makes two slashes of it.
        os.path.abspath(entry if os.path.isabs(entry) else f"{here}/{entry}")
        for entry in value.split(os.pathsep)
    ]
    return list(dict.fromkeys(entries))
