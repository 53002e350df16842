"""Output: the lines of a run's processes on the terminal.

One process: its bytes, unchanged, to the stream they were written to. Several: lines with a rank, equal ones folded into one
with a rank set. Called by `argosy run` and `argosy logs`; never talks to the controller.
"""

from __future__ import annotations

import os
import sys
import time

from argosy.analyze.folding import FoldedLine, Folder, Member
from argosy.analyze.ranksets import format_ranks
from argosy.cli.paint import RANK_COLOURS, Paint, clock
from argosy.telemetry.holes import describe_dropped, read_data

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any, TextIO

_COPY_BYTES = 256 << 10


class RawOutput:
    """Copies the output files of a single process (and of its spares); how far it got is counted in bytes, so nothing is lost or doubled."""

    wants_lines = False

    def __init__(self, directory: str, *, out: int = 1) -> None:
        self._logs = os.path.join(directory, "logs")
        self._out = out
        self._positions: dict[str, int] = {}
        self._last = b""

    def note_file(self, role: str, index: int, number: int) -> None:
        """An attempt exists: its files may appear, and those of the one before it, of the same process, are complete."""
        self.flush(time.time())
        process = os.path.join(self._logs, f"{role}.{index}.")
        others = {
            path: end for path, end in self._positions.items() if not path.startswith(process)
        }
        output = f"{process}{number}"
        self._positions = {**others, f"{output}.out": 0, f"{output}.err": 0}

    def line(self, line: dict[str, Any]) -> None:
        """Nobody sends lines here."""

    def has_news(self) -> bool:
        """Whether there is something to show."""
        for path, position in self._positions.items():
            try:
                if os.stat(path).st_size != position:
                    return True
            except FileNotFoundError:
                continue
        return False

    def flush(self, now: float) -> None:
        """Write out everything that was not yet."""
        for path, position in self._positions.items():
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                self._positions[path] = self._copy(descriptor, position, path.endswith(".err"))
            finally:
                os.close(descriptor)

    def _copy(self, descriptor: int, position: int, is_error: bool) -> int:
        position = min(position, os.fstat(descriptor).st_size)
        while True:
            start, data = read_data(descriptor, position, _COPY_BYTES)
            if start > position:
                write_all(2, f"argosy: {describe_dropped(start - position)}\n".encode())
            if not data:
                return start
            write_all(2 if is_error else self._out, data)
            self._last = data[-1:]
            position = start + len(data)

    def deadline(self) -> float | None:
        """Nothing is held back here."""
        return None

    def finish(self) -> None:
        """The run has ended: the last bytes; a terminal also gets the end of the last line, because ours follow."""
        self.flush(time.time())
        if self._last not in (b"", b"\n") and os.isatty(self._out) and os.isatty(2):
            write_all(2, b"\n")


class LabelledOutput:
    """Lines of several processes: `[0-3] text`."""

    wants_lines = True

    def __init__(
        self,
        view: dict[str, Any],
        *,
        is_live: bool = True,
        should_fold: bool = True,
        has_timestamps: bool = False,
        out: TextIO | None = None,
    ) -> None:
        self._has_one_role = len(view["roles"]) == 1
        self._counts = {role["role"]: int(role.get("count", 1)) for role in view["roles"]}
        members = [(p["role"], _place(p)) for role in view["roles"] for p in role["processes"]]
        if not members:
            members = [(role, i) for role, count in self._counts.items() for i in range(count)]
        # Live, a line may wait but for a moment; of the past, arrival times alone decide.
        window = 0.1 if is_live else 0.5
        self._folder = Folder(members, window_seconds=window) if should_fold else None
        self._is_live = is_live
        self._has_timestamps = has_timestamps
        self._files = {"out": out or sys.stdout, "err": sys.stderr}
        self._paint = {stream: Paint(file) for stream, file in self._files.items()}
        self._unfinished: dict[tuple[str, int, int, str], str] = {}
        self._written_to: TextIO | None = None
        self._labels: dict[tuple[Member, str], str] = {}

    def note_file(self, role: str, index: int, number: int) -> None:
        """Files do not matter here."""

    def line(self, line: dict[str, Any]) -> None:
        """Take a line; pieces of one are put together first."""
        key = (line["role"], line["index"], line["number"], line["stream"])
        member = (line["role"], _place(line))
        if line.get("dropped"):
            before = [self._unfinished.pop(key)] if key in self._unfinished else []
            for text in (*before, f"… {describe_dropped(line['dropped'])} …"):
                self._take(line["at"], member, line["stream"], text)
        text = self._unfinished.pop(key, "") + line["text"]
        if line.get("partial") and len(text) < 1 << 20:
            self._unfinished[key] = text
            return
        self._take(line["at"], member, line["stream"], text)

    def has_news(self) -> bool:
        """Lines tell of themselves."""
        return False

    def flush(self, now: float) -> None:
        """Show what has waited long enough for the other ranks, and all that was written so far."""
        if self._folder:
            self._show(self._folder.flush(now))
        if self._written_to is not None:
            self._written_to.flush()

    def deadline(self) -> float | None:
        """When to call `flush`, on the clock of `time.time`."""
        return self._folder.deadline() if self._folder else None

    def finish(self) -> None:
        """Show everything that is left, unfinished lines too."""
        for (role, index, _, stream), text in self._unfinished.items():
            self._take(time.time(), (role, index), stream, text)
        self._unfinished.clear()
        if self._folder:
            self._show(self._folder.drain())
        self.flush(time.time())

    def _take(self, at: float, member: Member, stream: str, text: str) -> None:
        # torch begins the lines of a traceback with the rank, which the label says already.
        # A bar that redraws itself would wipe the label: its last state is the line.
        text = text.rstrip("\r").rsplit("\r", 1)[-1]
        text = text.removeprefix(f"[rank{member[1]}]: ").removeprefix(f"[rank{member[1]}]:")
        if self._folder:
            now = time.time() if self._is_live else at
            self._show(self._folder.add(at, member, stream, text, now=now))
        else:
            self._show([FoldedLine(at, stream, text, member)])

    def _show(self, lines: list[FoldedLine]) -> None:
        for line in lines:
            paint = self._paint.get(line.stream, self._paint["out"])
            file = self._files.get(line.stream, self._files["out"])
            if self._written_to not in (None, file):
                self._written_to.flush()  # both may end in the same place
            self._written_to = file
            stamp = paint(clock(line.at), "dim") + " " if self._has_timestamps else ""
            file.write(f"{stamp}{self._painted_label(line, paint)} {line.text}\n")

    def _painted_label(self, line: FoldedLine, paint: Paint) -> str:
        # Nearly all are of one process: of long output they are made once.
        key = (line.members[0], line.stream)
        if len(line.members) == 1 and key in self._labels:
            return self._labels[key]
        label = paint(f"[{self.label(line.members)}]", self._colour(line.members))
        if len(line.members) == 1:
            self._labels[key] = label
        return label

    def label(self, members: list[Member]) -> str:
        """`0-3`, or `web, train/0-3` in a run of several roles."""
        by_role: dict[str, list[int]] = {}
        for role, place in members:
            by_role.setdefault(role, []).append(place)
        if self._has_one_role:
            return format_ranks(next(iter(by_role.values())))
        return ", ".join(
            role if self._counts.get(role, 1) == 1 else f"{role}/{format_ranks(places)}"
            for role, places in by_role.items()
        )

    def _colour(self, members: list[Member]) -> str:
        if len(members) > 1:
            return "bold"
        role, place = members[0]
        if not self._has_one_role:
            place = list(self._counts).index(role) if role in self._counts else 0
        return RANK_COLOURS[place % len(RANK_COLOURS)]


Output = RawOutput | LabelledOutput


def choose_output(view: dict[str, Any], *, is_json: bool = False) -> Output:
    """Raw for a single process, labelled for several; all of it on stderr when stdout is for JSON."""
    count = sum(int(role.get("count", 1)) for role in view["roles"])
    if count == 1 and len(view["roles"]) == 1:
        return RawOutput(view["directory"], out=2 if is_json else 1)
    return LabelledOutput(view, out=sys.stderr if is_json else None)


def write_all(descriptor: int, data: bytes) -> None:
    """All of it, also into a pipe that takes it in pieces."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _place(thing: dict[str, Any]) -> int:
    rank = thing.get("rank")
    return int(thing["index"] if rank is None else rank)
