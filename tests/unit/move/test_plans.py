import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.errors import ConfigError, MismatchError
from argosy.move.boxes import Box, Cut, Held, Owner, TensorSpec, row_major, sharded, whole
from argosy.move.overlaps import SHARED, NotCovered
from argosy.move.plans import Copy, coalesce, key, plan

COLUMNS = (Cut(1),)
ROWS = (Cut(0),)


def tensor(cuts, *, mesh, name="w", shape=(8, 8), dtype="float32", ranks=None, hosts=None):
    return sharded(name, shape, dtype, mesh=mesh, ranks=ranks, cuts=cuts, hosts=hosts)


# -- execution on arrays: the memory of every process is a flat array ----------------------------


def local_size(held):
    return max(
        (
            h.start + sum((n - 1) * s for n, s in zip(h.box.sizes, h.strides, strict=True)) + 1
            for h in held
        ),
        default=0,
    )


def view(memory, start, sizes, strides):
    steps = [s * memory.itemsize for s in strides]
    return numpy.lib.stride_tricks.as_strided(memory[start:], sizes, steps)


def part(array, box):
    return array[tuple(slice(b, e) for b, e in zip(box.offsets, box.stops, strict=True))]


def execute(found, source, destination):
    """Run a plan for one tensor; give destination memories and how often each element was written."""
    array = numpy.arange(1, 1 + math.prod(source.shape)).reshape(source.shape)
    sources = {o.rank: numpy.zeros(local_size(o.held), int) for o in source.owners}
    for owner in source.owners:
        for held in owner.held:
            view(sources[owner.rank], held.start, held.box.sizes, held.strides)[...] = part(
                array, held.box
            )
    memories = {o.rank: numpy.zeros(local_size(o.held), int) for o in destination.owners}
    writes = {rank: numpy.zeros_like(memory) for rank, memory in memories.items()}
    for is_shared in (False, True):  # what is shared is copied after it was fetched
        for rank, memory in memories.items():
            for copy in found.for_rank(rank).copies:
                if (copy.how == SHARED) != is_shared:
                    continue
                giver = memories if is_shared else sources
                into = view(memory, copy.start, copy.sizes, copy.strides)
                into[...] = view(
                    giver[copy.source_rank], copy.source_start, copy.sizes, copy.source_strides
                )
                view(writes[rank], copy.start, copy.sizes, copy.strides)[...] += 1
    return array, memories, writes


def check_execution(found, source, destination):
    array, memories, writes = execute(found, source, destination)
    for owner in destination.owners:
        for held in owner.held:
            got = view(memories[owner.rank], held.start, held.box.sizes, held.strides)
            assert got.tolist() == part(array, held.box).tolist()
            times = view(writes[owner.rank], held.start, held.box.sizes, held.strides)
            assert (times == 1).all()
        inside = sum(h.box.volume for h in owner.held)
        assert writes[owner.rank].sum() == inside


@st.composite
def layouts(draw, shape, hosts):
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    cuts = tuple(
        Cut(draw(st.sampled_from([None, *range(len(shape))])), draw(st.integers(1, 3)))
        for _ in mesh
    )
    count = math.prod(mesh)
    ranks = draw(st.permutations(range(len(hosts))))[:count]
    return sharded("w", shape, "int64", mesh=mesh, ranks=ranks, cuts=cuts, hosts=hosts)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_executing_a_plan_gives_the_tensor_in_its_new_layout_at_the_lower_bound(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    hosts = [data.draw(st.sampled_from("abc")) for _ in range(27)]
    source = data.draw(layouts(shape, hosts))
    destination = data.draw(layouts(shape, hosts))
    found = plan([source], [destination])
    check_execution(found, source, destination)
    held = {o.rank: o.held for o in source.owners}
    resident = sum(
        numpy.logical_and(elements(shape, o.held), elements(shape, held.get(o.rank, ()))).sum()
        for o in destination.owners
    )
    wanted = sum(h.box.volume for o in destination.owners for h in o.held)
    assert found.bytes == found.lower_bound == 8 * (wanted - resident)


def elements(shape, held):
    found = numpy.zeros(shape, bool)
    for one in held:
        part(found, one.box)[...] = True
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_sources_that_overlap_without_being_equal_give_every_element_once(data):
    size = data.draw(st.integers(1, 12))
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, size)), max_size=5)
    )
    boxes = [Box((b,), (min(n, size - b),)) for b, n in spans]
    owners = [Owner(n, "a", (Held(box, 0, (1,)),)) for n, box in enumerate(boxes)]
    source = TensorSpec(name="w", shape=(size,), dtype="int64", owners=tuple(owners))
    destination = TensorSpec(
        name="w", shape=(size,), dtype="int64", owners=(Owner(2, "a", whole((size,))),)
    )
    covered = elements((size,), [h for o in owners for h in o.held])
    if covered.all():
        found = plan([source], [destination])
        check_execution(found, source, destination)
        own = boxes[2].volume if len(boxes) > 2 else 0
        assert found.bytes == found.lower_bound == 8 * (size - own)
    else:
        with pytest.raises(NotCovered) as caught:
            plan([source], [destination])
        assert caught.value.tensor == "w"
        assert caught.value.box.offsets == (int(numpy.argmin(covered)),)


# -- choice ---------------------------------------------------------------------------------------


def test_what_a_process_has_already_does_not_move():
    rows = tensor(ROWS, mesh=(2,))
    found = plan([rows], [rows])
    assert (found.bytes, found.lower_bound) == (0, 0)
    assert {c.how for r in (0, 1) for c in found.for_rank(r).copies} == {"resident"}


def test_a_source_of_the_same_host_is_preferred_and_the_load_is_spread():
    hosts = ["a", "a", "b", "b", "a", "b"]
    source = tensor((Cut(None),), mesh=(4,), hosts=hosts)
    destination = tensor(ROWS, mesh=(2,), ranks=(4, 5), hosts=hosts)
    states = [f"w{n}" for n in range(4)]
    found = plan(
        [tensor((Cut(None),), mesh=(4,), name=n, hosts=hosts) for n in states],
        [tensor(ROWS, mesh=(2,), ranks=(4, 5), name=n, hosts=hosts) for n in states],
    )
    assert found.for_rank(4).reads_from == (0, 1)
    assert found.for_rank(5).reads_from == (2, 3)
    assert found.bytes_between_hosts == 0
    volumes = [
        sum(c.volume for c in found.for_rank(4).copies if c.source_rank == r) for r in (0, 1)
    ]
    assert volumes[0] == volumes[1]
    assert plan([source], [destination]).for_rank(0).read_by == (4,)


def test_replicas_on_one_host_fetch_once_from_another_host_and_share():
    hosts = ["a", "b", "b", "b"]
    source = tensor((), mesh=(), ranks=(0,), hosts=hosts)
    destination = tensor((Cut(None),), mesh=(3,), ranks=(1, 2, 3), hosts=hosts)
    found = plan([source], [destination])
    assert found.bytes == found.lower_bound == 3 * 8 * 8 * 4
    assert found.bytes_between_hosts == 8 * 8 * 4
    check_execution(found, source, destination)
    ways = sorted(c.how for r in (1, 2, 3) for c in found.for_rank(r).copies)
    assert ways == ["remote", "shared", "shared"]


def test_fetching_for_a_host_goes_round_its_replicas():
    hosts = ["a", "b", "b"]
    names = ["w0", "w1"]
    found = plan(
        [tensor((), mesh=(), ranks=(0,), name=n, hosts=hosts) for n in names],
        [tensor((Cut(None),), mesh=(2,), ranks=(1, 2), name=n, hosts=hosts) for n in names],
    )
    fetchers = {c.tensor: r for r in (1, 2) for c in found.for_rank(r).copies if c.how == "remote"}
    assert fetchers == {"w0": 1, "w1": 2}


def test_plans_are_the_same_on_every_process_and_their_keys_follow_layout_and_membership():
    rows, columns = tensor(ROWS, mesh=(4,)), tensor(COLUMNS, mesh=(2,))
    first, second = plan([rows], [columns]), plan([rows], [columns])
    assert first.key == second.key == key([rows], [columns])
    assert [first.for_rank(r) for r in range(4)] == [second.for_rank(r) for r in range(4)]
    assert plan([rows], [columns], membership="generation 2").key != first.key
    assert plan([columns], [rows]).key != first.key
    elsewhere = tensor(ROWS, mesh=(4,), hosts=["a", "a", "b", "b"])
    assert plan([elsewhere], [columns]).key != first.key


def test_pages_that_follow_each_other_in_both_memories_become_one_copy():
    pages = tuple(Held(Box((n * 4,), (4,)), n * 4, (1,)) for n in range(8))
    source = TensorSpec(name="w", shape=(32,), dtype="float32", owners=(Owner(0, "a", pages),))
    destination = TensorSpec(
        name="w", shape=(32,), dtype="float32", owners=(Owner(1, "a", whole((32,))),)
    )
    (copy,) = plan([source], [destination]).for_rank(1).copies
    assert copy.sizes == (32,)
    check_execution(plan([source], [destination]), source, destination)


def test_copies_are_not_joined_when_one_memory_has_a_gap():
    near = Copy("w", (4,), 0, 0, 0, (1,), 0, 0, (1,))
    gap = Copy("w", (4,), 0, 0, 5, (1,), 0, 4, (1,))
    assert len(coalesce([near, gap])) == 2


# -- refusals -------------------------------------------------------------------------------------


def test_a_destination_that_the_source_does_not_cover_names_tensor_and_box():
    lower = TensorSpec(
        name="layers.0.wq",
        shape=(8, 4),
        dtype="float32",
        owners=(Owner(0, "a", (Held(Box((0, 0), (5, 4)), 0, row_major((5, 4))),)),),
    )
    with pytest.raises(NotCovered, match=r"layers\.0\.wq.*\[5:8, 0:4\]") as caught:
        plan([lower], [tensor(ROWS, mesh=(1,), name="layers.0.wq", shape=(8, 4))])
    assert caught.value.fix


@pytest.mark.parametrize(
    ("source", "destination", "words"),
    [
        ({"shape": (8, 8)}, {"shape": (8, 9)}, r"w: the source has shape \(8, 8\)"),
        ({"dtype": "float32"}, {"dtype": "int32"}, "no cast leads from float32 to int32"),
        ({"dtype": "int64"}, {"dtype": "int32"}, "no cast leads from int64 to int32"),
        ({"dtype": "int8"}, {"dtype": "uint64"}, "no cast leads from int8 to uint64"),
        ({"name": "a"}, {"name": "b"}, "the source has no tensor 'b'"),
    ],
)
def test_mismatched_tensors_are_refused_with_their_name(source, destination, words):
    with pytest.raises(MismatchError, match=words) as caught:
        plan([tensor(ROWS, mesh=(2,), **source)], [tensor(ROWS, mesh=(2,), **destination)])
    assert caught.value.fix


def test_a_name_given_twice_and_an_unknown_wire_are_refused():
    rows = tensor(ROWS, mesh=(2,))
    with pytest.raises(ConfigError, match="names w twice"):
        plan([rows, rows], [rows])
    with pytest.raises(ConfigError, match="'nothing', which is no tensor"):
        plan([rows], [rows], wire={"nothing": "bfloat16"})


def test_bytes_are_counted_in_the_wire_dtype():
    source = tensor(ROWS, mesh=(2,), dtype="float32")
    other = tensor(COLUMNS, mesh=(2,), dtype="float32")
    half = tensor(COLUMNS, mesh=(2,), dtype="bfloat16")
    full = plan([source], [other]).bytes
    assert full == 2 * 4 * 4 * 4
    assert plan([source], [half]).bytes == full // 2
    assert plan([half], [source]).bytes == full // 2
    assert plan([source], [other], wire={"w": "bfloat16"}).bytes == full // 2


def test_the_table_for_people_shows_every_tensor_and_the_bound():
    text = plan([tensor(ROWS, mesh=(2,))], [tensor(COLUMNS, mesh=(2,), dtype="bfloat16")]).explain()
    assert "float32→bfloat16" in text
    assert text.splitlines()[-1] == "64 B move, lower bound 64 B: 1.00"


# -- work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "mesh", "new_cuts", "new_mesh"),
    [
        (ROWS, (512,), ROWS, (384,)),
        ((Cut(0), Cut(1)), (16, 32), (Cut(0), Cut(1)), (32, 16)),
        ((Cut(None), Cut(0)), (16, 32), ROWS, (512,)),
        ((Cut(0, 8), Cut(0)), (64, 8), ROWS, (512,)),
    ],
)
def test_planning_looks_at_little_more_than_it_finds(cuts, mesh, new_cuts, new_mesh):
    shape = (12288, 3072)
    source = tensor(cuts, mesh=mesh, shape=shape)
    destination = tensor(new_cuts, mesh=new_mesh, shape=shape)
    found = plan([source], [destination])
    boxes = sum(len(o.held) for spec in (source, destination) for o in spec.owners)
    assert found.visited <= 4 * (boxes + found.tensors["w"].num_pieces)
    assert found.visited < 512 * 512 / 16


def test_tensors_of_one_layout_are_intersected_once():
    names = [f"layers.{n}" for n in range(100)]
    one = plan([tensor(ROWS, mesh=(64,), shape=(640,))], [tensor(ROWS, mesh=(48,), shape=(640,))])
    many = plan(
        [tensor(ROWS, mesh=(64,), shape=(640,), name=n) for n in names],
        [tensor(ROWS, mesh=(48,), shape=(640,), name=n) for n in names],
    )
    assert many.visited == one.visited
    assert many.bytes == 100 * one.bytes
