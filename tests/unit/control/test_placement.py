from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.spec import RoleSpec, RunSpec
from argosy.control.commands import check_room
from argosy.control.placement import Placement, need_of
from argosy.errors import ConfigError


def run(count=1, cpus=1.0, memory=0, **more):
    role = RoleSpec(
        command=["x"], count=count, cpu_request=cpus, memory_request_bytes=memory, **more
    )
    return RunSpec(roles={"a": role})


def hosts(*cpus):
    placement = Placement()
    for number, each in enumerate(cpus):
        placement.set_host(f"h{number}", each, 100)
    return placement


def test_a_run_stays_on_one_host_when_it_fits_there():
    assert hosts(2, 8, 4).place(run(count=4), is_accounted=True) == {"a": ["h1"] * 4}


def test_a_run_too_large_for_one_host_is_spread_in_order():
    placed = hosts(4, 4).place(run(count=6, gang=True), is_accounted=True)
    assert placed == {"a": ["h0"] * 4 + ["h1"] * 2}


def test_there_is_no_place_when_the_room_is_taken_and_one_when_it_is_given_back():
    placement = hosts(2)
    spec = run(count=2)
    placed = placement.place(spec, is_accounted=True)
    placement.take(spec, placed)
    assert placement.place(run(), is_accounted=True) is None
    placement.give_back(spec, placed)
    assert placement.place(run(), is_accounted=True) is not None


def test_memory_is_accounted_too():
    placement = hosts(8)
    assert placement.place(run(memory=60, count=2), is_accounted=True) is None
    assert placement.place(run(memory=50, count=2), is_accounted=True) is not None


def test_a_run_that_does_not_wait_is_placed_on_the_least_loaded_host_whatever_it_asks_for():
    placement = hosts(2, 2)
    spec = run(cpus=5.0)
    first = placement.place(spec, is_accounted=False)
    placement.take(spec, first)
    assert placement.place(spec, is_accounted=False)["a"] != first["a"]


def test_without_hosts_there_is_no_place():
    assert Placement().place(run(), is_accounted=False) is None


def test_what_can_never_fit_is_known():
    placement = hosts(2, 2)
    assert placement.could_ever(run(count=4))
    assert not placement.could_ever(run(count=5))
    assert not placement.could_ever(run(count=3, cpus=1.3)), (
        "three pieces, two hosts with room for one"
    )


def test_a_queued_run_that_could_never_start_is_refused_with_what_there_is():
    large = msgspec.structs.replace(run(count=5), queued=True)
    with pytest.raises(ConfigError, match="needs 5 CPUs, and the 2 hosts have 4 CPUs"):
        check_room(large, hosts(2, 2))
    check_room(run(count=5), hosts(2, 2))  # at once: nothing is accounted
    check_room(large, Placement())  # nobody knows yet
    check_room(msgspec.structs.replace(run(count=4), queued=True), hosts(2, 2))


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0.1, 0.5, 1.0, 3.0])), max_size=40))
def test_no_host_is_ever_given_more_than_it_has_and_all_comes_back(wishes):
    placement = hosts(2, 4, 8)
    placed = []
    for count, cpus in wishes:
        spec = run(count=count, cpus=cpus)
        where = placement.place(spec, is_accounted=True)
        if where is not None:
            placement.take(spec, where)
            placed.append((spec, where))
        for capacity in placement.hosts.values():
            assert capacity.used_cpus <= capacity.cpus + 1e-6
    for spec, where in placed:
        placement.give_back(spec, where)
    assert all(abs(c.used_cpus) < 1e-6 and c.processes == 0 for c in placement.hosts.values())
    assert abs(placement.free_cpus - 14) < 1e-6


def test_spares_are_part_of_what_a_run_needs():
    assert need_of(run(count=2, gang=True, spares=1)).cpus == 3.0
