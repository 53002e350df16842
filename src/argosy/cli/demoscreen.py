"""What a person sees of the demo: sections with lines, and a live view of the run at the bottom of a terminal.

Elsewhere than on a terminal the view becomes a plain line now and then. Everything fits any width: fields of the view flow over as many
lines as they need, long lines fold under their own beginning. Used by demo.py; knows nothing of runs.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

GUTTER = 8
_NARROW = 64
_PLAIN_SECONDS = 5.0
_ITEM = 12
_BLOCKS = "▁▂▃▄▅▆▇█"

Field = tuple[str, str]
"""Text and style."""


class Screen:
    """Prints in order; the live view stays below."""

    def __init__(self, *, is_error_stream: bool = False) -> None:
        stream = sys.stderr if is_error_stream else sys.stdout
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._shown_at = 0.0
        self._shown = -1
        self._title = ""

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks, at something that can be drawn on."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    @property
    def width(self) -> int:
        """Columns beside the gutter."""
        columns = self._console.width if self.is_terminal else 1 << 16
        return max(16, columns - self._gutter)

    @property
    def _gutter(self) -> int:
        return 2 if self.is_terminal and self._console.width < _NARROW else GUTTER

    def section(self, name: str) -> None:
        """A part of the demo begins: its name stands beside the next line, or above where that is narrow."""
        self._console.print()
        if self._gutter < GUTTER:
            self._console.print(Text(name, style="bold cyan"))
        else:
            self._title = name

    def command(self, text: str, remark: str = "") -> None:
        """Something that a person could have typed."""
        line = Text.assemble(("$ ", "dim"), (text, "bold"))
        if remark:
            line.append(f"   {remark}", style="dim")
        self._print(line)

    def say(self, *fields: Field | str) -> None:
        """A line, or several: what comes after a line break is folded for itself."""
        parts = [field if isinstance(field, tuple) else (field, "") for field in fields]
        self._print(Text.assemble(*parts))

    def show(self, done: int, total: int, fields: Sequence[Field]) -> None:
        """The live view: a bar, and what there is to know now."""
        if self.is_terminal:
            self._draw(done, total, fields)
        elif self._is_due(done, total):
            self._shown_at, self._shown = time.monotonic(), done
            self.say("  ".join(text for text, _ in fields))

    def clear(self) -> None:
        """Take the live view away."""
        self._shown = -1
        if self._live is not None:
            self._live.stop()
            self._live = None

    def sparkline(self, values: Sequence[float], width: int = 24) -> str:
        """The course of some values in one word; empty where it cannot be shown."""
        if len(values) < 2 or self._console.options.ascii_only:
            return ""
        width = min(width, len(values), max(8, self.width - 40))
        edges = [len(values) * place // width for place in range(width + 1)]
        means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
        least, most = min(means), max(means)
        scale = (len(_BLOCKS) - 1) / ((most - least) or 1.0)
        return "".join(_BLOCKS[round((mean - least) * scale)] for mean in means)

    def item(self, name: str, text: str) -> None:
        """A line of a list: a name and what there is to say."""
        self._print(Text.assemble((f"{name:<{_ITEM}}", "dim"), text), hang=_ITEM)

    def compare(self, digests: dict[str, str], style: str) -> None:
        """Digests with their labels, one under the other, whole where there is room."""
        label_width = max(map(len, digests)) + 2
        length = max(map(len, digests.values()))
        for label, digest in digests.items():
            if self.width >= label_width + length:
                self.say(f"{label:<{label_width}}", (digest, style))
            else:
                self.say(label)
                is_whole = self.width > length
                shown = digest if is_whole else f"{digest[: self.width - 10]}…{digest[-8:]}"
                self.say((shown, style))

    def _is_due(self, done: int, total: int) -> bool:
        """Without a terminal: at the first step, at every fifth of the way, and when nothing was said for a while."""
        if done == self._shown:
            return False
        is_new_part = self._shown < 0 or done * 5 // total > self._shown * 5 // total
        return is_new_part or time.monotonic() - self._shown_at > _PLAIN_SECONDS

    def _draw(self, done: int, total: int, fields: Sequence[Field]) -> None:
        view = Text("\n").join([self._bar(done / max(1, total)), *self._flow(fields)])
        if self._live is None:
            self._live = Live(
                view, console=self._console, auto_refresh=False, transient=True, screen=False
            )
            self._live.start()
        self._live.update(view, refresh=True)

    def _bar(self, part: float) -> Text:
        width = min(self.width - 1, 72)
        filled = round(part * width)
        block, rest = ("#", "-") if self._console.options.ascii_only else ("━", "─")
        return Text.assemble(
            " " * self._gutter, (block * filled, "green"), (rest * (width - filled), "bright_black")
        )

    def _flow(self, fields: Sequence[Field]) -> list[Text]:
        """The fields on as few lines as they fit on."""
        lines = [Text(" " * self._gutter)]
        for text, style in fields:
            used = len(lines[-1]) - self._gutter
            if used and used + 2 + len(text) > self.width - 1:
                lines.append(Text(" " * self._gutter))
                used = 0
            lines[-1].append("  " if used else "").append(text, style=style)
        return lines

    def _print(self, text: Text, hang: int = 0) -> None:
        for line in text.split("\n", allow_blank=True):
            self._print_line(line, hang)

    def _print_line(self, line: Text, hang: int) -> None:
        if not self.is_terminal:
            self._console.print(Text.assemble(self._margin(), line), soft_wrap=True)
            return
        # What does not fit goes on below, `hang` columns in.
        for number, piece in enumerate(_fold(line, self.width, hang)):
            indent = " " * hang if number else ""
            self._console.print(Text.assemble(self._margin(), indent, piece), no_wrap=True)

    def _margin(self) -> Text:
        title, self._title = self._title, ""
        return Text(f"{title:<{self._gutter}}", style="bold cyan")


def _fold(line: Text, width: int, hang: int) -> list[Text]:
    """Pieces of a line that fit, broken at spaces where there are any."""
    pieces: list[Text] = []
    room = width
    while len(line) > room:
        cut = line.plain.rfind(" ", 1, room + 1)
        if not line.plain[:cut].strip():
            cut = -1  # an indent is no place to break
        end = room if cut < 0 else cut
        pieces.append(line[:end])
        line = line[end + (cut >= 0) :]
        room = width - hang
    return [*pieces, line]
