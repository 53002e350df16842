"""Who waits for a member of a save sees when it never will come, and only then."""

import os
import subprocess
import sys
import time

import msgspec
import pytest

from argosy.checkpoint import absences
from argosy.checkpoint.absences import Absences
from argosy.checkpoint.boards import FileBoard, Group, PartnerLost
from argosy.checkpoint.lives import is_alive
from argosy.checkpoint.neighbours import this_host


@pytest.fixture
def board(tmp_path):
    found = FileBoard(tmp_path)
    say(found, 0, os.getpid())
    return found


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(absences.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def say(board, rank, pid, host=None):
    said = {"rank": rank, "host": this_host() if host is None else host, "pid": pid}
    board.post(f"said-{rank:05d}", msgspec.json.encode(said))


def look(found, clock, seconds, missing=(1,)):
    for _ in range(int(seconds)):
        clock[0] += 1.0
        found.check(missing)


def test_a_process_of_this_host_that_has_ended_is_lost_once_nobody_can_have_its_part(
    board, clock, dead
):
    say(board, 1, dead)
    found = Absences(board, Group(0, 2))
    look(found, clock, 1)
    with pytest.raises(PartnerLost, match="rank 1 has ended before it had done") as caught:
        look(found, clock, 1)
    assert caught.value.rank == 1


def test_what_a_writer_process_has_is_waited_for(board, clock, dead):
    say(board, 1, dead)
    found = Absences(board, Group(0, 2))
    look(found, clock, 1)
    board.post("handed-00001", b"")
    look(found, clock, 1000)


def test_one_that_lives_is_waited_for_however_long_the_own_rank_is_gone(board, clock):
    say(board, 1, os.getpid())
    look(Absences(board, Group(0, 2, has_left=lambda: True)), clock, 1000)


def test_one_of_another_host_is_waited_for_until_the_own_rank_is_gone_for_a_minute(
    board, clock, dead
):
    say(board, 1, dead, host="elsewhere")
    has_left = [False]
    found = Absences(board, Group(0, 2, has_left=lambda: has_left[0]))
    look(found, clock, 1000)
    has_left[0] = True
    look(found, clock, 50)
    with pytest.raises(PartnerLost):
        look(found, clock, 20)


def test_one_that_has_said_nothing_yet_is_waited_for(board, clock):
    look(Absences(board, Group(0, 2)), clock, 1000)


def test_one_that_writes_itself_on_another_host_is_waited_for(board, clock, dead):
    say(board, 1, dead, host="elsewhere")
    board.post("writes-00001", b"")
    look(Absences(board, Group(0, 2, has_left=lambda: True)), clock, 1000)


def test_nobody_is_lost_while_the_save_is_committed(board, clock, dead):
    say(board, 1, dead)
    found = Absences(board, Group(0, 2))
    look(found, clock, 1)
    board.remove(["said-00000"])
    look(found, clock, 1000)


def test_a_process_that_nobody_has_reaped_has_ended(board, clock):
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.time() + 60
    while is_alive(process.pid):
        assert time.time() < deadline
        time.sleep(0.001)
    assert process.returncode is None
    os.kill(process.pid, 0)
    say(board, 1, process.pid)
    with pytest.raises(PartnerLost):
        look(Absences(board, Group(0, 2)), clock, 3)
    process.wait()
