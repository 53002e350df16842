"""Importing the preloads, and saying whether a process that did so may still fork.

A process with more than one thread, or with CUDA initialised, must not fork warm ranks: a child's first operation would hang.
The parent asks before every fork; this module names the preload that is at fault. It never imports anything by itself.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from typing import Any

from argosy.control.zygote import kernel

SECOND_LAYER = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "numpy.ma?",
    "torch.profiler._cupti_monitor?",
)
"""What a training script's first optimizer, first step or `torch.compile` would import, 1 to 3 seconds per rank."""


class PreloadError(Exception):
    """A preload could not be imported: its traceback for the log, its last line for people."""

    def __init__(self, module: str, error: BaseException) -> None:
        super().__init__(f"{module}: {''.join(traceback.format_exception(error, limit=-5))}")
        self.module = module
        self.error = traceback.format_exception_only(error)[-1].strip()


class Preloads:
    """The modules imported so far, with the number of threads that each import left behind."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self._began_ns = time.time_ns()
        self._started_threads: dict[str, int] = {}
        # OpenBLAS starts a thread pool when numpy is imported, unless it is told this before.
        os.environ["OPENBLAS_NUM_THREADS"] = "1"

    def load(self, modules: list[str]) -> float:
        """Import the modules in order, those with a `?` at their end if they can be; returns the seconds it took."""
        started = time.monotonic()
        for name in modules:
            before = kernel.count_tasks()
            module = name.removesuffix("?")
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - any preload, any way to fail
                if name == module:
                    raise PreloadError(module, error)
                continue  # a program that needs it will say what is wrong
            self.modules.append(module)
            more = kernel.count_tasks() - before
            if more > 0:
                self._started_threads[module] = more
        gc.collect()
        return time.monotonic() - started

    def sources(self) -> dict[str, int]:
        """Files of what was imported from elsewhere than beside the interpreter (a checkout, say), with their times.

        One that was changed while it was imported has no time: nobody knows which of both was read.
        """
        library = os.path.dirname(os.__file__) + os.sep
        found: dict[str, int] = {}
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if not path or not os.path.isabs(path) or path.startswith(library):
                continue
            if f"-packages{os.sep}" in path:
                continue  # what is installed changes its directory
            try:
                at = os.stat(path).st_mtime_ns
            except OSError:
                continue
            found[path] = at if at < self._began_ns else 0
        return found

    def find_obstacle(self) -> str:
        """Why this process must not fork now, with the preload at fault; empty when it may."""
        tasks = kernel.count_tasks()
        if tasks != 1:
            guilty = ", ".join(
                f"{name} (+{count})" for name, count in self._started_threads.items()
            )
            return (
                f"the warm parent has {tasks} threads, started by: {guilty or 'no import; later'}"
            )
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return f"a preload has initialised CUDA: one of {', '.join(self.modules)}"
        return ""

    def find_shadow(self, directory: str) -> str:
        """Name of a file beside the script that a fresh interpreter would import instead of a module loaded here."""
        try:
            names = [entry.name for entry in os.scandir(directory)]
        except OSError:
            return ""
        for name in names:
            stem = name.removesuffix(".py")
            module = sys.modules.get(stem)
            if module is None or _is_startup_module(module):
                continue
            if stem == name and not os.path.exists(os.path.join(directory, name, "__init__.py")):
                continue
            origin = getattr(module, "__file__", None)
            if origin and not os.path.realpath(origin).startswith(directory + os.sep):
                return name
        return ""


def _is_startup_module(module: Any) -> bool:
    """Whether every interpreter has this module loaded before it looks into the script's directory."""
    if module.__name__ in ("__main__", "encodings", "sitecustomize", "usercustomize"):
        return True
    return getattr(getattr(module, "__spec__", None), "origin", None) in ("frozen", "built-in")
