"""The real exchange in one process: what it refuses, what survives, and the order of its accesses, which the model relies on."""

import gc
import itertools
import math
import os
import time

import pytest
import torch

from argosy.errors import (
    ArenaGone,
    ConfigError,
    GenerationChanged,
    InvariantError,
    MismatchError,
    NoRoom,
    RoundOver,
    TimedOut,
)
from argosy.move import arenas, broker, counters, exchange, trees
from argosy.move.gathered import total, values_of
from argosy.move.layout import Layout, Parameter
from argosy.move.rounds import Round
from argosy.move.trees import Node
from argosy.native import loader

names = itertools.count()
FIRST = Round(0, 0)


def soon(seconds=5.0):
    return time.monotonic() + seconds


def layout_of(lanes=4, ranks=2, sizes=(70_000, 10), **more):
    parameters = tuple(Parameter(name=f"p{i}", numel=n) for i, n in enumerate(sizes))
    return Layout(num_lanes=lanes, most_ranks=ranks, parameters=parameters, **more)


@pytest.fixture
def make():
    made = []

    def make_exchange(layout=None, name=None, enter=True):
        layout = layout or layout_of()
        opened = exchange.open(name or f"unit-{next(names)}", layout, scope="process")
        made.append(opened)
        if enter:
            opened.enter(0, 0, {0: -1}, deadline=soon())
        return opened

    yield make_exchange
    for opened in made:
        opened.close()


def lane_values(layout, lane):
    generator = torch.Generator().manual_seed(lane)
    return torch.randn(layout.num_elements, generator=generator) * 2.0 ** (lane % 5)


def publish(opened, round, node, **more):
    claim = opened.claim(round, node)
    claim.zero()
    for lane in range(node.first, node.stop):
        claim.flat.add_(lane_values(opened.layout, lane))
    return opened.publish(claim, **more)


def commit(opened, version, pages=None):
    opened.state.begin(version, deadline=soon())
    opened.state.mark_done(version, range(opened.layout.num_pages) if pages is None else pages)
    return opened.state.wait_flip(version, deadline=soon())


def sums(opened, round):
    out = torch.zeros(opened.layout.num_elements)
    gathered = opened.wait_lanes(round, deadline=soon())
    partials = opened.reduce(gathered, range(opened.layout.num_pages), out)
    return gathered, partials, out


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
def test_any_cut_between_ranks_gives_the_same_bits(make, cut):
    opened = make(layout_of(lanes=5))
    for node in (*opened.layout.blocks(0, cut), *opened.layout.blocks(cut, 5 - cut)):
        publish(opened, FIRST, node, terms={"loss": (node.first + 0.5, float(node.size))})
    gathered, partials, out = sums(opened, FIRST)
    single = [lane_values(opened.layout, lane) + 0.0 for lane in range(5)]
    program = trees.program([Node(lane, 1) for lane in range(5)], 5)
    expected = trees.evaluate(program, single, torch.add)
    for name in ("p0", "p1"):
        start, stop = opened.layout.span(name)
        assert torch.equal(out[start:stop], expected[start:stop])
    assert gathered.terms["loss"][1] == 5.0
    squares = sum(
        float(expected[slice(*opened.layout.bounds(p))].double().square().sum()) for p in range(3)
    )
    assert total(partials) == pytest.approx(squares, rel=1e-6)


def test_few_slots_are_enough_because_siblings_are_added_into_one(make):
    many = make(layout_of(lanes=16, ranks=1))
    few = make(layout_of(lanes=16, ranks=1, num_slots=5))
    for opened in (many, few):
        for node in opened.layout.blocks(0, 16):
            publish(opened, FIRST, node, touched=["p1"] if node.first == 6 else [])
    (a, partials, out), (b, others, out_few) = sums(many, FIRST), sums(few, FIRST)
    assert few.statistics()["merges"] > 0
    assert many.statistics()["merges"] == 0
    assert torch.equal(out, out_few)
    assert partials == others
    assert a.touched == b.touched == {"p1"}


def test_blocks_with_extra_bytes_are_never_added_into_one(make):
    opened = make(layout_of(lanes=16, ranks=1, num_slots=5, extra_bytes=4))
    nodes = opened.layout.blocks(0, 16)
    for node in nodes[:5]:
        publish(opened, FIRST, node, extra=b"kept")
    with pytest.raises(NoRoom, match="more num_slots"):
        opened.claim(FIRST, nodes[5])
    assert opened.statistics()["merges"] == 0


def test_what_travels_with_blocks_is_added_in_the_order_of_the_tree(make):
    opened = make(layout_of(lanes=3, extra_bytes=5, terms=("loss", "aux")))
    publish(opened, FIRST, Node(0, 2), terms={"loss": (0.1, 2.0)}, extra=b"left", touched=["p0"])
    publish(opened, FIRST, Node(2, 1), terms={"loss": (0.2, 1.0), "aux": (7.0, 1.0)}, touched=[])
    gathered = opened.wait_lanes(FIRST, deadline=soon())
    assert gathered.terms == {"loss": (0.1 + 0.2, 3.0), "aux": (7.0, 1.0)}
    assert gathered.touched == {"p0"}
    assert gathered.extras[0] == (Node(0, 2), b"left\0")
    with pytest.raises(ConfigError, match="'other' is not in the layout"):
        publish(opened, Round(0, 1), Node(0, 1), terms={"other": (0.0, 0.0)})
    with pytest.raises(ConfigError, match="6 extra bytes"):
        publish(opened, Round(0, 2), Node(0, 1), extra=b"123456")


def test_extra_bytes_of_an_earlier_block_do_not_show_behind_shorter_ones(make):
    opened = make(layout_of(lanes=1, ranks=1, extra_bytes=8, num_slots=1))
    publish(opened, FIRST, Node(0, 1), extra=b"12345678")
    later = Round(0, 1)
    publish(opened, later, Node(0, 1), extra=b"ab")
    assert opened.wait_lanes(later, deadline=soon()).extras == ((Node(0, 1), b"ab\0\0\0\0\0\0"),)


def test_an_exchange_is_shared_by_its_descriptor_where_there_is_no_run(make):
    first = make(layout_of(ranks=1))
    publish(first, FIRST, Node(0, 2))
    second = exchange.attach(os.dup(first.fileno()), first.layout)
    assert [block.node for block in second.published(FIRST)] == [Node(0, 2)]
    second.close()
    handed = os.dup(first.fileno())
    with pytest.raises(MismatchError, match="another layout"):
        exchange.attach(handed, layout_of(lanes=6, ranks=1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handed)


def test_a_replacement_goes_on_with_what_a_dead_rank_has_finished(make):
    layout = layout_of()
    first = make(layout, name="unit-replaced")
    publish(first, FIRST, Node(0, 2))
    first.claim(FIRST, Node(2, 2))
    first.state.pin()
    second = make(layout, name="unit-replaced", enter=False)
    with pytest.raises(GenerationChanged, match="another process of rank 0"):
        second.enter(0, 0, {0: -1}, deadline=soon())
    second.enter(1, 0, {0: -1}, deadline=soon())
    assert second.claim(FIRST, Node(0, 2)) is None
    assert second.missing(FIRST) == [2, 3]
    assert second.state.pins() == {}
    publish(second, FIRST, Node(2, 2))
    assert second.missing(FIRST) == []


def test_one_that_comes_late_to_a_past_generation_does_not_hide_who_has_its_rank_now(make):
    layout = layout_of(ranks=2)
    late = make(layout, name="unit-late")
    other = make(layout, name="unit-late", enter=False)
    other.enter(1, 1, {1: -1}, deadline=soon())
    other.enter(3, 0, {0: -1}, deadline=soon())
    with pytest.raises(GenerationChanged, match="another process of rank 0"):
        late.enter(2, 0, {0: -1}, deadline=soon())
    assert other.late(3, {0: -1}) == []
    late.enter(3, 1, {0: -1, 1: -1}, deadline=soon())


def test_an_unfinished_block_does_not_count_and_a_stale_claim_cannot_be_published(make):
    opened = make()
    claim = opened.claim(FIRST, Node(0, 2))
    assert opened.published(FIRST) == []
    with pytest.raises(TimedOut, match=r"lanes 0 \(rank 0 is writing it\), 1 .* 2 \(of rank 1\)"):
        opened.wait_lanes(FIRST, deadline=time.monotonic(), owners=[0, 0, 1, 1])
    opened.enter(1, 0, {0: -1}, deadline=soon())
    with pytest.raises(GenerationChanged, match="generation 0, this is 1"):
        opened.publish(claim)


def test_a_slot_is_not_given_away_while_its_writer_has_not_entered_the_generation_that_renumbers_him(
    make,
):
    layout = layout_of()
    writer = make(layout, name="unit-renumbered")
    claim = writer.claim(FIRST, Node(0, 2))
    late = make(layout, name="unit-renumbered", enter=False)
    late.enter(0, 1, {0: -1, 1: -1}, deadline=soon())
    newcomer = make(layout, name="unit-renumbered", enter=False)
    with pytest.raises(TimedOut, match="have not entered generation 1"):
        newcomer.enter(1, 0, {0: -1, 1: -1}, deadline=time.monotonic())
    assert late.claim(FIRST, Node(2, 2)).slot != claim.slot
    writer.publish(claim)
    assert writer.missing(FIRST) == [2, 3]


def test_another_layout_is_refused(make):
    make(layout_of(), name="unit-other")
    for other in (layout_of(terms=("lost",)), layout_of(lanes=64)):
        with pytest.raises(MismatchError, match="another layout"):
            make(other, name="unit-other")


def test_a_process_that_swaps_words_in_another_way_is_refused(make, monkeypatch):
    if loader.library() is None:
        pytest.skip("there is no native code")
    make(name="unit-ways")
    monkeypatch.setenv(loader.SWITCH, "0")
    loader.forget()
    try:
        with pytest.raises(MismatchError, match="this process has no native code") as caught:
            make(name="unit-ways")
        assert broker._uses["unit-ways"] == 1, caught  # the error is kept, the memory is not
    finally:
        monkeypatch.undo()
        loader.forget()
    make(name="unit-ways", enter=False)  # it left nothing behind


def test_a_claim_is_published_once(make):
    opened = make()
    claim = opened.claim(FIRST, Node(0, 2))
    opened.publish(claim)
    with pytest.raises(ConfigError, match="lanes 0 to 1 was published or released before"):
        opened.publish(claim)


def test_votes_are_in_page_order_and_show_what_is_not_finite(make):
    opened = make()
    with pytest.raises(TimedOut, match="votes of 3 pages"):
        opened.wait_votes(FIRST, deadline=time.monotonic())
    opened.vote(FIRST, [2, 0], [4.0, math.inf])
    opened.vote(FIRST, [1], [1.0])
    assert opened.wait_votes(FIRST, deadline=soon()) == [math.inf, 1.0, 4.0]
    assert opened.unvoted(Round(0, 1)) == [0, 1, 2]


def wakes_of(opened, action):
    """How often an action wakes those who wait."""
    at = opened.layout.places.progress
    before = opened._memory.load(at)
    action()
    return opened._memory.load(at) - before


def test_only_the_last_lane_and_the_last_vote_wake_those_who_wait(make):
    opened = make(layout_of(lanes=4, ranks=1, sizes=(8, 8)))

    def wakes(action):
        return wakes_of(opened, action)

    assert wakes(lambda: publish(opened, FIRST, Node(2, 2))) == 0
    assert wakes(lambda: publish(opened, FIRST, Node(0, 1))) == 0
    assert wakes(lambda: publish(opened, FIRST, Node(1, 1))) == 1
    assert wakes(lambda: opened.vote(FIRST, [1], [2.0])) == 0
    assert wakes(lambda: opened.vote(FIRST, [0], [1.0])) == 1
    assert opened.wait_votes(FIRST, deadline=soon()) == [1.0, 2.0]
    with pytest.raises(ConfigError, match="1 votes for 2 pages"):
        opened.vote(FIRST, [0, 1], [1.0])


def test_a_block_wakes_those_who_wait_for_room_when_no_slot_is_free(make):
    opened = make(layout_of(lanes=4, ranks=1, sizes=(8,)))
    assert opened.layout.slots == 3
    assert opened.claim(FIRST, Node(2, 2)) is not None
    assert wakes_of(opened, lambda: publish(opened, FIRST, Node(0, 1))) == 0
    assert wakes_of(opened, lambda: publish(opened, FIRST, Node(1, 1))) == 1


def test_pages_that_do_not_follow_one_another_are_added_alone(make):
    opened = make()
    publish(opened, FIRST, Node(0, 2))
    publish(opened, FIRST, Node(2, 2))
    gathered, partials, whole = sums(opened, FIRST)
    out = torch.full((opened.layout.num_elements,), 7.0)
    before, read = counters.snapshot(), opened.statistics()["read_bytes"]
    assert opened.reduce(gathered, [2, 0], out) == [partials[2], partials[0]]
    added = counters.own.since(before)["shared_memory_bytes"]
    assert added == opened.statistics()["read_bytes"] - read > 0
    start, stop = opened.layout.bounds(1)
    assert (out[start:stop] == 7.0).all()
    for page in (0, 2):
        assert torch.equal(
            out[slice(*opened.layout.bounds(page))], whole[slice(*opened.layout.bounds(page))]
        )


def test_versions_flip_once_all_pages_are_done_and_never_reuse_the_current_slot(make):
    opened = make()
    state = opened.state
    slot = state.begin(1, deadline=soon())
    assert slot != state.current()[1]
    state.mark_done(1, [0, 1])
    assert not state.try_flip(1)
    with pytest.raises(TimedOut, match="pages 2 are not done"):
        state.wait_flip(1, deadline=time.monotonic())
    assert state.begin(1, deadline=soon()) == slot
    state.mark_done(1, [2])
    assert state.wait_flip(1, deadline=soon()) == slot
    assert state.current() == (1, slot)
    with pytest.raises(InvariantError, match="version 1 cannot begin"):
        state.begin(1, deadline=soon())


def test_a_pinned_version_keeps_its_slot_until_it_is_given_back_or_swept(make):
    layout = layout_of(num_versions=3)
    opened = make(layout, name="unit-pins")
    observer = make(layout, name="unit-pins", enter=False)
    observer.observe(0)
    version, slot = observer.state.pin()
    assert (version, slot) == (0, 0)
    slots = [commit(opened, number) for number in (1, 2, 3)]
    assert slot not in slots
    opened.state.pin(3)
    with pytest.raises(GenerationChanged, match="version 1 cannot be pinned"):
        opened.state.pin(1)
    commit(opened, 4)
    with pytest.raises(
        TimedOut,
        match=r"all others are pinned \(rank 0: version 3, observer 0: version 0\)|observer 0",
    ):
        opened.state.begin(5, deadline=time.monotonic())
    assert opened.sweep_observer(0) == 1
    assert opened.state.begin(5, deadline=soon()) == 0


def test_a_pin_of_an_owner_that_several_stand_for_is_never_absent_once_one_of_them_has_it(
    make, monkeypatch
):
    layout = layout_of()
    first = make(layout, name="unit-one-pin")
    second = make(layout, name="unit-one-pin", enter=False)
    owner, memory = layout.num_owners - 1, second._memory
    swap, seen = memory.swap, []

    def watched_swap(offset, expected, desired):
        if not seen and offset == layout.places.state:
            first.state.pin(0, owner=owner)
        is_swapped = swap(offset, expected, desired)
        if offset == layout.places.state:
            seen.append(first.state.pins())
        return is_swapped

    monkeypatch.setattr(memory, "swap", watched_swap)
    assert second.state.pin(0, owner=owner) == (0, 0)
    assert len(seen) >= 2
    assert all(pins == {owner: [(0, 0)]} for pins in seen)


def test_a_pin_that_came_too_late_is_taken_back(make, monkeypatch):
    layout = layout_of()
    first = make(layout, name="unit-late-pin")
    second = make(layout, name="unit-late-pin", enter=False)
    second.observe(0)
    swap = second._memory.swap

    def late_swap(offset, expected, desired):
        if offset == layout.places.state and first.state.current()[0] == 0:
            assert first.state.pins() == {layout.most_ranks: [(0, 0)]}
            commit(first, 1)
        return swap(offset, expected, desired)

    monkeypatch.setattr(second._memory, "swap", late_swap)
    with pytest.raises(GenerationChanged, match="version 0 cannot be pinned"):
        second.state.pin(0)
    assert first.state.pins() == {}


def before_its_swap(opened, monkeypatch, place, act):
    """Others act while a process is about to swap a word for the first time."""
    swap, acted = opened._memory.swap, []

    def late_swap(offset, expected, desired):
        if offset == place and not acted:
            acted.append(offset)
            act()
        return swap(offset, expected, desired)

    monkeypatch.setattr(opened._memory, "swap", late_swap)


def test_a_pin_that_came_too_late_leaves_the_one_that_another_process_has_for_its_owner(
    make, monkeypatch
):
    layout = layout_of(num_versions=3)
    first = make(layout, name="unit-shared-pin")
    second = make(layout, name="unit-shared-pin", enter=False)
    owner = layout.num_owners - 1

    def go_on():
        assert first.state.pin(0, owner=owner) == (0, 0)
        commit(first, 1)

    before_its_swap(second, monkeypatch, layout.places.state, go_on)
    with pytest.raises(GenerationChanged, match="version 0 cannot be pinned"):
        second.state.pin(0, owner=owner)
    assert first.state.pins() == {owner: [(0, 0)]}
    assert [commit(first, version) for version in (2, 3)] == [2, 1]
    first.state.unpin(0, owner=owner)
    assert first.state.pins() == {}


@pytest.mark.parametrize("late", ["pin", "unpin"])
def test_who_is_late_with_an_old_version_never_touches_the_pin_of_a_new_one_in_its_slot(
    make, monkeypatch, late
):
    layout = layout_of()
    first = make(layout, name=f"unit-reused-{late}")
    second = make(layout, name=f"unit-reused-{late}", enter=False)
    owner = layout.num_owners - 1
    place = second.state._pin_at(owner, 0)

    def go_on():
        first.state.unpin(0, owner=owner)
        assert [commit(first, version) for version in (1, 2)] == [1, 0]
        first.state.pin(2, owner=owner)

    if late == "unpin":
        first.state.pin(0, owner=owner)
        before_its_swap(second, monkeypatch, place, go_on)
        second.state.unpin(0, owner=owner)
    else:
        before_its_swap(second, monkeypatch, place, go_on)
        with pytest.raises(GenerationChanged, match="version 0 cannot be pinned"):
            second.state.pin(0, owner=owner)
    assert first.state.pins() == {owner: [(2, 0)]}


def test_votes_that_the_next_round_has_overwritten_while_they_were_read_mean_that_theirs_is_over(
    make, monkeypatch
):
    layout = layout_of(sizes=(8, 8))
    owner = make(layout, name="unit-late-votes")
    late = make(layout, name="unit-late-votes", enter=False)
    owner.vote(FIRST, [0, 1], [1.0, 2.0])
    fence = late._progress.fence

    def go_on():
        if owner.state.current()[0] == 0:
            commit(owner, 1)
            owner.vote(Round(1, 1), [0], [3.0])
        fence()

    monkeypatch.setattr(late._progress, "fence", go_on)
    with pytest.raises(RoundOver, match="finished by others"):
        late.wait_votes(FIRST, deadline=soon())


def test_blocks_that_the_next_round_has_taken_while_they_were_read_mean_that_theirs_is_over(make):
    opened = make(layout_of(num_slots=2))
    publish(opened, FIRST, Node(0, 2))
    publish(opened, FIRST, Node(2, 2))
    gathered = opened.wait_lanes(FIRST, deadline=soon())
    commit(opened, 1)
    publish(opened, Round(1, 1), Node(0, 2))
    publish(opened, Round(1, 1), Node(2, 2))
    with pytest.raises(RoundOver, match="finished by others"):
        opened.reduce(gathered, [], torch.zeros(opened.layout.num_elements))


def test_what_others_have_finished_is_over(make):
    opened = make()
    commit(opened, 1)
    with pytest.raises(RoundOver):
        opened.claim(FIRST, Node(0, 2))
    with pytest.raises(RoundOver):
        opened.wait_lanes(FIRST, deadline=soon())
    with pytest.raises(RoundOver):
        opened.wait_votes(FIRST, deadline=soon())


def test_parts_of_a_step_wait_for_their_own_pages(make):
    opened = make(layout_of(parts=(("p1",), ("p0",))))
    part = Round(0, 0, 0)
    opened.vote(part, [2], [3.0])
    assert opened.wait_votes(part, deadline=soon()) == [3.0]
    opened.state.begin(1, deadline=soon())
    with pytest.raises(TimedOut):
        opened.state.wait_done(part, deadline=time.monotonic())
    opened.state.mark_done(1, [2])
    opened.state.wait_done(part, deadline=soon())
    assert opened.is_over(part)
    assert not opened.is_over(Round(0, 0, 1))


def test_what_others_wrote_is_read_after_a_fence_behind_their_done_words(make, monkeypatch):
    opened = make(layout_of(parts=(("p1",), ("p0",))))
    opened.state.begin(1, deadline=soon())
    fence, fences = opened._progress.fence, []
    monkeypatch.setattr(opened._progress, "fence", lambda: fences.append(fence()))
    assert not opened.is_over(FIRST)
    assert fences == []
    opened.state.mark_done(1, [2])
    opened.state.wait_done(FIRST, deadline=soon())
    assert len(fences) == 1


def test_weights_are_open_when_every_page_is_refreshed(make):
    opened = make()
    opened.state.mark_refreshed(0, [0, 2])
    with pytest.raises(TimedOut, match="pages 1 are not refreshed"):
        opened.state.wait_refreshed(0, deadline=time.monotonic())
    opened.state.mark_refreshed(0, [1])
    opened.state.wait_refreshed(0, deadline=soon())


def test_bad_calls_are_refused(make):
    opened = make(enter=False)
    with pytest.raises(ConfigError, match="in no generation"):
        opened.claim(FIRST, Node(0, 2))
    with pytest.raises(ConfigError, match="within most_ranks"):
        opened.enter(0, 0, {0: -1, 7: -1}, deadline=soon())
    with pytest.raises(TimedOut, match=r"ranks \[1\] have not entered generation 0"):
        opened.enter(0, 0, {0: -1, 1: -1}, deadline=time.monotonic())
    with pytest.raises(ConfigError, match="no node"):
        opened.claim(FIRST, Node(1, 2))
    with pytest.raises(ConfigError, match="page 3 of 3"):
        opened.state.mark_done(1, [3])
    full = make(layout_of(lanes=8, ranks=1, num_slots=4))
    for lane in (0, 2, 4, 6):
        publish(full, FIRST, Node(lane, 1))
    with pytest.raises(NoRoom, match="all 4 hold blocks"):
        full.claim(FIRST, Node(1, 1))


def test_nothing_is_left_after_closing():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    opened = exchange.open("unit-left", layout_of(), scope="process")
    opened.close()
    # The mapping lives as long as a view of it, and keeps a descriptor.
    del opened
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(ArenaGone, match="unit-left"):
        arenas.open("unit-left")


# --- conformance: the model's transitions are the real code's accesses, in this order ---------------


def recorded(opened, monkeypatch):
    """What the exchange does to its shared words from here on."""
    places, layout, memory = opened.layout.places, opened.layout, opened._memory
    log = []
    words = {0: "seal", 8: "claim"}

    def name_of(offset):
        if places.headers <= offset < places.slots:
            return words[(offset - places.headers) % places.header_bytes]
        regions = ("state", "entered", "pins", "done", "refreshed", "vote_rounds", "vote_values")
        starts = [(getattr(places, region), region) for region in regions]
        return max((s for s in starts if s[0] <= offset), default=(0, "progress"))[1]

    store, store_all, swap = memory.store, memory.store_all, memory.swap
    views = {id(opened._vote_values): "vote_values", id(opened._votes): "vote_rounds"}

    def logged_store(offset, value):
        log.append((name_of(offset), "0" if value == 0 else "set"))
        store(offset, value)

    def logged_store_all(view, indices, values):
        log.append((views[id(view)], "set"))
        store_all(view, indices, values)

    def logged_swap(offset, expected, desired):
        if offset != places.progress:
            log.append((name_of(offset), "0" if desired == 0 else "swap"))
        return swap(offset, expected, desired)

    monkeypatch.setattr(memory, "store", logged_store)
    monkeypatch.setattr(memory, "store_all", logged_store_all)
    monkeypatch.setattr(memory, "swap", logged_swap)
    assert layout is opened.layout
    return log


def test_the_real_accesses_come_in_the_order_of_the_model(make, monkeypatch):
    opened = make(layout_of(lanes=2, ranks=1, sizes=(8,)))
    log = recorded(opened, monkeypatch)
    claim = opened.claim(FIRST, Node(0, 2))
    assert log == [("claim", "swap"), ("seal", "0")]
    claim.flat.fill_(1.0)
    opened.publish(claim)
    assert log[2:] == [("seal", "set"), ("claim", "0")]
    del log[:]
    _, partials, _ = sums(opened, FIRST)
    assert log == []
    opened.vote(FIRST, [0], partials)
    assert log == [("vote_values", "set"), ("vote_rounds", "set")]
    del log[:]
    commit(opened, 1)
    assert log == [("state", "swap"), ("done", "set"), ("state", "swap")]
    del log[:]
    opened.state.mark_refreshed(1, [0])
    opened.state.pin()
    assert log == [("refreshed", "set"), ("pins", "swap"), ("state", "swap")]
    del log[:]
    opened.state.unpin(1)
    opened.state.pin()
    opened.state.sweep(0)
    assert log == [("pins", "swap"), ("pins", "swap"), ("state", "swap"), ("pins", "swap")]


def test_a_merge_clears_the_block_it_changes_first_and_frees_the_other_last(make, monkeypatch):
    opened = make(layout_of(lanes=6, ranks=1, sizes=(8,), num_slots=3))
    blocks = opened.layout.blocks(0, 6)
    publish(opened, FIRST, Node(0, 1))
    publish(opened, FIRST, Node(1, 1))
    publish(opened, FIRST, blocks[1])
    log = recorded(opened, monkeypatch)
    assert opened.claim(FIRST, blocks[2]) is not None
    merge = [
        ("claim", "swap"),
        ("claim", "swap"),
        ("seal", "0"),
        ("seal", "set"),
        ("claim", "0"),
        ("seal", "0"),
        ("claim", "0"),
    ]
    assert log == [*merge, ("claim", "swap"), ("seal", "0")]


def test_pages_of_doubles_are_added_in_double_also_when_slots_are_merged(make):
    parameters = (
        Parameter(name="single", numel=70_000),
        Parameter(name="double", numel=40_000, is_double=True),
        Parameter(name="last", numel=3),
    )
    layout = Layout(num_lanes=5, most_ranks=1, parameters=parameters, num_slots=3)
    opened = make(layout)
    made = torch.Generator().manual_seed(1)
    lanes = {
        p.name: torch.randn(5, p.numel, generator=made, dtype=torch.float64) for p in parameters
    }
    for lane in range(5):
        claim = opened.claim(FIRST, Node(lane, 1))
        claim.zero()
        for name, values in lanes.items():
            claim.gradient(name).copy_(values[lane])
        opened.publish(claim)
    gathered = opened.wait_lanes(FIRST, deadline=soon())
    assert len(gathered.blocks) < 5, "siblings were added into one slot"
    out = torch.zeros(layout.num_elements)
    pages = list(range(layout.num_pages))
    partials = opened.reduce(gathered, pages[::-1], out)[::-1]
    for name, values in lanes.items():
        kind = torch.float64 if name == "double" else torch.float32
        a, b, c, d, e = values.to(kind)
        found = values_of(out, layout, name)
        assert found.dtype == kind
        assert torch.equal(found, ((a + b) + (c + d)) + e)
        squares = sum(partials[page] for page in layout.pages_of(name))
        assert squares == pytest.approx(float(found.double().square().sum()), rel=1e-12)
