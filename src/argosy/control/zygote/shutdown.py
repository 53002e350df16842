"""The end of a forked rank: what a normal interpreter exit does, without taking the preloaded modules apart.

Threads are joined, atexit functions run, the program's own objects are dropped and every open file is flushed; then the process
leaves at once. Tearing down a process that has torch loaded would cost 0.3 s and more. C `atexit` functions and static
destructors of extension modules do not run; C stdio is flushed.
"""

from __future__ import annotations

import _io
import atexit
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from argosy.control.zygote import kernel


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    code: int
    is_interrupt: bool = False
    """KeyboardInterrupt left the program: the process ends by SIGINT, as the interpreter does it."""


def finish(outcome: Outcome) -> NoReturn:
    """End this process."""
    code = outcome.code
    sys.unraisablehook = _without_bootstrap(sys.unraisablehook)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:  # noqa: BLE001 - the interpreter reports it and goes on, too
        _report_unraisable(error, threading)
    atexit._run_exitfuncs()
    is_written = _flush_standard_streams()
    if not is_written:
        code = 120
    if len(sys._current_frames()) == 1:
        _drop_main()
    _flush_open_files()
    if is_written:
        _flush_standard_streams()
    kernel.flush_c_streams()
    if outcome.is_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _without_bootstrap(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """The program's hook for errors that cannot be raised, shown tracebacks without frames of this module."""

    def call(arguments: Any) -> object:
        trace = arguments.exc_traceback
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        fields = (arguments.exc_type, arguments.exc_value, trace, arguments.err_msg)
        return hook(type(arguments)((*fields, arguments.object)))

    return call


def _report_unraisable(error: BaseException, source: object) -> None:
    """Say it in the interpreter's words; the argument that its hook takes cannot be made from here."""
    if sys.stderr is None:
        return
    last = "".join(traceback.format_exception_only(error))
    try:
        sys.stderr.write(f"Exception ignored in: {source!r}\n{last}")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def _flush_standard_streams() -> bool:
    """Flush stdout and stderr; False when stdout could not be written."""
    is_written = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None or getattr(stream, "closed", False):
            continue
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            if stream is sys.stdout:
                _report_unraisable(error, stream)
                is_written = False
    return is_written


def _drop_main() -> None:
    """Drop the program's globals, so that `__del__` of its objects runs; names with an underscore first, as the interpreter does."""
    main = sys.modules.get("__main__")
    if main is None:
        return
    for is_private in (True, False):
        for name in [name for name in vars(main) if name.startswith("_") == is_private]:
            if name != "__builtins__":
                vars(main)[name] = None
    gc.collect()


def _flush_open_files() -> None:
    """Flush what is still open: compressing writers first, then text, then bytes below them."""
    # Objects from before the fork are frozen and not listed; they belong to the zygote.
    open_files = [item for item in gc.get_objects() if isinstance(item, _io._IOBase)]
    order = (_is_layered, _is_text, _is_buffered)
    for belongs in order:
        for item in open_files:
            if belongs(item):
                try:
                    _settle(item)
                except (OSError, ValueError, AttributeError):
                    continue


def _is_text(item: Any) -> bool:
    return isinstance(item, io.TextIOBase)


def _is_buffered(item: Any) -> bool:
    return type(item).__module__ in ("_io", "io") and isinstance(item, io.BufferedIOBase)


def _is_layered(item: Any) -> bool:
    return isinstance(item, io.BufferedIOBase) and not _is_buffered(item)


def _settle(item: Any) -> None:
    if item.closed:
        return
    if _is_layered(item):
        item.close()  # gzip and its like write their trailer only now
    else:
        item.flush()
