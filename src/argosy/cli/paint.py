"""Paint: colour on a terminal, plain text elsewhere; tables and durations for people.

Used by all verbs that print. Own few lines because importing a library for it would cost more than a whole `argosy ps`.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import TextIO

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
RANK_COLOURS = ("cyan", "yellow", "green", "magenta", "blue")


class Paint:
    """Wraps text in colours, or leaves it as it is."""

    def __init__(self, file: TextIO) -> None:
        self.is_terminal = file.isatty()
        self._has_colour = (
            self.is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        )

    def __call__(self, text: str, *styles: str) -> str:
        """The text in these styles."""
        if not self._has_colour or not styles or not text:
            return text
        codes = ";".join(_CODES[style] for style in styles)
        return f"\033[{codes}m{text}\033[0m"


STATE_STYLES = {
    "running": ("green",),
    "ready": ("green",),
    "parked": ("blue",),
    "waiting": ("yellow",),
    "queued": ("yellow",),
    "planned": ("yellow",),
    "starting": ("yellow",),
    "stopping": ("yellow",),
    "failed": ("red",),
    "succeeded": ("green",),
    "exited": ("dim",),
    "ended": ("dim",),
    "stopped": ("yellow",),
    "cancelled": ("dim",),
}


def terminal_width() -> int:
    """Columns of the terminal, or a generous width when there is none."""
    for descriptor in (1, 2, 0):
        try:
            return os.get_terminal_size(descriptor).columns
        except OSError:
            continue
    return 200


def render_table(
    headers: list[str], rows: list[list[str]], paint: Paint, *, state_column: int | None = None
) -> str:
    """Columns as wide as their widest cell; on a terminal a last one that does not fit stands below its row, cut to the width."""
    widths = [
        max(len(header), *(len(row[i]) for row in rows)) if rows else len(header)
        for i, header in enumerate(headers)
    ]
    limit = terminal_width() if paint.is_terminal else 1 << 20
    before_last = sum(widths[:-1]) + 2 * (len(widths) - 1)
    last = max(12, limit - before_last)
    lines = [paint(_row(headers, widths, last), "bold")]
    for row in rows:
        has_room = len(row[-1]) <= last
        line = _row(row if has_room else [*row[:-1], ""], widths, last)
        if state_column is not None:
            start = sum(widths[:state_column]) + 2 * state_column
            end = start + widths[state_column]
            styles = STATE_STYLES.get(row[state_column], ())
            line = line[:start] + paint(line[start:end], *styles) + line[end:]
        lines.append(line)
        if not has_room:
            lines.append(_cut(f"    {row[-1]}", limit))
    return "\n".join(lines) + "\n"


def _row(cells: list[str], widths: list[int], last: int) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells[:-1], widths, strict=False)]
    return "  ".join([*padded, _cut(cells[-1], last)]).rstrip()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def duration(seconds: float) -> str:
    """`0.4s`, `12s`, `3m20s`, `2h05m`, `4d2h`."""
    if seconds < 0:
        return "0s"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def size(num_bytes: float) -> str:
    """`512 MiB`, `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return (
                f"{num_bytes:.0f} {unit}"
                if unit in ("B", "KiB", "MiB")
                else f"{num_bytes:.1f} {unit}"
            )
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def count(number: int, what: str) -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def clock(at: float) -> str:
    """Wall-clock time of today's kind: `14:03:07.123`, local time."""
    import time

    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
