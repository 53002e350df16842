"""The `argosy` command: finds the verb, imports its module, turns errors into two lines and an exit code.

Entry point of the console script and of `python -m argosy`. It imports nothing heavy: each verb pays only for itself.
Exit codes are documented in docs/reference/exit-codes.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from argosy.cli.arguments import parse
from argosy.cli.grammar import Verb
from argosy.cli.verbs import VERBS
from argosy.errors import ArgosyError, ConfigError

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; the result is the process's exit code."""
    words = sys.argv[1:] if argv is None else argv
    if argv is None:
        _interrupt_once()
    try:
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # `argosy logs | head` is no error; the interpreter must not complain about stdout when it ends.
        _silence_stdout()
        return 141
    except KeyboardInterrupt:
        return INTERRUPTED
    except ArgosyError as error:
        return report_error(error, words)
    # The process's entry point: a bug of ours must still end in a clear message.
    except Exception as error:  # noqa: BLE001
        return report_error(_bug(error), words)


def _interrupt_once() -> None:
    """The first Ctrl-C is an exception that ends the verb in order; a second one, in the midst of that, ends the process in silence."""
    import signal

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    # Whoever started this in the background of a shell without job control has turned Ctrl-C off: it stays off.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def dispatch(words: list[str]) -> int:
    """Find the verb and carry it out."""
    _check_text(words)
    if not words or words[0] in ("-h", "--help"):
        words = ["help"]
    elif words[0] in ("-V", "--version"):
        words = ["version"]
    if words[1:] in (["-h"], ["--help"]):
        words = ["help", words[0]]
    verb, rest = find_verb(words)
    arguments = parse(verb, rest)
    if arguments.wants_help:
        from argosy.cli.help import show, verb_help

        show(verb_help(verb))
        return 0
    return int(_load(verb.entry)(arguments) or 0)


def _check_text(words: list[str]) -> None:
    """What is not UTF-8 cannot be sent to the cluster, nor be shown."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode("utf-8", "backslashreplace").decode()
            raise ConfigError(
                f"the word '{shown}' is not UTF-8 text",
                fix="rename what it names, or let the program read it from a file",
            )


def find_verb(words: list[str]) -> tuple[Verb, list[str]]:
    """The verb that the words begin with, two words (`queue add`) before one, and the words after it."""
    by_name = {verb.name: verb for verb in VERBS}
    pair = " ".join(words[:2])
    if pair in by_name and len(words) > 1:
        return by_name[pair], words[2:]
    has_second = len(words) > 1 and not words[1].startswith("-")
    is_first_of_two = has_second and any(name.startswith(f"{words[0]} ") for name in by_name)
    if words[0] in by_name and not is_first_of_two:
        return by_name[words[0]], words[1:]
    from argosy.cli.unknown import unknown_verb

    raise unknown_verb(words)


def _load(entry: str) -> Callable[[Any], int | None]:
    import importlib

    module, _, function = entry.partition(":")
    loaded: Callable[[Any], int | None] = getattr(importlib.import_module(module), function)
    return loaded


def report_error(error: ArgosyError, words: list[str]) -> int:
    """Two lines for a person on stderr; with --json also an object on stdout, where a program looks. Its exit code."""
    sys.stderr.write(render_error(error, is_terminal=sys.stderr.isatty()))
    if wants_json(words):
        import json

        told = {"code": error.exit_code, "message": error.what, "fix": error.fix}
        try:
            print(json.dumps({"error": told}), flush=True)
        except BrokenPipeError:
            _silence_stdout()
    return error.exit_code


def wants_json(words: list[str]) -> bool:
    """Whether --json stands among our own words, not among the arguments of a program."""
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def render_error(error: ArgosyError, *, is_terminal: bool) -> str:
    """Two lines for a person."""
    red, bold, plain = ("\033[31m", "\033[1m", "\033[0m") if is_terminal else ("", "", "")
    text = f"{red}argosy: {plain}{bold}{error.what}{plain}\n"
    return text + (f"  fix: {error.fix}\n" if error.fix else "")


def _silence_stdout() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _bug(error: Exception) -> ArgosyError:
    """A bug of ours as an error for people; its traceback is kept."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="argosy-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    return ArgosyError(
        f"a bug of ours: {type(error).__name__}: {error}",
        fix=f"report it with the traceback in {file.name}",
    )


if __name__ == "__main__":
    sys.exit(main())
