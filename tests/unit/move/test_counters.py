"""Counters of data movement."""

import mmap
import threading
import time

import torch

from argosy.move import counters, waits


def test_what_was_added_since_a_snapshot_is_told():
    own = counters.Counters()
    own.shared_memory_bytes += 10
    earlier = own.snapshot()
    own.shared_memory_bytes += 5
    own.stalled_seconds += 0.5
    since = own.since(earlier)
    assert since["shared_memory_bytes"] == 5
    assert since["stalled_seconds"] == 0.5
    assert since["copies"] == 0
    own.reset()
    assert set(own.snapshot().values()) == {0}
    assert set(counters.snapshot()) == set(since)


def test_a_wait_that_slept_is_a_stall():
    memory = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8)
    word = memory.data_ptr()
    earlier = counters.snapshot()
    late = threading.Timer(0.02, lambda: waits.post(word, 1))
    late.start()
    waits.wait(word, 1, deadline=time.monotonic() + 10)
    late.join()
    added = counters.own.since(earlier)
    assert added["stalls"] == 1
    assert added["stalled_seconds"] > 0
