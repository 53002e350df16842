"""Tables for people: nothing that explains a row is lost for want of width."""

import io

from argosy.cli import paint as painting
from argosy.cli.paint import Paint, count, render_table
from argosy.cli.ps import why_of
from argosy.cli.queue import HEADERS, row_of
from argosy.cli.tree import run_node

ENTRY = {"run": "r1", "name": "big", "priority": 0, "share": "big", "cpus": 2.0, "ahead": 3}
WHY = "queued: needs 2 CPUs, 1 free, 3 runs ahead"


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def test_the_queue_says_why_a_run_waits():
    table = render_table(HEADERS, [row_of({**ENTRY, "why": WHY})], Paint(io.StringIO()))
    header, row = table.splitlines()
    assert header.split()[-1] == "WHY"
    assert row.endswith("needs 2 CPUs, 1 free, 3 runs ahead")


def test_a_reason_too_long_for_the_terminal_stands_below_its_row(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(painting, "terminal_width", lambda: 60)
    rows = [row_of({**ENTRY, "why": WHY}), row_of({**ENTRY, "why": "short"})]
    lines = render_table(HEADERS, rows, Paint(Screen())).splitlines()
    assert lines[2] == "    needs 2 CPUs, 1 free, 3 runs ahead"
    assert lines[3].endswith("short")
    assert all(len(line) <= 60 for line in lines)


def test_the_tree_says_once_that_a_run_is_queued():
    view = {"run": "r1", "name": "big", "state": "queued", "outcome": "", "waiting": WHY}
    title, _ = run_node({**view, "roles": []}, {}, Paint(io.StringIO()))
    assert title == "run r1 big queued: needs 2 CPUs, 1 free, 3 runs ahead"


def test_an_end_is_told_in_the_words_of_why():
    view = {"run": "r1", "outcome": "failed", "state": "ended", "reason": "r"}
    process = {"state": "exited", "code": None, "signal": None}
    assert why_of(process | {"code": 3}, view) == "exited with code 3"
    assert why_of(process | {"signal": 15}, view) == "killed by SIGTERM"
    assert why_of(process | {"code": 0}, view) == "ended well"
    assert why_of(process, view) == "r"


def test_one_is_told_as_one():
    told = [count(number, "checkpoint") for number in (0, 1, 2)]
    assert told == ["0 checkpoints", "1 checkpoint", "2 checkpoints"]
