"""A rank of a household from its fork to its end.

`fork()` is called by the household; in the child `live()` runs the program, leaves its error where the parent reads it, and ends the
process as the interpreter would, without taking loaded modules apart. A parent that has threads cannot fork a program safely:
its ranks are started by exec of the same command line, and `launch` calls `live()` in them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from argosy.errors import REFUSALS

PARENT = "ARGOSY_HOUSEHOLD"
"""Pid of the parent, in the environment of a household's ranks."""
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_STACKS_SIGNAL = signal.SIGRTMIN + 8
_RESET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
_MOST_CHARACTERS = 64 << 10
_OOM_SCORE = 500
_OWN_FILES = frozenset(
    os.path.join(os.path.dirname(__file__), name)
    for name in ("births.py", "household.py", "launch.py")
)

_libc = ctypes.CDLL(None, use_errno=True)

Body = Callable[[], object]


def find_obstacle() -> str:
    """Why a fork of this process could not run the program; empty: it can."""
    if _count_threads() > 1:
        # OpenBLAS puts its threads away when a process forks, and starts them again when they are needed.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    threads = _count_threads()
    if threads > 1:
        return f"this process has {threads} threads"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "this process has initialised CUDA"
    return ""


def command_line() -> list[str] | None:
    """The command line that starts this program again; None where there is none, as in a notebook."""
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) is None or not sys.executable:
        return None
    return [sys.executable, *sys.orig_argv[1:]]


def fork(environment: Mapping[str, str], body: Body | list[str], close_copies: Body) -> int:
    """Fork a rank and return its pid; in the child this never returns."""
    parent = os.getpid()
    _flush()
    # Until the child has handlers of its own a signal to it would be taken by its copy of the parent's, for nothing.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET_SIGNALS)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return pid
    code = 1
    try:
        _separate(parent)
        close_copies()
        os.environ.update(environment)
        if isinstance(body, list):
            os.execv(body[0], body)
        live(body)
    except BaseException:  # noqa: BLE001 - the child must never run on into the parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def live(body: Body) -> NoReturn:
    """Run the program in this rank, then end the process."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
    faulthandler.register(_STACKS_SIGNAL, file=2, all_threads=True, chain=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Several ranks share the terminal: whole lines.
            stream.reconfigure(line_buffering=True, write_through=False)
    code = _run(body)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(code)


def _run(body: Body) -> int:
    try:
        body()
    except SystemExit as error:
        return _code_of(error)
    except REFUSALS as error:
        _leave_error(error, f"argosy: {error}", is_refusal=True)
        return error.exit_code
    except BaseException as error:  # noqa: BLE001 - the entry point of the user's program
        own = error.with_traceback(_trim(error))
        # As the interpreter does it: what runs at the exit may want to know.
        sys.last_type, sys.last_value, sys.last_traceback = type(own), own, own.__traceback__
        _leave_error(own, "".join(traceback.format_exception(own)))
        return 1
    return 0


def _trim(error: BaseException) -> Any:
    """The traceback without the frames that lead to the user's program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return trace if trace is not None else error.__traceback__


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _leave_error(error: BaseException, text: str, *, is_refusal: bool = False) -> None:
    """Write the error where the parent reads it, in the form that torchelastic uses."""
    said = text if is_refusal else "".join(traceback.format_exception_only(error)).strip()
    extra = {
        "py_callstack": text[-_MOST_CHARACTERS:],
        "timestamp": str(int(time.time())),
        "refusal": is_refusal,
    }
    record = {"message": {"message": said[:_MOST_CHARACTERS], "extraInfo": extra}}
    try:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
            json.dump(record, file)
    except OSError:
        sys.stderr.write(text)


def read_error(descriptor: int) -> tuple[str, bool]:
    """What a rank left: its traceback or message, and whether it refused its input."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, min(size, 1 << 20), 0)
    try:
        message = json.loads(data)["message"]
        if isinstance(message, str):
            return message, False
        extra = message.get("extraInfo") or {}
        text = str(extra.get("py_callstack") or message.get("message", ""))
        return text, bool(extra.get("refusal"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return data.decode("utf-8", "replace"), False


def _separate(parent: int) -> None:
    """Die with the parent; a process group of its own, so that Ctrl-C reaches the parent alone and what a rank leaves is found."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)
    # Reading the terminal from a group in the background would stop the rank for ever.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # When memory runs out a rank can be replaced, its parent cannot.
        file.write(str(_OOM_SCORE))
    signal.set_wakeup_fd(-1)
    for number in _RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))
