"""Arguments: reads a command line by the table in verbs.py.

Called by app.py for every verb. Hand-written because importing argparse costs more than the rest of a warm `argosy run`; an
unknown option is refused with the nearest one, and nothing is guessed. It never touches files.
"""

from __future__ import annotations

from argosy.cli.grammar import Option, Verb
from argosy.errors import ConfigError

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

_HABITS = {
    "--nproc-per-node": ("-n",),
    "--nproc": ("-n",),
    "-np": ("-n",),
    "--ranks": ("-n",),
    "--rank": ("-n",),
    "--num-ranks": ("-n",),
    "--world-size": ("-n",),
    "--max-restarts": ("--restart",),
    "--module": ("-m",),
    "-d": ("--detach",),
    "--background": ("--detach",),
    "-it": ("--tty",),
    "-a": ("--all",),
    "-e": ("--env",),
    "-n": ("--tail",),
    "--lines": ("--tail",),
    "--follow": ("-f",),
    "-t": ("--timestamps", "--tty"),
    "-s": ("--signal",),
    "--mem": ("--memory",),
}
_MOST_DIGITS = 18
_MOST_BYTES = 1 << 63
_MAY_BE_EMPTY = ("--preload", "--reason", "--why")
_BYTE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Arguments:
    """What was typed: options by name, words in order, and what came after `--` (None without one)."""

    __slots__ = ("options", "rest", "verb", "wants_help", "words")

    def __init__(self, verb: Verb) -> None:
        self.verb = verb
        self.options: dict[str, Any] = {}
        self.words: list[str] = []
        self.rest: list[str] | None = None
        self.wants_help = False

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option, or the default."""
        return self.options.get(name, default)

    def word(self) -> str:
        """The only word, or nothing."""
        return self.words[0] if self.words else ""


def parse(verb: Verb, argv: list[str]) -> Arguments:
    """Read the words after the verb; ConfigError names what is wrong and the nearest known option."""
    arguments = Arguments(verb)
    by_flag = {option.flag: option for option in verb.options}
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word == "--":
            arguments.rest = argv[position:]
            break
        if word in ("-h", "--help"):
            arguments.wants_help = True
        elif word.startswith("-") and word != "-":
            if arguments.words and not _is_known(by_flag, word) and _takes_program(verb):
                raise _own_argument(arguments, by_flag, argv, position - 1)
            option, value = _find_option(arguments, by_flag, word)
            if option.kind == "switch":
                if value is not None:
                    raise ConfigError(f"{option.flag} takes no value", fix=_see_help(verb))
                arguments.options[option.name] = True
                continue
            if value is None:
                if position >= len(argv) or argv[position] == "--":
                    raise ConfigError(f"{option.flag} needs {option.metavar}", fix=_see_help(verb))
                value = argv[position]
                if value.startswith("--") or (
                    value.startswith("-") and (_is_known(by_flag, value) or value == "-h")
                ):
                    raise ConfigError(
                        f"{option.flag} needs {option.metavar}, and {value} is an option",
                        fix=f"if it is meant: {option.flag}={value}",
                    )
                position += 1
                if option.kind == "pair" and position < len(argv):
                    value = f"{value} {argv[position]}"
                    position += 1
            _store(arguments, option, value)
        else:
            arguments.words.append(word)
    if not arguments.wants_help:
        _check_words(arguments)
    return arguments


def _find_option(
    arguments: Arguments, by_flag: dict[str, Option], word: str
) -> tuple[Option, str | None]:
    flag, equals, value = word.partition("=")
    if flag in by_flag:
        return by_flag[flag], value if equals else None
    # `-n4`: a short option with its value attached.
    short = word[:2]
    if not word.startswith("--") and len(word) > 2 and short in by_flag and by_flag[short].metavar:
        return by_flag[short], word[2:].removeprefix("=")
    from argosy.config.nearest import nearest

    match = _habit(flag, by_flag) or nearest(flag, by_flag)
    raise ConfigError(
        f"`argosy {arguments.verb.name}` has no option {flag}",
        fix=f"did you mean `{match}`?" if match else _see_help(arguments.verb),
    )


def _habit(flag: str, by_flag: dict[str, Option]) -> str:
    """What other tools' options for the same thing are called here."""
    meant = _HABITS.get(flag.replace("_", "-"), ())
    return next((known for known in meant if known in by_flag), "")


def _is_known(by_flag: dict[str, Option], word: str) -> bool:
    flag, short = word.partition("=")[0], word[:2]
    return flag in by_flag or (not word.startswith("--") and short in by_flag)


def _own_argument(
    arguments: Arguments, by_flag: dict[str, Option], argv: list[str], position: int
) -> ConfigError:
    """An argument of the program stands before `--`: the error says the whole line as it should be."""
    import shlex

    from argosy.config.nearest import nearest

    flag = argv[position].partition("=")[0]
    ours = argv[:position]
    theirs: list[str] = []
    rest = iter(argv[position:])
    for word in rest:
        if word == "--":
            theirs += rest
        elif word.startswith("-") and _is_known(by_flag, word):
            ours.append(word)
            option = by_flag.get(word)
            if option and option.kind != "switch":
                ours += [value for value in (next(rest, None),) if value is not None]
        else:
            theirs.append(word)
    line = shlex.join(["argosy", *arguments.verb.name.split(), *ours, "--", *theirs])
    match = _habit(flag, by_flag) or nearest(flag, by_flag)
    hint = f" (or did you mean `{match}`?)" if match else ""
    return ConfigError(
        f"unknown option {flag} after {arguments.words[0]}",
        fix=f"the program's own arguments come after `--`: {line}{hint}",
    )


def _store(arguments: Arguments, option: Option, text: str) -> None:
    value = _convert(option, text)
    if option.is_many:
        arguments.options.setdefault(option.name, []).append(value)
    else:
        arguments.options[option.name] = value


def _convert(option: Option, text: str) -> Any:
    if option.kind == "text":
        if not text and option.flag not in _MAY_BE_EMPTY:
            # An unset variable of a shell: what stands for nothing elsewhere was not meant here.
            raise ConfigError(
                f"{option.flag} is empty", fix=f"give {option.metavar}, or leave it out"
            )
        return text
    try:
        if option.kind == "bytes":
            return parse_bytes(text)
        if option.kind == "pair":
            first, last = (int(part) for part in text.replace(",", " ").split())
            if not 0 <= first <= last < 1 << 31:
                raise ValueError
            return (first, last)
        if option.kind == "amount":
            amount = float(text)
            if not 0 < amount < 1e6:
                raise ValueError
            return amount
        value = int(text)
    except ValueError:
        raise ConfigError(
            f"{option.flag} {text!r} is not {_KINDS[option.kind]}",
            fix=f"example: {_example(option)}",
        )
    if value < {"count": 1, "number": 0}.get(option.kind, -(1 << 31)) or value > 1 << 31:
        raise ConfigError(
            f"{option.flag} {value} is not {_KINDS[option.kind]}",
            fix=f"example: {_example(option)}",
        )
    return value


_KINDS = {
    "count": "a whole number of at least 1",
    "number": "a whole number of at least 0",
    "integer": "a whole number",
    "amount": "a number above 0",
    "pair": "two whole numbers, the smaller one first",
    "bytes": "a size such as 512M or 4G",
}


_EXAMPLES = {"bytes": "4G", "pair": "10 60"}


def _example(option: Option) -> str:
    return f"{option.flag} {_EXAMPLES.get(option.kind, '2')}"


def parse_bytes(text: str) -> int:
    """`4G` as bytes; ValueError when it is no size above 0."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    value = float(number.removesuffix(unit)) * _BYTE_UNITS[unit]
    if not 1 <= value < _MOST_BYTES:
        raise ValueError(text)
    return int(value)


def is_whole_number(text: str) -> bool:
    """Whether `int` reads it: not every digit of Unicode is one, and thousands of them are none."""
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def _check_words(arguments: Arguments) -> None:
    verb, words = arguments.verb, arguments.words
    if "" in words:
        raise ConfigError(
            f"a word of `argosy {verb.name}` is empty", fix=f"usage: argosy {verb.usage}"
        )
    if _takes_program(verb):
        if len(words) > 1:
            raise ConfigError(
                f"{words[1]!r} after {words[0]} is not an option",
                fix=f"the program's own arguments come after `--`: argosy {verb.name} {words[0]} -- {' '.join(words[1:])}",
            )
        return
    fewest, most = verb.words
    if len(words) < fewest:
        raise ConfigError(
            f"`argosy {verb.name}` needs more words", fix=f"usage: argosy {verb.usage}"
        )
    if len(words) > most:
        raise ConfigError(
            f"`argosy {verb.name}` does not take {words[most]!r}", fix=f"usage: argosy {verb.usage}"
        )
    if arguments.rest is not None and " -- " not in verb.usage:
        raise ConfigError(f"`argosy {verb.name}` takes nothing after `--`", fix=_see_help(verb))


def _takes_program(verb: Verb) -> bool:
    return "ARGUMENTS" in verb.usage


def _see_help(verb: Verb) -> str:
    return f"see `argosy {verb.name} --help`"
