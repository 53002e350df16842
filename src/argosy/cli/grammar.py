"""Grammar: what a verb and an option are, for the tables in verbs.py and fileverbs.py.

Imports nothing: every command pays for it.
"""

from __future__ import annotations


class Option:
    """`-n RANKS`, `--detach`: how it is spelt, what it takes, what it is for."""

    __slots__ = ("flag", "help", "is_many", "kind", "metavar", "name")

    def __init__(self, spelling: str, help: str, *, kind: str = "", many: bool = False) -> None:
        self.flag, _, self.metavar = spelling.partition(" ")
        self.name = {"-n": "ranks", "-m": "module", "-f": "follow"}.get(
            self.flag, self.flag.lstrip("-").replace("-", "_")
        )
        self.kind = kind or ("text" if self.metavar else "switch")
        self.is_many = many
        self.help = help


class Verb:
    """One command: how it is used, and which module carries it out."""

    __slots__ = ("details", "entry", "examples", "name", "options", "summary", "usage", "words")

    def __init__(
        self,
        name: str,
        usage: str,
        summary: str,
        *,
        entry: str,
        options: tuple[Option, ...] = (),
        details: str = "",
        examples: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.usage = usage
        self.summary = summary
        self.entry = entry
        self.options = options
        self.details = details
        self.examples = examples
        # Fewest and most positional words, read off the usage line.
        words = [
            word
            for word in usage.replace("[-- ", "-- ").split(" -- ")[0].split()
            if word.strip("[].").isupper()
        ]
        most = 1 << 30 if any("..." in word for word in words) else len(words)
        self.words = (sum(1 for word in words if "[" not in word[:1]), most)


JSON = Option("--json", "print JSON for programs")
