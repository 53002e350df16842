"""Run a script or a module as `python script.py` and `python -m module` do, in a fresh `__main__`.

Called by the rank once everything around the program is in place. Returns how the program ended, after printing what the
interpreter would print; bootstrap frames are not part of its tracebacks.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from argosy.control.zygote import errorfile
from argosy.control.zygote.shutdown import Outcome
from argosy.control.zygote.surroundings import Surroundings


def run(program: dict[str, Any], surroundings: Surroundings, error_file: str) -> Outcome:
    """Run the program in this process; never raises."""
    arguments = [str(argument) for argument in program.get("args") or []]
    is_module = program["kind"] == "module"
    name = str(program["name"] if is_module else program["path"])
    sys.argv = ["-m" if is_module else name, *arguments]
    sys.orig_argv = [sys.executable, *(["-m"] if is_module else []), name, *arguments]
    surroundings.memory.write_command_line(sys.orig_argv)
    first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(name))
    python_path = os.environ.get("PYTHONPATH", "")
    sys.path[:] = surroundings.search_path(None if sys.flags.safe_path else first, python_path)
    main = _fresh_main()
    if is_module:
        return _guard(lambda: _run_module(name), error_file)
    if os.path.isdir(name) or (not name.endswith(".py") and pkgutil.get_importer(name)):
        sys.path[:] = surroundings.search_path(os.path.join(os.getcwd(), name), python_path)
        return _guard(_run_archive, error_file)
    path = os.path.join(os.getcwd(), name)
    return _run_script(path, main, error_file)


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    main.__loader__ = importlib.machinery.BuiltinImporter
    sys.modules["__main__"] = main
    return main


def _run_module(name: str) -> None:
    # The interpreter itself calls this for -m, so its frames belong into the traceback.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_archive() -> None:
    runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]


def _run_script(path: str, main: ModuleType, error_file: str) -> Outcome:
    loader: Any = importlib.machinery.SourceFileLoader("__main__", path)
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    try:
        with open(path, "rb") as file:
            source = file.read()
        if os.path.isdir(path):
            raise IsADirectoryError(21, os.strerror(21))
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        return Outcome(code=2)
    try:
        if path.endswith(".pyc"):
            code: CodeType = loader.get_code("__main__")
        else:
            code = _compiled(source, path)
    except (SyntaxError, ValueError, ImportError, EOFError) as error:
        return _report(error.with_traceback(None), error_file)
    return _guard(lambda: exec(code, main.__dict__), error_file)


def _compiled(source: bytes, path: str) -> CodeType:
    """As the interpreter compiles a script: what `compile` calls a ValueError, as bytes of zero before 3.11.4, is one of syntax there."""
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except ValueError as error:
        raise SyntaxError(str(error), (path, 1, 0, "")) from None


def _guard(call: Callable[[], object], error_file: str) -> Outcome:
    """Call the program; however it ends becomes an outcome."""
    try:
        call()
    except SystemExit as error:
        return _exit_outcome(error)
    except BaseException as error:  # noqa: BLE001 - the entry point of the user's program
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        return _report(error.with_traceback(trace), error_file)
    return Outcome(code=0)


def _exit_outcome(error: SystemExit) -> Outcome:
    code = error.code
    if code is None:
        return Outcome(code=0)
    if isinstance(code, int):
        return Outcome(code=code & 0xFF if -(2**63) <= code < 2**63 else 0xFF)
    if sys.stderr is not None:
        sys.stderr.write(f"{code}\n")
    else:
        os.write(2, f"{code}\n".encode(errors="backslashreplace"))
    return Outcome(code=1)


def _report(error: BaseException, error_file: str) -> Outcome:
    """Print the exception through `sys.excepthook`, and leave it in the error file for the keeper."""
    kind, trace = type(error), error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    if error_file and isinstance(error, Exception):
        errorfile.write(error_file, error)
    try:
        sys.excepthook(kind, error, trace)
    except SystemExit as asked:
        return _exit_outcome(asked)
    except BaseException as second:  # noqa: BLE001 - a hook of the user's that fails must not hide the error
        own = second.__traceback__
        second.__traceback__ = own.tb_next if own is not None else None
        sys.stderr.write("Error in sys.excepthook:\n")
        traceback.print_exception(second)
        sys.stderr.write("\nOriginal exception was:\n")
        traceback.print_exception(error)
    return Outcome(code=1, is_interrupt=isinstance(error, KeyboardInterrupt))
