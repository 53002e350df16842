"""Who trains together, and who keeps a generation from being taken."""

from argosy.train.memberships import form, is_complete, is_foremost, late_veterans


def test_every_end_makes_another_membership_with_a_higher_number():
    found = [form(3, 4, ended) for ended in ((), {1}, {1, 3})]
    assert [each.members for each in found] == [(0, 1, 2, 3), (0, 2, 3), (0, 2)]
    assert [each.is_interim for each in found] == [False, True, True]
    numbers = [each.number for each in found] + [form(4, 2, ()).number]
    assert numbers == sorted(set(numbers))


def test_a_generation_is_complete_when_all_are_ready_or_have_ended():
    assert is_complete(3, lambda rank: rank != 1, {1})
    assert not is_complete(3, lambda rank: rank != 1, {2})


def test_one_that_trained_before_and_is_not_ready_is_late_and_a_newcomer_is_not():
    places = [(3, 0, 100), (1, 1, 101), (3, 2, 300)]
    assert late_veterans(places, 3) == {1: 101}
    assert late_veterans(places, 4) == {0: 100, 1: 101, 2: 300}
    assert late_veterans([(3, 0, 100)], 3) == {}


def test_one_that_is_ready_for_a_newer_generation_than_who_asks_knows_is_not_late():
    assert late_veterans([(6, 1, 100), (4, 0, 200)], 4) == {}


def test_of_those_without_a_place_exactly_one_is_foremost_whatever_each_was_told_since():
    places = [(4, 1, 100), (5, 0, 200)]
    assert is_foremost(
        places, (5, 1, 100)
    )  # it has enlisted for its place before, and has another by now
    assert not is_foremost(places, (5, 0, 200))
    assert not is_foremost(places, (6, 0, 300))
    assert is_foremost([], (6, 0, 300))
