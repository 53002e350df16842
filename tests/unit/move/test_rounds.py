"""Words of an exchange: what they say survives the packing, and each decision refuses what would tear a version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.errors import ConfigError
from argosy.move import rounds
from argosy.move.rounds import NONE, Pin, Round, State
from argosy.move.trees import Node

states = st.builds(
    State,
    st.integers(0, rounds.MOST_VERSION),
    st.integers(0, 14),
    st.integers(NONE, 14),
    st.integers(0, 65535),
)


@given(states)
def test_a_state_survives_its_word(state):
    assert State.of(state.word) == state
    assert 0 <= state.word < 1 << 64


def test_fresh_memory_is_version_zero_in_slot_zero():
    assert State.of(0) == State(0, 0, NONE, 0)


@given(states, st.sets(st.integers(0, 4)), st.integers(2, 5))
def test_the_next_version_never_gets_the_current_or_a_pinned_slot(state, pinned, num_slots):
    after = rounds.begun(state, pinned, num_slots)
    if state.coming != NONE:
        assert after == state
    elif after is None:
        assert set(range(num_slots)) <= pinned | {state.slot}
    else:
        assert after.coming != state.slot
        assert after.coming not in pinned
        assert after.coming < num_slots


@given(states, st.integers(0, 5), st.integers(0, 3))
def test_only_the_next_version_with_all_pages_flips(state, num_done, ahead):
    after = rounds.flipped(state, state.version + ahead, range(num_done), 5)
    if after is None:
        assert ahead != 1 or num_done != 5 or state.coming == NONE
    else:
        assert (ahead, num_done) == (1, 5)
        assert (after.version, after.slot, after.coming) == (
            state.version + 1,
            state.coming,
            NONE,
        )


pins = st.builds(
    Pin,
    st.integers(NONE, rounds.MOST_VERSION - 1),
    st.integers(0, rounds.MOST_HOLDERS),
    st.integers(0, 255),
)


@given(pins)
def test_a_pin_survives_its_word_and_is_told_from_none_by_its_size(pin):
    assert Pin.of(pin.word) == pin
    assert 0 <= pin.word < 1 << 64
    assert (pin.word >= rounds.FIRST_PIN) == (pin.version != NONE)


def test_fresh_memory_has_no_pins():
    assert Pin.of(0) == Pin()
    assert Pin().version == NONE


@given(pins, st.integers(0, rounds.MOST_VERSION - 1))
def test_a_pin_is_there_until_the_last_of_those_who_try_has_withdrawn(pin, version):
    first = rounds.pinned(pin, version)
    if first is None:
        assert pin.version > version
        return
    assert first.version == version
    second = rounds.pinned(first, version)
    kept = rounds.withdrawn(second, first)
    if kept is None:
        assert second.holders == rounds.MOST_HOLDERS
    else:
        assert kept.version == version
        last = rounds.withdrawn(kept, second)
        assert (last.version == NONE) == (pin.version < version or pin.holders == 0)


@given(pins, st.integers(0, rounds.MOST_VERSION - 2))
def test_nobody_withdraws_a_pin_that_was_given_back_and_taken_again(pin, version):
    tried = rounds.pinned(pin, version)
    if tried is not None:
        free = rounds.given_back(tried)
        for now in (free, rounds.pinned(free, version), rounds.pinned(free, version + 1)):
            assert rounds.withdrawn(now, tried) is None


def test_a_pin_changes_the_word_even_when_counts_wrap():
    for epoch in (0, 65535):
        state = State(3, 1, NONE, epoch)
        assert rounds.pinning(state).word != state.word
        assert rounds.pinning(state)[:3] == state[:3]


def test_seals_and_tags_differ_for_every_difference():
    made = [
        rounds.seal_of(Round(version, step, part), Node(first, count))
        for version in range(6)
        for step in range(6)
        for part in range(3)
        for first in range(8)
        for count in range(1, 9)
    ]
    tags = [
        Round(version, step, part).tag
        for version in range(30)
        for step in range(30)
        for part in range(3)
    ]
    assert len(set(made)) == len(made)
    assert len(set(tags)) == len(tags)
    assert 0 not in made
    assert 0 not in tags


@pytest.mark.parametrize(
    ("claim", "seal", "is_needed", "free"),
    [
        (0, 0, False, True),
        (0, 7, False, True),
        (0, 7, True, False),
        (2, 0, False, False),
        (2, 7, True, False),
    ],
)
def test_a_slot_is_free_when_nobody_writes_and_nobody_needs_it(claim, seal, is_needed, free):
    assert rounds.is_claimable(claim, seal, is_needed) is free


def test_rounds_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="part 256"):
        Round(0, 0, 256)
    with pytest.raises(ConfigError):
        Round(-1, 0)
