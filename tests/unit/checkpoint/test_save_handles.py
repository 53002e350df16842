"""Handles: stages in their order, errors told once, waits that end."""

import threading
from pathlib import Path

import pytest

from argosy.checkpoint.handles import SaveHandle
from argosy.errors import HomeError, TimedOut


def test_waiting_ends_at_the_stage_that_was_asked_for():
    handle = SaveHandle(3, Path("step"))
    with pytest.raises(TimedOut, match="requested, not staged"):
        handle.wait("staged", timeout=0.001)
    reached = []
    thread = threading.Thread(target=lambda: reached.append(handle.wait()))
    thread.start()
    handle.advance("staged")
    assert handle.wait("staged", timeout=5) == Path("step")
    assert not handle.is_done
    handle.advance("durable", cpu_seconds=0.5)
    thread.join(5)
    assert reached == [Path("step")]
    assert handle.statistics()["cpu_seconds"] == 0.5
    assert handle.statistics()["staged"] <= handle.statistics()["durable"]


def test_each_stage_is_claimed_once_and_none_after_the_end():
    handle = SaveHandle(1, Path())
    assert handle.claim("staged")
    assert not handle.claim("staged")
    assert handle.claim("failed")
    assert not handle.claim("durable")


def test_an_error_is_raised_by_whoever_waits():
    handle = SaveHandle(1, Path())
    handle.error = HomeError("full", fix="free some")
    handle.advance("failed")
    for _ in range(2):
        with pytest.raises(HomeError, match="full"):
            handle.wait()
    assert handle.is_reported
    handle.advance("durable")
    assert handle.stage == "failed"
