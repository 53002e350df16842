"""What the command line has done with torch, in a process of its own: comparison, export and import of checkpoints.

`python -m argosy.checkpoint.tasks`: one request as JSON on stdin; lines of JSON on stdout: progress, then a result or an error. Started by
`argosy checkpoint`, which never imports torch itself.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from argosy.checkpoint import diffs, exports, imports, manifests
from argosy.checkpoint.commits import Store
from argosy.checkpoint.opened import Opened
from argosy.errors import ArgosyError

_SAY_SECONDS = 0.1


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do."""

    task: str
    paths: list[str]
    form: str | None = None
    key: str = "model"
    dtype: str | None = None
    step: int = 0


class _Progress:
    def __init__(self) -> None:
        self._at = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._at >= _SAY_SECONDS or done == total:
            self._at = now
            _say({"progress": [done, total]})


def main() -> int:
    """Carry one request out."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    try:
        _say({"result": _TASKS[request.task](request)})
    except ArgosyError as failure:
        _say({"error": {"what": failure.what, "fix": failure.fix, "code": failure.exit_code}})
        return failure.exit_code
    return 0


def _diff(request: Request) -> Any:
    with Opened(request.paths[0]) as first, Opened(request.paths[1]) as second:
        found = diffs.diff(first, second, progress=_Progress())
        told = msgspec.to_builtins(found)
        return {"first": first.step, "second": second.step, **told, "is_equal": found.is_equal}


def _export(request: Request) -> Any:
    with Opened(request.paths[0]) as opened:
        out = Path(request.paths[1])
        form: Any = request.form or "hf"
        size = exports.export(
            opened, out, form, key=request.key, dtype=request.dtype, progress=_Progress()
        )
        return {"step": opened.step, "out": str(out), "form": form, "bytes": size}


def _import(request: Request) -> Any:
    source, store = Path(request.paths[0]), Store(Path(request.paths[1]))
    form: Any = request.form or imports.form_of(source)
    try:
        store.lock("import")
        data = imports.take_in(store, source, request.step, form, progress=_Progress())
    finally:
        store.close()
    manifest = manifests.decode(data)
    size = sum(record.size for record in manifest.files.values())
    return {
        "step": request.step,
        "store": request.paths[1],
        "form": form,
        "tensors": len(manifest.tensors),
        "bytes": size,
    }


_TASKS = {"diff": _diff, "export": _export, "import": _import}


def _say(what: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
