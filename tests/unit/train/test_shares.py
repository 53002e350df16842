"""Lanes and parameters of members: every one exactly once, whoever is there."""

from hypothesis import given
from hypothesis import strategies as st

from argosy.train import shares


@given(st.integers(1, 40), st.integers(1, 200))
def test_lanes_are_dealt_exactly_once(count, num_lanes):
    for deal in (shares.lanes_of, shares.dealt_lanes):
        dealt = [lane for position in range(count) for lane in deal(position, count, num_lanes)]
        assert sorted(dealt) == list(range(num_lanes))


@given(st.integers(1, 40), st.integers(1, 200))
def test_shares_of_lanes_differ_by_at_most_one(count, num_lanes):
    for deal in (shares.lanes_of, shares.dealt_lanes):
        sizes = [len(deal(position, count, num_lanes)) for position in range(count)]
        assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True), st.booleans())
def test_every_lane_has_a_living_owner(members, is_interim):
    owners = shares.owners_of_lanes(sorted(members), 16, is_interim=is_interim)
    assert len(owners) == 16
    assert set(owners) <= set(members)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.integers(1, 9))
def test_parameters_are_owned_exactly_once_and_in_order(sizes, count):
    costs = {f"p{place}": size for place, size in enumerate(sizes)}
    owned = [shares.parameters_of(position, count, costs) for position in range(count)]
    assert sorted(name for names in owned for name in names) == sorted(costs)
    order = list(costs)
    assert all(names == sorted(names, key=order.index) for names in owned)


def test_large_parameters_are_spread():
    costs = {"embedding": 100, "a": 50, "b": 50, "c": 10, "d": 10}
    loads = [sum(costs[n] for n in shares.parameters_of(p, 2, costs)) for p in range(2)]
    assert sorted(loads) == [110, 110]


def test_what_a_lost_member_had_is_spread_over_all_that_are_left():
    lost = shares.lanes_of(1, 4, 16)
    owners = shares.owners_of_lanes([0, 2, 3], 16, is_interim=True)
    assert len({owners[lane] for lane in lost}) == 3
