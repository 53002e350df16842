"""Uploads beside training: their events, interval, retention and failures, which training does not feel."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from argosy.checkpoint import Checkpointer, Keep, Objects
from argosy.checkpoint.tiers import claims
from argosy.checkpoint.tiers import uploader as uploader_module
from argosy.checkpoint.tiers.orders import Failed, Uploaded
from argosy.checkpoint.tiers.remotes import RemoteListing
from argosy.checkpoint.tiers.uploader import Uploader
from argosy.errors import ConfigError, TimedOut


def state(step, size=1000):
    return {"x": torch.full((size,), float(step))}


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def far(tmp_path):
    return f"file://{tmp_path}/far"


def remote(url):
    return RemoteListing.of(Objects(url))


def test_saves_are_uploaded_by_interval_and_kept_by_rules_of_their_own(tmp_path, far):
    events = []
    objects = Objects(far, every=2, keep=Keep(last=2))
    with Checkpointer(
        tmp_path / "disk", objects=objects, keep=Keep(last=1), listener=events.append
    ) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, state(step))
        handle = checkpointer.save(6, state(6), wait=False)
        handle.wait()
        checkpointer.wait_uploaded(30)
        assert remote(far).steps() == [4, 6]
        # What waited for its upload goes from the disk when that is over.
        checkpointer.cleaner.wait()
        assert checkpointer.steps() == [6]
    said = [(event.what, event.step) for event in events]
    assert [one for one in said if one[0] == "uploaded"] == [
        ("uploaded", 2),
        ("uploaded", 4),
        ("uploaded", 6),
    ]
    assert said.index(("durable", 4)) < said.index(("uploaded", 4))
    assert "bytes sent" in next(event for event in events if event.what == "uploaded").detail
    # A new host without the disk goes on from there, and into the same prefix.
    x = torch.zeros(1000)
    with Checkpointer(tmp_path / "elsewhere", objects=objects) as checkpointer:
        loaded = checkpointer.load({"x": x})
        assert (loaded.step, loaded.where, float(x[0])) == (6, far, 6.0)
        checkpointer.save(8, state(8))
    assert remote(far).steps() == [6, 8]


def test_an_upload_that_fails_is_an_event_and_training_goes_on(tmp_path, far):
    with Checkpointer(tmp_path / "first", objects=Objects(far)) as checkpointer:
        checkpointer.save(1, state(1))
    events = []
    with Checkpointer(
        tmp_path / "second", objects=Objects(far), listener=events.append
    ) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait_uploaded(30)
        checkpointer.save(2, state(2))
    failed = [event for event in events if event.what == "upload_failed"]
    assert [event.step for event in failed] == [1, 2]
    assert "is uploaded into by another run" in failed[0].detail
    assert not [event for event in events if event.what == "failed"]
    assert remote(far).steps() == [1]


def test_an_upload_that_fails_is_raised_by_the_next_call_where_that_is_wanted(tmp_path, far):
    with Checkpointer(tmp_path / "first", objects=Objects(far)) as checkpointer:
        checkpointer.save(1, state(1))
    checkpointer = Checkpointer(tmp_path / "second", objects=Objects(far, raises=True))
    checkpointer.save(1, state(1))
    checkpointer._senders.wait(30)
    with pytest.raises(ConfigError, match="is uploaded into by another run"):
        checkpointer.save(2, state(2))
    checkpointer.close()
    assert checkpointer.steps() == [1]


def test_what_an_earlier_session_did_not_come_to_is_uploaded_by_the_next(tmp_path, far):
    with Checkpointer(tmp_path / "disk") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
    events = []
    objects = Objects(far)
    with Checkpointer(tmp_path / "disk", objects=objects, listener=events.append) as checkpointer:
        checkpointer.save(3, state(3))
    uploaded = [event.step for event in events if event.what == "uploaded"]
    assert uploaded == [2, 3]
    events.clear()
    with Checkpointer(tmp_path / "disk", objects=objects, listener=events.append) as checkpointer:
        checkpointer.save(4, state(4))
    assert [event.step for event in events if event.what == "uploaded"] == [4]


def test_a_store_that_was_given_back_is_not_cleaned_and_no_step_is_offered_twice(tmp_path, far):
    events = []
    with Checkpointer(
        tmp_path / "disk", objects=Objects(far), keep=Keep(last=1), listener=events.append
    ) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
            checkpointer.unlock()
            checkpointer._senders.wait(20)
            assert (
                checkpointer.cleaner._thread is None or not checkpointer.cleaner._thread.is_alive()
            )
    assert [event.step for event in events if event.what == "uploaded"] == [1, 2, 3]


def test_a_killed_upload_process_is_started_again_and_goes_on(tmp_path, far):
    with Checkpointer(tmp_path / "disk") as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(4_000_000), "y": {"z": torch.ones(70_000)}})
    told = []
    # So slow that only the first block goes at once.
    objects = Objects(far, bytes_per_second=24e6, files_at_once=1)
    uploader = Uploader(tmp_path / "disk", "", objects, told.append)
    uploader.offer(1)
    wait_for(lambda: uploader.statistics()["process"] and (tmp_path / "far/writers").exists())
    first = uploader.statistics()["process"]
    os.kill(first, signal.SIGKILL)
    uploader.wait(30)
    assert uploader.statistics()["process"] != first
    uploader.close()
    assert isinstance(told[0], Uploaded)
    assert remote(far).verify(1).faults == []


def test_an_upload_process_that_hangs_is_killed_and_another_goes_on(
    tmp_path, far, monkeypatch, halt
):
    monkeypatch.setattr(uploader_module, "_LATE_SECONDS", 0.5)
    with Checkpointer(tmp_path / "disk") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
    told = []
    objects = Objects(far, deadline_seconds=5.0, every_seconds=0.0)
    uploader = Uploader(tmp_path / "disk", "", objects, told.append)
    uploader.offer(1)
    uploader.wait(30)
    halt(uploader.statistics()["process"])
    uploader.offer(2)
    uploader.wait(60)
    halt(uploader.statistics()["process"])
    uploader.close()
    assert [(type(one), one.step) for one in told] == [(Uploaded, 1), (Uploaded, 2)]
    assert remote(far).steps() == [1, 2]


def test_held_steps_are_bounded_and_the_oldest_that_wait_are_left_out(tmp_path, far, monkeypatch):
    gate = threading.Event()
    told = []
    uploader = Uploader(tmp_path, "", Objects(far, every_seconds=0.0), told.append)

    def ask(step):
        gate.wait(30)
        return Failed(step=step, kind="TimedOut", what="too slow")

    monkeypatch.setattr(uploader, "_ask", ask)
    uploader.offer(1)
    wait_for(lambda: uploader.statistics()["current"] == 1)
    for step in (2, 3, 4):
        assert uploader.offer(step)
    assert uploader.held() == {1, 3, 4}
    with pytest.raises(TimedOut):
        uploader.wait(0.01)
    gate.set()
    uploader.wait(30)
    uploader.close()
    assert [one.step for one in told] == [1, 3, 4]
    assert uploader.held() == set()


def test_uploads_have_an_interval_in_seconds(tmp_path, far, monkeypatch):
    uploader = Uploader(tmp_path, "", Objects(far, every_seconds=3600), lambda answer: None)
    monkeypatch.setattr(uploader, "_ask", lambda step: Failed(step=step, kind="", what=""))
    assert [uploader.offer(step) for step in (1, 2, 3)] == [True, False, False]
    uploader.wait(10)
    uploader.close()


SCRIPT = """
import sys, torch
from argosy.checkpoint import Checkpointer, Objects
checkpointer = Checkpointer(sys.argv[1], objects=Objects(sys.argv[2], bytes_per_second=20e6))
checkpointer.save(1, {"x": torch.zeros(5_000_000)})
"""


def test_a_script_that_ends_without_a_word_leaves_the_upload_to_its_process(tmp_path, far):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "disk", far], timeout=60, check=False
    )
    assert done.returncode == 0
    wait_for(lambda: remote(far).steps() == [1])
    # It lets go of its lock when it is done.
    os.close(claims.lock_uploads(tmp_path / "disk", time.monotonic() + 20))
    assert remote(far).verify(1).faults == []


def test_what_cannot_work_is_refused_before_training_begins(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot be read"):
        Checkpointer(tmp_path, objects=Objects("s3://b/x", key="no/such/key"))
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="obstore") as caught:
        Checkpointer(tmp_path, objects=Objects("s3://b/x"))
    assert caught.value.fix == "pip install '.[objects]' in the clone"
