"""What a save leaves behind for the next one, which may be another rank's; whose checkpoints in peers' memory a run goes on with."""

import errno
import os
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest

from argosy.checkpoint import Checkpointer, Peers, Writing
from argosy.checkpoint.boards import Group
from argosy.checkpoint.directio import Files
from argosy.checkpoint.intervals import Interval
from argosy.checkpoint.peers import notes
from argosy.checkpoint.schedules import Schedule
from argosy.checkpoint.sessions import Record
from argosy.train import saver
from argosy.train.checkpoints import Checkpoints
from argosy.train.lineage import Lineage
from argosy.train.saver import Saver

PEERS = Peers(hosts=("a", "b"), host="a", keep=5)


@pytest.mark.parametrize("is_failing", [False, True])
def test_the_store_is_free_before_the_pin_goes(is_failing):
    done = []

    def unlock():
        done.append("unlocked")
        if is_failing:
            raise OSError("the disk is gone")

    found = object.__new__(Saver)
    found.checkpointer = SimpleNamespace(unlock=unlock)
    found._state = SimpleNamespace(unpin=lambda version, owner: done.append("unpinned"))
    found._owner = 0
    hold = SimpleNamespace(release=lambda: done.append("released"), is_shared=False)
    try:
        found._leave(7, hold)
    except OSError:
        assert is_failing
    assert done == ["unlocked", "unpinned", "released"]


def test_what_a_lost_writer_may_still_read_stays_pinned():
    done = []
    found = object.__new__(Saver)
    found._state = SimpleNamespace(unpin=lambda version, owner: done.append("unpinned"))
    found._owner, found._stuck = 0, set()
    found._let_go(7, SimpleNamespace(release=lambda: done.append("released"), is_shared=True))
    assert done == ["released"]


@pytest.mark.parametrize("current", [7, 8])
def test_a_last_save_goes_around_a_writer_that_was_given_up(current):
    pinned = {7: 1}
    hold = SimpleNamespace(release=lambda: None, is_shared=False)
    versions = {1: SimpleNamespace(hold=lambda: None), 2: SimpleNamespace(hold=lambda: hold)}
    slot = 1 if current == 7 else 2
    found = object.__new__(Saver)
    found._owner, found._stuck = 0, set()
    found._memories = SimpleNamespace(version=versions.get)
    found._state = SimpleNamespace(
        pins=lambda: {0: list(pinned.items())},
        current=lambda: (current, slot),
        pin=lambda version, owner: pinned.update({version: slot}),
        unpin=lambda version, owner: pinned.pop(version),
    )
    assert found._take(is_last=True) is None, "another process may be saving it"
    found._stuck = {7}
    assert found._take() is None, "updates would have too few slots"
    version, _, held = found._take(is_last=True)
    assert (version, held) == (current, hold if slot == 2 else None)
    found._let_go(version, held)
    assert pinned == {7: 1}, "the writer may be reading it still"


def test_what_was_not_gone_on_from_counts_for_nothing_and_keeps_its_name(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (20, 30):
            checkpointer.save(step, {"x": step})
    found = object.__new__(Saver)
    found.path, found.checkpointer = tmp_path, Checkpointer(tmp_path)
    found._policy, found._thread, found._last = Checkpoints(every=10), None, None
    found._turns, found._lineage = 0, Lineage(tmp_path)
    begun = []
    found._begin = lambda: begun.append(step)
    for step in (20, 21, 29, 30, 31):
        found.tend(step, lambda: True)
    assert begun == [31], "not 30: nothing is written over"
    assert found._lineage.has(20)
    assert not found._lineage.has(30)
    # One that is made anew is another.
    (tmp_path / "step-000000030").rename(tmp_path / "gone")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(30, {"x": 1})
    assert found._lineage.has(30)


def test_a_run_asks_peers_for_its_own_checkpoints_alone(tmp_path):
    assert saver._peers_of(tmp_path, Checkpoints(peers=PEERS)) is None, "a new run begins anew"
    name = notes.note(PEERS, tmp_path).run
    assert saver._peers_of(tmp_path, Checkpoints()) is None
    moved = Peers(hosts=("a", "b", "c"), host="c")
    found = saver._peers_of(tmp_path, Checkpoints(peers=moved))
    assert (found.run, found.hosts, found.host) == (name, ("a", "b", "c"), "c")


def test_what_a_save_costs_is_what_the_steps_beside_it_took_beyond_the_usual():
    found = object.__new__(Saver)
    found._schedule = Schedule(Interval(), Group())
    found._turns = found._turns_before = 7
    assert found._slowed_by(3.0) == 0.0, "nothing is known yet"
    found._schedule.interval.saw_steps(10, 1.0)
    found._turns += 9
    assert found._slowed_by(3.0) == pytest.approx(2.0)
    assert found._slowed_by(0.5) == 0.0


class Numbers:
    """A part of a checkpoint in the place of a version."""

    metrics: ClassVar[dict[str, float]] = {}

    def __init__(self, step):
        self.step = step

    def gather(self, book):
        book.values["trainer"] = self.step

    def prepare(self, book, opened, tree):
        self.tree = tree

    def finish(self):
        return self.tree


class Broken(Files):
    """A disk that takes nothing until it is mended."""

    is_broken = True

    def write(self, descriptor, data, offset):
        if self.is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(descriptor, data, offset)


def test_a_session_is_on_record_before_its_first_step_is_there(tmp_path):
    heard = []

    def listen(event):
        is_there = bool(Checkpointer(tmp_path).steps())
        heard.append((event.what, Record(tmp_path).read().is_open, is_there))

    found = object.__new__(Saver)
    found.path, found.listener = tmp_path, listen
    found._lineage = Lineage(tmp_path)
    found._record, found._is_over = Record(tmp_path), False
    found._attachments = {}
    found.checkpointer = Checkpointer(tmp_path, listener=found._hear)
    found.checkpointer.session = None
    found._write(Numbers(1))
    found.checkpointer.close()
    assert heard[0] == ("requested", True, False)
    assert heard[-1] == ("durable", True, True)


def test_a_copied_save_that_failed_is_said_and_costs_no_other(tmp_path):
    heard, has_failed, files = [], threading.Event(), Broken()

    def listen(event):
        heard.append((event.what, event.step))
        if event.what == "failed":
            has_failed.set()

    found = object.__new__(Saver)
    found.path, found.listener = tmp_path, listen
    found._lineage = Lineage(tmp_path)
    found._record, found._is_over = Record(tmp_path), False
    found._attachments = {}
    found._schedule, found._began_at = Schedule(Interval(), Group()), 0.0
    found.checkpointer = Checkpointer(tmp_path, writing=Writing(files=files), listener=found._hear)
    found._said_when_failed(Numbers(1), found._save_copied)
    assert has_failed.wait(30)
    files.is_broken = False
    found._said_when_failed(Numbers(2), found._save_copied)
    found.checkpointer.close()
    assert [one for one in heard if one[0] != "staged"] == [
        ("requested", 1),
        ("failed", 1),
        ("requested", 2),
        ("durable", 2),
    ]
    assert Checkpointer(tmp_path).steps() == [2]
