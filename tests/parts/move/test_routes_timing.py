"""Two ranks of a segment as two threads, one of them late: what a rank does after a call's last meeting and what the others begin do not touch."""

import threading

import pytest
import torch

from argosy.move import segment, torchroute, verdicts
from argosy.move.calls import Call, Kind
from argosy.move.nativeroute import NativeRoute
from argosy.move.torchroute import TorchRoute

SECONDS = 20.0
SLOT_BYTES = 96 << 10
STAGE_BYTES = segment.stage_bytes(SLOT_BYTES, 2)
PATTERN = 0xA5
SMALL = 1000
LARGE = 2 * SLOT_BYTES // 4
"""Elements of three chunks."""


@pytest.fixture
def make():
    opened = []

    def make_routes(route):
        is_native = route is NativeRoute
        if is_native and segment.library() is None:
            pytest.skip("no native code here")
        made = segment.Segment.create(2, SLOT_BYTES, is_native=is_native)
        places = [verdicts.Place(made, index, [0, 1], "two") for index in range(2)]
        routes = [route(place, [-1, -1], spin_seconds=0.0) for place in places]
        opened.extend([*routes, made])
        return made, routes

    yield make_routes
    for one in opened:
        one.close()


def in_threads(*programs):
    failures = []

    def guarded(program):
        try:
            program()
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def parts(*values, count=SMALL):
    return [torch.full((count,), float(value)) for value in values]


def call_in_place(kind, rank):
    """A call of one meeting whose output is this rank's input where it has both, and that tensor."""
    own, other = parts(rank + 1, rank + 3)
    rows = [own, other] if rank == 0 else [other, own]
    inputs, outputs = [own], [own]
    if kind is Kind.REDUCE_SCATTER:
        inputs = rows
    elif kind is Kind.ALL_GATHER or (kind is Kind.GATHER and rank == 1):
        outputs = rows
    elif kind is Kind.SCATTER:
        inputs = rows if rank == 1 else []
    return Call(kind, torch.float32, SMALL, inputs, outputs, root=1), own


SUMS = {Kind.ALL_REDUCE: 3.0, Kind.REDUCE: 3.0, Kind.REDUCE_SCATTER: 5.0}


@pytest.mark.parametrize("held", ["before it adds", "before it copies"])
@pytest.mark.parametrize("kind", SUMS, ids=lambda kind: kind.name.lower())
def test_a_scatter_and_a_sum_that_is_still_made_of_the_call_before_do_not_touch(
    make, monkeypatch, kind, held
):
    _, (quick, late) = make(TorchRoute)
    is_staged, waited = threading.Event(), []
    meet, copy, fold = quick._epochs.meet, torchroute._copy, late._fold

    def told_meet(step, *, is_first):
        if step.call.kind is Kind.SCATTER:
            is_staged.set()
        meet(step, is_first=is_first)

    def wait():
        waited.append(is_staged.wait(SECONDS))

    def late_fold(*arguments):
        if held == "before it adds":
            wait()
        fold(*arguments)

    def late_copy(out, piece):
        if threading.current_thread().name == "late" and held == "before it copies":
            wait()
        copy(out, piece)

    monkeypatch.setattr(quick._epochs, "meet", told_meet)
    monkeypatch.setattr(late, "_fold", late_fold)
    monkeypatch.setattr(torchroute, "_copy", late_copy)
    given, got = parts(7, 9, count=LARGE), parts(0, 0, count=LARGE)
    results = {}

    def program(route, rank):
        if rank == 1:
            threading.current_thread().name = "late"
        call, results[rank] = call_in_place(kind, rank)
        route.run(call, SECONDS)
        rows = given if rank == 0 else []
        route.run(Call(Kind.SCATTER, torch.float32, LARGE, rows, [got[rank]]), SECONDS)

    in_threads(lambda: program(quick, 0), lambda: program(late, 1))
    assert waited[0]
    assert results[1].unique().tolist() == [SUMS[kind]]
    assert [out.unique().tolist() for out in got] == [[7.0], [9.0]]


@pytest.mark.parametrize("route", [NativeRoute, TorchRoute])
def test_a_scatter_leaves_the_ends_of_slots_alone(make, route):
    made, routes = make(route)
    slots = [made.slot(rank, parity) for rank in range(2) for parity in range(2)]
    for slot in slots:
        slot.fill_(PATTERN)
    given, got = parts(7, 9, count=LARGE), parts(0, 0, count=LARGE)
    calls = [
        Call(Kind.SCATTER, torch.float32, LARGE, given if rank == 0 else [], [got[rank]])
        for rank in range(2)
    ]
    in_threads(*(lambda rank=rank: routes[rank].run(calls[rank], SECONDS) for rank in range(2)))
    assert [out.unique().tolist() for out in got] == [[7.0], [9.0]]
    assert all(slot[STAGE_BYTES:].eq(PATTERN).all() for slot in slots)
    del slot, slots


ONE_MEETING = sorted(set(Kind) - {Kind.ALL_TO_ALL, Kind.MEET})


@pytest.mark.parametrize("route", [NativeRoute, TorchRoute])
@pytest.mark.parametrize("kind", ONE_MEETING, ids=lambda kind: kind.name.lower())
def test_after_its_last_meeting_a_call_writes_at_most_to_the_ends_of_slots(make, route, kind):
    made, routes = make(route)
    slots = [made.slot(rank, 1) for rank in range(2)]
    for slot in slots:
        slot.fill_(PATTERN)
    calls = [call_in_place(kind, rank)[0] for rank in range(2)]
    in_threads(*(lambda rank=rank: routes[rank].run(calls[rank], SECONDS) for rank in range(2)))
    free = STAGE_BYTES if route is TorchRoute else SLOT_BYTES
    assert all(slot[:free].eq(PATTERN).all() for slot in slots)
    del slot, slots
