"""Which sessions of a store count as failures: real files, and processes that are killed, crash or end."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest
import torch

from argosy.checkpoint import Checkpointer, names
from argosy.checkpoint.intervals import Past
from argosy.checkpoint.sessions import Record
from argosy.cli.app import main
from argosy.errors import ConfigError

STATE = {"x": torch.zeros(4)}
BEGIN = """
import os, signal, sys
import torch
from argosy.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
checkpointer.load({"x": torch.zeros(4)})
step = (checkpointer.steps() or [0])[-1] + 1
checkpointer.save(step, {"x": torch.zeros(4)})
"""
KILLED = BEGIN + "os.kill(os.getpid(), signal.SIGKILL)"


def live(store, program):
    return subprocess.run([sys.executable, "-c", program, store], check=False).returncode


def saved_past(store):
    return msgspec.json.decode((store / names.SESSIONS).read_bytes(), type=Past)


def failures_after(store):
    """As the next session that saves finds them."""
    with Checkpointer(store) as checkpointer:
        checkpointer.save((checkpointer.steps() or [0])[-1] + 1, STATE)
        return checkpointer.statistics()["failures"]


def test_a_session_that_was_killed_counts_once(tmp_path):
    assert live(tmp_path, KILLED) == -signal.SIGKILL
    assert saved_past(tmp_path).is_open
    assert failures_after(tmp_path) == 1
    assert failures_after(tmp_path) == 1
    assert live(tmp_path, KILLED) == -signal.SIGKILL
    assert live(tmp_path, KILLED) == -signal.SIGKILL
    assert failures_after(tmp_path) == 3


@pytest.mark.parametrize(
    ("ending", "failures"),
    [
        ("", 0),
        ("checkpointer.close()", 0),
        ("del checkpointer", 0),
        ("sys.exit(3)", 0),
        ("raise KeyboardInterrupt", 0),
        ("if os.fork() == 0: sys.exit()\nos.wait(); os.kill(os.getpid(), signal.SIGKILL)", 1),
        ("raise ValueError", 1),
        ("with checkpointer: raise ValueError", 1),
        ("os._exit(0)", 1),
    ],
)
def test_how_a_session_ends_says_whether_it_counts(tmp_path, ending, failures):
    live(tmp_path, BEGIN + ending)
    assert failures_after(tmp_path) == failures


def test_who_only_loads_is_no_session(tmp_path):
    loading = BEGIN.rsplit("checkpointer.save", 1)[0] + "os.kill(os.getpid(), signal.SIGKILL)"
    assert live(tmp_path, loading) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
    assert failures_after(tmp_path) == 0


def test_another_run_that_is_refused_counts_nothing(tmp_path):
    with Checkpointer(tmp_path) as first:
        first.save(1, STATE)
        with pytest.raises(ConfigError, match="is being saved into"):
            Checkpointer(tmp_path).save(2, STATE)
        assert saved_past(tmp_path) == Past(is_open=True, noted_at=saved_past(tmp_path).noted_at)
    assert failures_after(tmp_path) == 0


def test_a_store_that_was_let_go_of_has_no_session(tmp_path):
    first = Checkpointer(tmp_path)
    first.save(1, STATE)
    first.unlock()
    assert failures_after(tmp_path) == 0
    first.save(3, STATE)
    assert saved_past(tmp_path).is_open
    first.close()
    assert not saved_past(tmp_path).is_open


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\xfe", b'{"failures":-1}', b'{"failures":1e400}', b"[" * 9000]
)
def test_a_damaged_file_begins_anew(tmp_path, damage):
    assert live(tmp_path, KILLED) == -signal.SIGKILL
    (tmp_path / names.SESSIONS).write_bytes(damage)
    assert failures_after(tmp_path) == 0
    assert live(tmp_path, KILLED) == -signal.SIGKILL
    assert failures_after(tmp_path) == 1


def test_a_file_that_cannot_be_written_costs_no_save(tmp_path):
    (tmp_path / names.SESSIONS).mkdir()
    assert failures_after(tmp_path) == 0
    assert sorted(os.listdir(tmp_path)) == [names.SESSIONS, names.LOCK, "step-000000001"]


def test_failures_bring_the_saves_of_the_next_session_closer(tmp_path):
    with Checkpointer(tmp_path) as calm:
        calm.save(1, STATE)
        calm._schedule.interval.saw_save(2.0)
        before = calm.statistics()
    (tmp_path / names.SESSIONS).write_bytes(
        b'{"failures":19,"is_open":true,"watched_seconds":7200}'
    )
    with Checkpointer(tmp_path) as troubled:
        troubled.save(2, STATE)
        troubled._schedule.interval.saw_save(2.0)
        after = troubled.statistics()
    assert (after["failures"], after["watched_seconds"]) == (20, 7200)
    assert after["failure_seconds"] < before["failure_seconds"] / 15
    assert after["interval_seconds"] < before["interval_seconds"] / 3


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_a_session_that_goes_on_is_noted_now_and_then(tmp_path):
    clock = Clock()
    record = Record(tmp_path, now=clock, clock=clock)
    record.note(is_new=True)
    clock.now += 30
    record.note()
    assert saved_past(tmp_path).watched_seconds == 0
    clock.now += 100
    record.note()
    assert saved_past(tmp_path).watched_seconds == 130
    clock.now += 5
    record.end()
    assert saved_past(tmp_path) == Past(watched_seconds=135, noted_at=1135)


def test_a_store_that_goes_on_from_another_counts_on_and_leaves_that_alone(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    Record(old).note(is_new=True)
    before = (old / names.SESSIONS).read_bytes()
    record = Record(new, earlier=old)
    assert record.read().failures == 1
    record.note()
    assert Record(new, earlier=old).read() == saved_past(new)
    assert saved_past(new).failures == 1
    Record(new, earlier=old).resume()
    assert saved_past(new).failures == 2
    assert (old / names.SESSIONS).read_bytes() == before


def test_the_command_line_leaves_it_alone(tmp_path, capsys):
    assert live(tmp_path, KILLED) == -signal.SIGKILL
    (tmp_path / names.sessions_draft(1)).write_bytes(b"{")
    before = (tmp_path / names.SESSIONS).read_bytes()
    for words in (["ls"], ["verify", "--all"], ["gc", "--last", "1"]):
        assert main(["checkpoint", words[0], str(tmp_path), *words[1:]]) == 0
    assert ".sessions" not in capsys.readouterr().out
    assert (tmp_path / names.SESSIONS).read_bytes() == before
    assert not (tmp_path / names.sessions_draft(1)).exists()
    assert failures_after(tmp_path) == 1
