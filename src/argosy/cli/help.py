"""Help: what `--help` prints, and docs/reference/cli.md from the same table."""

from __future__ import annotations

import re
import sys
import textwrap

from argosy.cli.arguments import Arguments
from argosy.cli.grammar import Verb
from argosy.cli.paint import terminal_width
from argosy.cli.unknown import unknown_verb, words_below
from argosy.cli.verbs import VERBS

_NARROWEST = 40


def help(arguments: Arguments) -> int:
    """`argosy help [VERB...]`."""
    if not arguments.words:
        show(overview())
        return 0
    # What follows a verb on a command line may follow it here.
    words = arguments.words[: 2 if words_below(arguments.words[0]) else 1]
    wanted = " ".join(words)
    own = [verb for verb in VERBS if verb.name == wanted]
    below = [verb for verb in VERBS if verb.name.startswith(f"{wanted} ")]
    if not own and not below:
        raise unknown_verb(words)
    text = "".join(verb_help(verb) for verb in own)
    if below:
        lines = [f"  argosy {verb.name:<18} {verb.summary}" for verb in below]
        text += "\n".join(["\nsee also:" if own else f"usage: argosy {wanted} VERB", *lines, ""])
    show(text)
    return 0


def show(text: str) -> None:
    """Print it; on a terminal no word is broken at the edge."""
    sys.stdout.write(fold(text, terminal_width()) if sys.stdout.isatty() else text)


def fold(text: str, width: int) -> str:
    """Lines that are too long go on below: under what explains a verb or an option, else under their own beginning."""
    if width < _NARROWEST:  # a terminal that does not know its size has 0 columns
        return text
    return "".join(f"{piece}\n" for line in text.splitlines() for piece in _fold_line(line, width))


def _fold_line(line: str, width: int) -> list[str]:
    column = re.match(r" +\S.*?  +(?=\S)| *", line)
    indent = column.end() if column and column.end() <= width // 2 else 4
    whole = textwrap.TextWrapper(
        width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return whole.wrap(line) if len(line) > width else [line]


def overview() -> str:
    """All verbs, one line each."""
    lines = [
        "Argosy starts, watches, heals and explains processes: training runs, services, any command.",
        "",
        "usage: argosy VERB [options]",
        "",
    ]
    width = max(len(verb.name) for verb in VERBS)
    lines += [f"  {verb.name:<{width}}  {verb.summary}" for verb in VERBS]
    lines += [
        "",
        "`argosy VERB --help` tells more. First steps:",
        "  argosy run train.py -n 4     four ranks of a torchrun script",
        "  argosy ps                    what is running",
        "  argosy why                   why the newest run failed",
    ]
    return "\n".join(lines) + "\n"


def verb_help(verb: Verb) -> str:
    """Usage, options, details and examples of one verb."""
    lines = [f"usage: argosy {verb.usage}", "", f"{verb.summary[0].upper()}{verb.summary[1:]}."]
    if verb.details:
        lines += ["", verb.details]
    if verb.options:
        lines += ["", "options:"]
        for option in verb.options:
            spelling = f"{option.flag} {option.metavar}".strip()
            again = " (may be repeated)" if option.is_many else ""
            lines.append(f"  {spelling:<22} {option.help}{again}")
    lines += ["", "example:" if len(verb.examples) == 1 else "examples:"]
    lines += [f"  {example}" for example in verb.examples]
    return "\n".join(lines) + "\n"


def reference() -> str:
    """The text of docs/reference/cli.md."""
    parts = [
        "# Command line",
        "",
        "Made from the table in `src/argosy/cli/verbs.py` by `python -m argosy.cli.help`; a test holds them equal.",
        "Exit codes: [exit-codes.md](exit-codes.md). Targets are `RUN[/ROLE[/INDEX]]`; RUN is an id, the beginning of one, or a",
        "name (the newest run of that name; for verbs that act on processes the newest that is alive). Every read command takes `--json`: stdout then holds JSON alone; what a program prints goes to stderr,",
        'and an error is `{"error": {"code": …, "message": …, "fix": …}}`, its code that of the command.',
        "The shapes: [below](#json).",
        "",
    ]
    for verb in VERBS:
        parts += [f"## argosy {verb.name}", "", "```", verb_help(verb).rstrip(), "```", ""]
    from argosy.cli.shapes import describe_shapes

    return "\n".join([*parts, *describe_shapes()]).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
