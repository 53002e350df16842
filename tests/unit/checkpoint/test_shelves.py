"""The memory of a holder: nothing torn is seen, damage is noticed, newer steps replace older ones within the limit."""

import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint import checksums
from argosy.checkpoint.peers import rooms
from argosy.checkpoint.peers.labels import CHUNK_BYTES, Address, Image, Label, Share
from argosy.checkpoint.peers.rooms import Standing
from argosy.checkpoint.peers.shelves import Shelves
from argosy.errors import CheckpointDamaged, NoRoom, NotFoundError

GROUP = ("a", "b", "c")


def data_of(seed, num_bytes):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()


def label(step, data, owner="a", members=("a",), mark=1, is_folded=False, run="run"):
    image = Image(mark=mark, num_bytes=len(data), manifest_bytes=0, signature_bytes=0)
    return Label(
        run=run,
        step=step,
        owner=owner,
        members=members,
        share=Share(),
        image=image,
        start=0,
        stop=len(data),
        is_folded=is_folded,
    )


def put(shelves, step, data, keep=0, **more):
    incoming = shelves.begin(label(step, data, **more), keep)
    incoming.room(len(data))[:] = data
    incoming.took(len(data), checksums.of_bytes(data))
    shelves.finish(incoming)


def got(shelves, step, num_bytes, owner="a", members=("a",)):
    address = Address(run="run", step=step, members=members, owner=owner)
    return bytes(shelves.memory_of(address).checked(0, num_bytes))


def steps(shelves, run="run"):
    return [one.step for one in shelves.labels(run)]


@pytest.fixture
def shelves():
    return Shelves(most_bytes=20 * CHUNK_BYTES, keep=2)


def test_what_comes_is_seen_when_all_of_it_has_come(shelves):
    data = data_of(1, CHUNK_BYTES + 100)
    incoming = shelves.begin(label(1, data))
    incoming.room(CHUNK_BYTES)[:] = data[:CHUNK_BYTES]
    incoming.took(CHUNK_BYTES, checksums.of_bytes(data[:CHUNK_BYTES]))
    assert steps(shelves) == []
    with pytest.raises(CheckpointDamaged, match="instead of"):
        shelves.finish(incoming)
    incoming.room(100)[:] = data[CHUNK_BYTES:]
    incoming.took(100, checksums.of_bytes(data[CHUNK_BYTES:]))
    shelves.finish(incoming)
    assert steps(shelves) == [1]
    assert got(shelves, 1, len(data)) == data
    assert shelves.begin(label(1, data)) is None


def test_what_is_given_up_leaves_nothing(shelves):
    incoming = shelves.begin(label(1, b"x" * 100))
    assert shelves.statistics()["num_bytes"] == CHUNK_BYTES
    shelves.give_up(incoming)
    assert shelves.statistics() == {"num_bytes": 0, "most_bytes": 20 << 20, "steps": 0, "coming": 0}


def test_bytes_that_changed_on_the_way_are_refused(shelves):
    incoming = shelves.begin(label(1, b"x" * 100))
    incoming.room(100)[:] = b"y" * 100
    with pytest.raises(CheckpointDamaged, match="on the way"):
        incoming.took(100, checksums.of_bytes(b"x" * 100))
    with pytest.raises(CheckpointDamaged, match="too many"):
        incoming.room(101)


def test_bytes_that_changed_in_memory_are_not_given(shelves):
    data = data_of(1, 2 * CHUNK_BYTES)
    put(shelves, 1, data)
    address = Address(run="run", step=1, members=("a",), owner="a")
    memory = shelves.memory_of(address)
    memory.bytes[CHUNK_BYTES + 5] ^= 1
    with pytest.raises(CheckpointDamaged, match="changed in memory"):
        memory.checked(0, 2 * CHUNK_BYTES)
    assert bytes(memory.checked(0, CHUNK_BYTES)) == data[:CHUNK_BYTES]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_parity_is_the_exclusive_or_of_stretches_of_any_length_in_any_order(shelves, order):
    sizes = [CHUNK_BYTES // 2, 2 * CHUNK_BYTES + 7, CHUNK_BYTES]
    parts = {owner: data_of(at, sizes[at]) for at, owner in enumerate("bcd")}
    members = ("a", "b", "c", "d")
    for at in order:
        address = Address(run="run", step=1, members=members)
        with pytest.raises(NotFoundError):
            shelves.memory_of(address)
        put(shelves, 1, parts["bcd"[at]], owner="bcd"[at], members=members, is_folded=True)
    expected = np.zeros(max(sizes), np.uint8)
    for part in parts.values():
        expected[: len(part)] ^= np.frombuffer(part, np.uint8)
    assert got(shelves, 1, max(sizes), owner="", members=members) == expected.tobytes()
    # The longest stretch is the parity: nothing else stays.
    assert shelves.statistics()["num_bytes"] == 3 * CHUNK_BYTES


def test_damage_in_a_parity_is_still_noticed_after_another_stretch_was_added(shelves):
    put(shelves, 1, data_of(1, 100), owner="b", members=GROUP, is_folded=True)
    kept = shelves._kept["run", GROUP][1]
    kept.parity.bytes[7] ^= 1
    put(shelves, 1, data_of(2, 100), owner="c", members=GROUP, is_folded=True)
    with pytest.raises(CheckpointDamaged):
        got(shelves, 1, 100, owner="", members=GROUP)


def test_a_stretch_that_comes_twice_at_once_is_in_the_parity_once(shelves):
    put(shelves, 1, data_of(1, 100), owner="b", members=GROUP, is_folded=True)
    data = data_of(2, 100)
    one = label(1, data, owner="c", members=GROUP, is_folded=True)
    both = [shelves.begin(one), shelves.begin(one)]
    for incoming in both:
        incoming.room(100)[:] = data
        incoming.took(100, checksums.of_bytes(data))
        shelves.finish(incoming)
    joined = bytes(x ^ y for x, y in zip(data_of(1, 100), data, strict=True))
    assert got(shelves, 1, 100, owner="", members=GROUP) == joined
    assert shelves.statistics()["coming"] == 0


def test_a_parity_begins_anew_when_a_member_has_saved_the_step_again(shelves):
    for owner in "bc":
        put(shelves, 1, data_of(1, 100), owner=owner, members=GROUP, is_folded=True)
    put(shelves, 1, data_of(2, 100), owner="b", members=GROUP, is_folded=True, mark=2)
    assert [one.owner for one in shelves.labels("run")] == ["b"]
    put(shelves, 1, data_of(3, 100), owner="c", members=GROUP, is_folded=True, mark=2)
    joined = bytes(x ^ y for x, y in zip(data_of(2, 100), data_of(3, 100), strict=True))
    assert got(shelves, 1, 100, owner="", members=GROUP) == joined


def test_the_newest_steps_stay(shelves):
    for step in range(1, 6):
        put(shelves, step, b"x")
    assert steps(shelves) == [4, 5]


def test_who_goes_back_takes_its_newer_steps_with_it(shelves):
    for step in (8, 9):
        put(shelves, step, b"x")
        put(shelves, step, b"y", owner="b", members=("b",))
    put(shelves, 5, b"x")
    assert sorted((one.owner, one.step) for one in shelves.labels("run")) == [
        ("a", 5),
        ("b", 8),
        ("b", 9),
    ]


def test_who_goes_back_to_a_step_that_is_there_takes_its_newer_ones_with_it_too(shelves):
    for step in (1, 2):
        put(shelves, step, b"x")
    assert shelves.begin(label(1, b"x")) is None
    assert steps(shelves) == [1]


def test_who_saves_a_step_again_among_other_members_takes_the_former_save_back(shelves):
    for owner in "ab":
        put(shelves, 1, b"x", owner=owner, members=GROUP)
    put(shelves, 1, b"y", mark=2, members=("a", "d"))
    assert sorted((one.owner, one.image.mark) for one in shelves.labels("run")) == [
        ("a", 2),
        ("b", 1),
    ]


def test_another_run_is_not_seen(shelves):
    put(shelves, 1, b"x")
    assert shelves.labels("other") == []


def test_older_steps_go_when_there_is_no_room_but_not_the_newest_whole_one():
    shelves = Shelves(most_bytes=2 * CHUNK_BYTES, keep=5)
    for step in (1, 2, 3):
        put(shelves, step, b"x")
    assert steps(shelves) == [2, 3]
    with pytest.raises(NoRoom, match="1048576 can be had"):
        shelves.begin(label(4, bytes(2 * CHUNK_BYTES)))
    assert steps(shelves) == [2, 3]


def test_a_run_that_is_over_makes_room_for_others_the_one_put_least_recently_first():
    shelves = Shelves(most_bytes=5 * CHUNK_BYTES, keep=2)
    for run, step in [("first", 1), ("second", 1), ("first", 2), ("second", 2), ("first", 3)]:
        put(shelves, step, b"x", run=run)
    for step in (1, 2):
        put(shelves, step, b"x")
    assert (steps(shelves, "second"), steps(shelves, "first")) == ([2], [2, 3])
    for step in (1, 2):
        put(shelves, step, b"x", run="last")
    assert (steps(shelves, "second"), steps(shelves, "first")) == ([], [3])
    assert (steps(shelves), steps(shelves, "last")) == ([1, 2], [1, 2])


def test_of_a_run_that_somebody_uses_the_newest_whole_step_stays_and_goes_once_they_are_gone():
    shelves = Shelves(most_bytes=4 * CHUNK_BYTES, keep=2)
    shelves.note_user(1, "used")
    for run in ("used", "over"):
        for step in (1, 2):
            put(shelves, step, b"x", run=run)
    for size, over, used in [(1, [2], [1, 2]), (2, [], [1, 2]), (3, [], [2])]:
        shelves.give_up(shelves.begin(label(1, bytes(size * CHUNK_BYTES))))
        assert (steps(shelves, "over"), steps(shelves, "used")) == (over, used)
    everything = label(1, bytes(4 * CHUNK_BYTES))
    with pytest.raises(NoRoom, match=f"3145728 can be had[^/]*process {os.getpid()}"):
        shelves.begin(everything)
    shelves.note_gone(1)
    shelves.give_up(shelves.begin(everything))
    assert steps(shelves, "used") == []


def test_nothing_goes_for_what_has_no_room_anyway():
    shelves = Shelves(most_bytes=4 * CHUNK_BYTES, keep=2)
    for run in ("run", "over"):
        for step in (1, 2):
            put(shelves, step, b"x", run=run)
    with pytest.raises(NoRoom, match="3145728 can be had"):
        shelves.begin(label(3, bytes(4 * CHUNK_BYTES)))
    assert (steps(shelves), steps(shelves, "over")) == ([1, 2], [1, 2])


def test_a_member_of_the_same_run_does_not_lose_its_newest_step_to_another():
    shelves = Shelves(most_bytes=2 * CHUNK_BYTES, keep=2)
    put(shelves, 1, b"x")
    put(shelves, 1, b"x", owner="b", members=("b",))
    with pytest.raises(NoRoom):
        shelves.begin(label(2, b"x"))
    assert steps(shelves) == [1, 1]


def test_a_run_keeps_as_many_steps_as_it_says(shelves):
    for step in (1, 2, 3, 4):
        put(shelves, step, b"x", keep=3)
    assert steps(shelves) == [2, 3, 4]
    put(shelves, 5, b"x", keep=1)
    assert steps(shelves) == [5]
    put(shelves, 6, b"x")
    put(shelves, 7, b"x")
    assert steps(shelves) == [6, 7]


def test_newer_steps_go_when_their_owner_says_so(shelves):
    for owner in "ab":
        for step in (1, 2):
            put(shelves, step, b"x", owner=owner, members=(owner,))
    shelves.forget_newer(label(1, b"x"))
    shelves.forget_newer(label(0, b"x", owner="b", run="other"))
    assert [(one.owner, one.step) for one in shelves.labels("run")] == [
        ("a", 1),
        ("b", 1),
        ("b", 2),
    ]


def test_what_former_groups_kept_goes_once_the_new_one_is_whole(shelves):
    put(shelves, 1, b"x", owner="a", members=GROUP)
    put(shelves, 2, b"x", owner="a", members=("a", "d"))
    assert steps(shelves) == [1, 2]
    put(shelves, 2, b"x", owner="d", members=("a", "d"), is_folded=True)
    assert steps(shelves) == [2, 2]


standings = st.lists(
    st.builds(Standing, step=st.integers(0, 20), is_whole=st.booleans()), unique_by=lambda s: s.step
)


@given(standings, st.integers(1, 4), st.integers(0, 20))
def test_the_newest_whole_step_never_goes(standing, keep, coming):
    whole = [one.step for one in standing if one.is_whole]
    surplus = rooms.plan_surplus(standing, keep)
    left = [one for one in standing if one.step not in surplus]
    assert sorted(one.step for one in left if one.is_whole) == sorted(whole)[-keep:]
    assert all(one.step > max(whole, default=-1) for one in left if not one.is_whole)
    assert len([one for one in left if not one.is_whole]) <= rooms.MOST_PARTIAL
    shed = rooms.plan_shedding(standing, coming)
    others = [step for step in whole if step != coming]
    assert coming not in shed
    assert not others or max(others) not in shed


SERIES = [(run, (owner,)) for run in "xyz" for owner in "ab"]


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(SERIES), st.dictionaries(st.integers(0, 4), st.booleans(), max_size=3)
    ),
    st.sets(st.sampled_from("xyz")),
)
def test_all_of_unused_runs_yields_before_anything_of_used_ones(found, used):
    others = {
        series: [Standing(step=step, is_whole=is_whole) for step, is_whole in steps.items()]
        for series, steps in found.items()
    }
    yielding = rooms.plan_yielding(others, used)
    assert len(set(yielding)) == len(yielding)
    over = {(series, step) for series in found for step in found[series] if series[0] not in used}
    assert set(yielding[: len(over)]) == over
    runs = [series[0] for series, _ in yielding[: len(over)]]
    assert len(list(itertools.groupby(runs))) == len(set(runs))
    for series, step in yielding[len(over) :]:
        assert step < max(one for one, is_whole in found[series].items() if is_whole)
