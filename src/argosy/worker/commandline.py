"""The command line of a program that calls `launch`: ranks, threads, seed, directories and `--set`.

`read_options()` is called by `launch`; inside a run the overrides of `argosy run --set` come first, then those of the program's own
arguments. Everything that is wrong with the words is a ConfigError before anything is started. Touches no file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from argosy.config.nearest import did_you_mean
from argosy.errors import ConfigError
from argosy.worker.settings import describe_fields

SET_VARIABLE = "ARGOSY_SET"
"""JSON list of the overrides that `argosy run --set` was given."""
_MOST_RANKS = 4096

_FLAGS = {
    "-n": "ranks",
    "--ranks": "ranks",
    "--threads": "threads",
    "--seed": "seed",
    "--name": "name",
    "--directory": "directory",
    "--resume": "resume",
    "--set": "set",
}
_CONSENTS = {"--allow-source": "source", "--allow-drift": "drift"}
_HELP = """\
  -n RANKS           ranks to fork; 1 runs in this very process, for a debugger (default: one per core)
  --threads T        threads of each rank, a constant of the run (default: 1)
  --seed S           seed of everything random (default: 0)
  --set KEY=VALUE    change one field of the config (may be repeated)
  --name NAME        name of the run (default: the script's)
  --directory DIR    where the run's files go (default: runs/NAME-TIME)
  --resume DIR       go on with the run of that directory
  --allow-source     resume although the program's source has changed
  --allow-drift      resume although torch, CPU or threads are others: bits may differ
"""


@dataclass
class Options:
    """What was asked for; None where nothing was."""

    ranks: int | None = None
    threads: int | None = None
    seed: int | None = None
    name: str = ""
    directory: str = ""
    resume: str = ""
    overrides: list[str] = field(default_factory=list)
    allowed: set[str] = field(default_factory=set)
    """What may differ on a resume: `source`, `drift`."""
    is_help: bool = False


def read_options(
    arguments: Sequence[str], environment: Mapping[str, str], config_type: type[Any] | None = None
) -> Options:
    """The options in these words, after those that the run's environment carries; `config_type` serves better words for a refusal."""
    options = Options(overrides=_given_by_run(environment))
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            options.is_help = True
            continue
        if word in _CONSENTS:
            options.allowed.add(_CONSENTS[word])
            continue
        flag, equals, value = word.partition("=")
        if flag.startswith("-n") and flag[2:].isdigit():
            flag, equals, value = "-n", "=", flag[2:]
        if flag not in _FLAGS:
            own = _own_key(flag, value if equals else "".join(words[:1]), config_type)
            raise ConfigError(f"unknown argument {word!r}", fix=own or _suggest(flag))
        if not equals:
            if not words:
                raise ConfigError(f"{flag} needs a value", fix="see --help")
            value = words.pop(0)
        _note(options, flag, value)
    return options


def help_text(config_type: type[Any] | None) -> str:
    """What `--help` prints."""
    script = os.path.basename(sys.argv[0] or "program")
    text = f"usage: python {script} [options]\n\noptions:\n{_HELP}"
    if config_type is None:
        return text
    rows = describe_fields(config_type)
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [
        f"  {key:<{widths[0]}}  {kind:<{widths[1]}}  {default}".rstrip()
        for key, kind, default in rows
    ]
    return text + "\nconfig, each a key of --set:\n" + "\n".join(lines) + "\n"


def _note(options: Options, flag: str, value: str) -> None:
    name = _FLAGS[flag]
    if name == "set":
        options.overrides.append(value)
    elif name in ("ranks", "threads", "seed"):
        least, most = (0, 2**63) if name == "seed" else (1, _MOST_RANKS)
        if not value.isascii() or not value.isdigit() or not least <= int(value) <= most:
            raise ConfigError(
                f"{flag} {value} is not a whole number of at least {least}",
                fix=f"example: {flag} {least + 1}",
            )
        setattr(options, name, int(value))
    elif not value:
        raise ConfigError(f"{flag} is empty", fix="leave it out, or give it a value")
    else:
        setattr(options, name, value)


def _own_key(flag: str, value: str, config_type: type[Any] | None) -> str:
    """How `--steps 5` is said to a program whose config has that key; empty when it has not."""
    key = flag.lstrip("-").replace("-", "_")
    if not dataclasses.is_dataclass(config_type) or not isinstance(config_type, type):
        return ""
    if key not in (row[0] for row in describe_fields(config_type)):
        return ""
    value = "VALUE" if not value or value.startswith("--") else value
    return f"did you mean --set {shlex.quote(f'{key}={value}')}?"


def _suggest(flag: str) -> str:
    if not flag.startswith("-") or "=" in flag:
        return f"to change the config: --set {flag}=VALUE; see --help"
    return did_you_mean(flag, [*_FLAGS, *_CONSENTS], otherwise="see --help")


def _given_by_run(environment: Mapping[str, str]) -> list[str]:
    text = environment.get(SET_VARIABLE, "")
    if not text:
        return []
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise ConfigError(
            f"{SET_VARIABLE} is not a JSON list of texts", fix="use argosy run --set KEY=VALUE"
        )
    return list(given)
