"""Writes all that a program can see of its process as JSON to the file named by its first argument."""

import atexit
import io
import json
import locale
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


def module_attributes():
    main = sys.modules["__main__"]
    shown = {}
    for name in ("__name__", "__doc__", "__package__", "__spec__", "__file__", "__cached__"):
        value = getattr(main, name, "absent")
        shown[name] = value if isinstance(value, str | None) else type(value).__name__
    shown["__loader__"] = type(main.__loader__).__name__
    shown["loader_path"] = getattr(main.__loader__, "path", None)
    shown["__builtins__"] = type(main.__builtins__).__name__
    shown["__annotations__"] = repr(getattr(main, "__annotations__", None))
    shown["is_own_globals"] = vars(main) is globals()
    shown["names"] = sorted(vars(main))
    return shown


def streams():
    shown = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        shown[name] = [
            stream.name,
            stream.mode,
            stream.encoding,
            stream.errors,
            stream.fileno(),
            stream.isatty(),
            type(stream).__name__,
            isinstance(stream.buffer, io.RawIOBase),
            isinstance(stream.buffer, io.BufferedIOBase),
            stream.write_through,
            stream is getattr(sys, f"__{name}__"),
            stream.closed,
        ]
        if name != "stdout":
            shown[name].append(stream.line_buffering)
    return shown


def descriptors():
    shown = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own
        shown[name] = [target.split(":")[0], os.get_inheritable(int(name))]
    return shown


def signals():
    handlers = {}
    for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        handlers[int(number)] = getattr(handler, "__name__", repr(handler))
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t") for line in file if ":\t" in line)
    return {
        "handlers": handlers,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "SigIgn": status["SigIgn"],
        "SigBlk": status["SigBlk"],
        "SigCgt": status["SigCgt"],
    }


def limits():
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def children():
    """What children see: a subprocess, and multiprocessing by fork and by spawn."""
    import multiprocessing

    shown = {
        "subprocess": subprocess.run(
            [sys.executable, "-c", "import os; print(sorted(os.environ), os.getcwd())"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout,
        "shell": subprocess.run(
            "ulimit -n; umask", shell=True, capture_output=True, text=True
        ).stdout,
    }
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            shown[method] = pool.apply(child_view, (7,))
    return shown


def child_view(number):
    return [number * 6, __name__ in ("__main__", "__mp_main__"), sys.argv[1:], os.getcwd()]


def probe():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "path": sys.path,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": os.umask(os.umask(0o077)),
        "limits": limits(),
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "scheduler": os.sched_getscheduler(0),
        "descriptors": descriptors(),
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "thread_name": threading.current_thread().name,
        "is_main_thread": threading.current_thread() is threading.main_thread(),
        "signals": signals(),
        "encodings": [
            sys.getdefaultencoding(),
            sys.getfilesystemencoding(),
            sys.getfilesystemencodeerrors(),
            locale.getpreferredencoding(False),
            locale.setlocale(locale.LC_CTYPE),
        ],
        "streams": streams(),
        "main": module_attributes(),
        "flags": repr(sys.flags),
        "warnings": sys.warnoptions,
        "recursion": sys.getrecursionlimit(),
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.gettrace() is None,
            sys.getprofile() is None,
            sys.flags.interactive,
        ],
        "tempdir": tempfile.gettempdir(),
        "timezone": time.tzname,
        "leader": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "comm": Path("/proc/self/comm").read_text(),
        "zygote_modules": [name for name in sys.modules if name.startswith("argosy.control")],
        "children": children(),
    }


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        json.dump(probe(), file, indent=1)
    atexit.register(print, "registered first")
    atexit.register(print, "registered second")
    print("last line of the program")
