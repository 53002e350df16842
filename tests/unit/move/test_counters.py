"""Counters of data movement."""

from argosy.move import counters


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
