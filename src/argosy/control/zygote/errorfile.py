"""The error file of a rank: its uncaught exception as JSON, in the form that torchelastic reads and writes.

Written by the rank before its traceback is printed; the keeper puts it into the exit record. A file that the program has
written by itself is left alone. A disk that is full costs the file, never the program's own output.
"""

from __future__ import annotations

import json
import os
import time
import traceback

_MOST_CHARACTERS = 64 << 10


def write(path: str, error: BaseException) -> None:
    """Write the exception to the error file, unless there is one already."""
    record = {
        "message": {
            "message": f"{type(error).__name__}: {_text(error)}"[:_MOST_CHARACTERS],
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:],
                "timestamp": str(int(time.time())),
            },
        }
    }
    try:
        if os.path.exists(path) and os.path.getsize(path):
            return
        partial = f"{path}.{os.getpid()}"
        with open(partial, "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(record, file)
        os.replace(partial, path)
    except OSError:
        pass


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's __str__ may do anything
        return "<exception str() failed>"
