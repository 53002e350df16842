"""The lines around a run in the foreground: which one it is, where its output is, how it ended."""

import contextlib
import io
import os
import sys

import pytest

from argosy.cli import run
from argosy.cli.announce import announce_start, announce_success, warn_of_input
from argosy.cli.program import Program
from argosy.cli.shield import Shield


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def view(count):
    roles = [{"role": "main", "count": count, "processes": []}]
    return {"run": "r1", "name": "job", "directory": "/runs/r1", "roles": roles}


END = {"submitted_at": 1.0, "started_at": 2.0, "ended_at": 14.5}


@pytest.fixture
def said(monkeypatch):
    def say(count, file):
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(sys, "stderr", file)
        announce_start(view(count))
        announce_success({**view(count), **END})
        return file.getvalue()

    return say


START = "argosy: run r1 (job): output is kept in /runs/r1/logs\n"
END_LINE = "argosy: run r1 (job) succeeded after 12s\n"


def test_a_terminal_is_told_the_run_and_how_it_ended(said):
    assert said(1, Screen()) == START + END_LINE


def test_among_labelled_lines_it_is_told_to_a_file_too_and_how_the_parts_are_called(said):
    named = START.replace("(job):", "(job), role main x2:")
    assert said(2, io.StringIO()) == named + END_LINE


def test_the_bytes_of_a_single_process_are_alone_in_a_file(said):
    assert said(1, io.StringIO()) == ""


def test_what_is_piped_in_and_not_passed_on_is_told(capsys, tmp_path):
    reading, writing = os.pipe()
    warn_of_input(reading)
    assert capsys.readouterr().err == "", "nothing has come"
    os.write(writing, b"bob\n")
    warn_of_input(reading)
    assert "not passed on" in capsys.readouterr().err
    assert os.read(reading, 9) == b"bob\n", "it was not taken away"
    os.close(writing)
    warn_of_input(reading)
    os.close(reading)
    warn_of_input(reading)
    (tmp_path / "file").write_text("x")
    with (tmp_path / "file").open() as file:
        warn_of_input(file.fileno())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_up", [True, False])
def test_only_a_cluster_that_is_started_is_said_to_be(monkeypatch, is_up):
    said = []

    class Line:
        begin = said.append

        @contextlib.contextmanager
        def during(self, text):
            self.begin(text)
            yield

    def send(cluster, submission, *, shield, on_start):
        if not is_up:
            on_start()
        return []

    monkeypatch.setattr(run, "Progress", Line)
    monkeypatch.setattr(run, "send", send)
    run.submit_program(Program({"roles": {}}, {}, {}), None, Shield())
    assert said == ["submitting the run", *([] if is_up else ["starting the cluster"])]
