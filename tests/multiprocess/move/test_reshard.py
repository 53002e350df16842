"""Resharding between real processes: DTensors on different meshes, memory of every kind, refusals, deaths."""

import importlib
import os
import select
import signal
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed import fake_pg  # noqa: E402, F401

from argosy.errors import (  # noqa: E402
    ArgosyError,
    ConfigError,
    MismatchError,
    PeerLost,
    TimedOut,
)
from argosy.move import arenas, bundles, commits, groups, placements, reshard  # noqa: E402
from argosy.move.meetings import ENTERED  # noqa: E402
from argosy.move.placements import Pieces  # noqa: E402

pytestmark = pytest.mark.multiprocess
SECONDS = 60.0


@pytest.fixture
def ranks(forked):
    """Run `body(rank)` in forks that form a group; what each returned or raised, or how it ended."""

    # Resharding needs a group's store alone: a backend without connections starts at once.
    def run(size, body, name="job", backend="fake"):
        def join(rank, directory):
            torch.set_num_threads(1)
            store = dist.FileStore(str(directory / "store"), size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)

        return forked(size, lambda rank, _: body(rank), join, name)

    return run


def values(shape, dtype=torch.float32):
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.float32) + 1).reshape(shape).to(dtype)


def sharded(full, mesh, cuts):
    """A DTensor made without communication; on ranks outside the mesh None."""
    if mesh.get_coordinate() is None:
        return None
    local = full
    for axis, cut in enumerate(cuts):
        if isinstance(cut, (Shard, _StridedShard)):
            pieces, _ = cut._split_tensor(local, mesh.size(axis), with_padding=False)
            local = pieces[mesh.get_coordinate()[axis]]
    return DTensor.from_local(
        local.contiguous().clone(),
        mesh,
        cuts,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def state(full, mesh, cuts, name="w"):
    found = sharded(full, mesh, cuts)
    return {} if found is None else {name: found}


def mesh_of(ranks):
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)


LAYOUTS = [
    ([0, 1], [Shard(0)], [0, 1], [Shard(1)]),
    ([0, 1], [Shard(0)], [0, 1, 2], [Shard(0)]),
    ([0, 1, 2, 3], [Shard(0)], [2, 3], [Shard(1)]),
    ([[0, 1], [2, 3]], [Replicate(), Shard(0)], [0, 1, 2, 3], [Shard(1)]),
    ([[0, 1], [2, 3]], [_StridedShard(0, split_factor=2), Shard(0)], [0, 1], [Shard(1)]),
    ([[0, 1], [2, 3]], [Shard(0), Shard(1)], [[3, 2], [1, 0]], [Shard(1), Shard(0)]),
    ([0, 1, 2, 3], [Shard(1)], [[0, 1], [2, 3]], [_StridedShard(0, split_factor=2), Shard(0)]),
    ([0, 1, 2, 3], [Shard(0)], [1], [Replicate()]),
]
SHAPES = [(8, 6), (7, 5), (3, 4, 2), (2, 9)]


def every_layout(rank):
    checked = 0
    for shape in SHAPES:
        for old, old_cuts, new, new_cuts in LAYOUTS:
            full = values(shape)
            source = state(full, mesh_of(old), old_cuts)
            destination = state(torch.zeros(shape), mesh_of(new), new_cuts)
            wanted = state(full, mesh_of(new), new_cuts)
            found = reshard.reshard(source, destination, timeout=SECONDS)
            assert found.bytes == found.lower_bound
            for name, tensor in destination.items():
                assert torch.equal(tensor.to_local(), wanted[name].to_local()), (shape, old, new)
                checked += 1
            if source and destination:
                spec = placements.spec_of("w", source["w"])
                local = placements.describe("w", source["w"], is_destination=False)
                mine = next(owner for owner in spec.owners if owner.rank == rank)
                assert mine.held == local.held
    return checked


@pytest.mark.parametrize("backend", ["fake", groups.NAME])
def test_dtensors_move_between_all_meshes_and_placements(ranks, backend):
    results = ranks(4, every_layout, backend=backend)
    assert [one.get("leaked") for one in results] == [0, 0, 0, 0], results
    assert sum(one["result"] for one in results) == len(SHAPES) * sum(
        torch.tensor(new).numel() for _, _, new, _ in LAYOUTS
    )


def memory_of_every_kind(rank):
    """Arena, private memory, casts, wire dtypes, pieces, strided memory, scalars; all in one transfer, run twice."""
    full = values((64, 48))
    arena = arenas.create("weights", 1 << 20)
    in_arena = arena.empty((32, 48), name="w")
    outside = torch.empty((32, 48))
    columns = torch.empty((48, 32)).t()
    mine = full[rank * 32 : rank * 32 + 32]
    mesh = mesh_of([0, 1])

    def dtensor(local, cut):
        return DTensor.from_local(local, mesh, [cut], run_check=False)

    source = {
        "arena": dtensor(in_arena, Shard(0)),
        "outside": dtensor(outside, Shard(0)),
        "columns": dtensor(columns, Shard(0)),
        "cast": dtensor(in_arena.clone(), Shard(0)),
        "widened": dtensor(outside.to(torch.bfloat16), Shard(0)),
        "wire": dtensor(outside.clone(), Shard(0)),
        "pages": Pieces((64, 48), [((rank * 32 + n * 8, 0), torch.empty(8, 48)) for n in range(4)]),
        "step": torch.tensor(0, dtype=torch.int64),
    }
    targets = {
        name: dtensor(torch.empty(64, 24), Shard(1)) for name in source if name != "step"
    } | {"step": torch.tensor(-1, dtype=torch.int64)}
    targets["cast"] = dtensor(torch.empty(64, 24, dtype=torch.bfloat16), Shard(1))
    targets["columns"] = dtensor(torch.empty(24, 64).t(), Shard(1))
    wire = {"wire": torch.bfloat16}
    with reshard.prepare(source, targets, wire=wire, timeout=SECONDS) as prepared:
        for turn in (1, 2):
            now = mine * 1.001 * turn
            for name in ("arena", "outside", "columns", "cast", "widened", "wire"):
                source[name].to_local().copy_(now)
            for n, (_, piece) in enumerate(source["pages"].parts):
                piece.copy_(now[n * 8 : n * 8 + 8])
            source["step"].fill_(turn)
            prepared.run()
            exact = (full * 1.001 * turn)[:, rank * 24 : rank * 24 + 24]
            rounded = exact.to(torch.bfloat16)
            for name in ("arena", "outside", "columns", "pages"):
                assert torch.equal(targets[name].to_local(), exact), name
            assert torch.equal(targets["cast"].to_local(), rounded)
            assert torch.equal(targets["widened"].to_local(), rounded.float())
            assert torch.equal(targets["wire"].to_local(), rounded.float())
            assert targets["step"].item() == turn
        found = prepared.statistics()
        share = prepared.plan.lower_bound // 2
        assert found["moved_bytes"] == 2 * share
        kinds = {name: found[name] for name in ("num_mapped", "num_private", "num_staged")}
    del in_arena, source, targets
    arena.close()
    return kinds


def test_sources_in_arenas_are_mapped_and_others_are_read_or_staged(ranks):
    kinds = [one.get("result", one) for one in ranks(2, memory_of_every_kind)]
    for kind in kinds:
        # the rank's own tensors and the peer's in its arena are mapped, the peer's others are read through the kernel
        assert kind["num_mapped"] == 11 + 1
        assert kind["num_private"] == 5 + 4
        assert kind["num_staged"] == 0


def without_reading(rank):
    reshard.read_process_bytes = lambda *_: None
    return memory_of_every_kind(rank)


def test_where_the_kernel_forbids_reading_the_source_is_staged_once(ranks):
    kinds = [one.get("result", one) for one in ranks(2, without_reading)]
    for kind in kinds:
        assert kind["num_private"] == 0
        assert kind["num_staged"] > 0


# -- refusals: on every rank, before anything is written -------------------------------------------


def refusals(rank):
    """Each bad input in turn; what each raised, with the destination as it was."""
    mesh = mesh_of([0, 1])
    good = state(values((8, 4)), mesh, [Shard(0)])
    meta = DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()], run_check=False)
    bad = {
        "shape": (state(values((8, 5)), mesh, [Shard(0)]), {}),
        "one rank differs": (
            good if rank else state(values((8, 4)), mesh, [Shard(1)]),
            {},
        ),
        "not covered": ({} if rank else good, {}),
        "partial": ({"w": meta}, {}),
        "sparse on one rank": (good if rank else {"w": torch.eye(8).to_sparse()}, {}),
        "no tensor": ({"w": 3}, {}),
        "wire differs": (good, {"wire": {"w": torch.bfloat16 if rank else torch.float16}}),
        "dtype": ({"w": good["w"].to(torch.int64)}, {}),
        "expanded destination": (good, {"destination": {"w": torch.zeros(1, 1).expand(8, 4)}}),
        "shared memory": (good, {"destination": {"w": good["w"].to_local().view(2, 8)}}),
        "name": ({"v": good["w"]}, {}),
        "key that is no text": (good if rank else good | {0: torch.zeros(1)}, {}),
    }
    raised = {}
    for name, (source, more) in bad.items():
        destination = more.pop("destination", None) or state(
            torch.full((8, 4), -1.0), mesh, [Shard(1)]
        )
        before = [tensor.clone() for tensor in placements.buffers(destination["w"])]
        try:
            reshard.reshard(source, destination, timeout=SECONDS, **more)
        except ArgosyError as error:
            raised[name] = [type(error).__name__, error.what, bool(error.fix)]
        after = placements.buffers(destination["w"])
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), name
    return raised


def test_bad_input_is_refused_on_every_rank_and_leaves_the_destination_untouched(ranks):
    first, second = (one.get("result", one) for one in ranks(2, refusals))
    wanted = {
        "shape": ("MismatchError", "has shape (8, 5)"),
        "one rank differs": ("MismatchError", "rank 0 has layout"),
        "not covered": ("NotCovered", "w: no source process holds the part [4:8, 0:2]"),
        "partial": ("ConfigError", "placement"),
        "sparse on one rank": ("ConfigError", "sparse_coo"),
        "no tensor": ("ConfigError", "w is a int"),
        "wire differs": ("MismatchError", "wire dtypes"),
        "dtype": ("MismatchError", "no cast leads from int64 to float32"),
        "expanded destination": ("ConfigError", "share memory"),
        "shared memory": ("MismatchError", "shape"),
        "name": ("MismatchError", "no tensor 'w'"),
        "key that is no text": ("ConfigError", "the source has 0 for a name"),
    }
    for raised in (first, second):
        assert raised.keys() == wanted.keys(), raised
        for name, (kind, words) in wanted.items():
            assert raised[name][0] == kind, (name, raised[name])
            assert words in raised[name][1], (name, raised[name])
            assert raised[name][2], name
    assert "rank 0 refuses" in second["sparse on one rank"][1]


# -- bundles ---------------------------------------------------------------------------------------


def bundle_of(rank, arena, turn):
    """Source: rows in private memory. Destination: columns in slots of an arena."""
    mesh = mesh_of([0, 1])
    full = values((8, 6)) * turn

    def members(cut):
        return {
            "parameter": sharded(full.to(torch.bfloat16), mesh, [cut]),
            "master": sharded(full, mesh, [cut]),
            "exp_avg": sharded(full + 0.5, mesh, [cut]),
        }

    source = {"w": bundles.Bundle("w", members(Shard(0)), {"step": turn})}
    return source, {"w": bundles.Bundle("w", members(Shard(1)), {"step": 0})}


def check_bundle(rank, snapshot, turn):
    version, found = snapshot
    part = (values((8, 6)) * turn).chunk(2, 1)[rank]
    assert torch.equal(found.tensors["master"], part), version
    assert torch.equal(found.tensors["parameter"], part.to(torch.bfloat16))
    assert torch.equal(found.tensors["exp_avg"], part + 0.5)


def a_death_in_the_middle(rank):
    with arenas.create("bundles", 1 << 20) as arena:
        source, destination = bundle_of(rank, arena, 1)
        committed = commits.Committed(arena, destination)
        transfer = commits.BundleTransfer(source, committed, timeout=SECONDS)
        sent = sorted(bundles.flatten(source))
        assert transfer.run() == 1
        check_bundle(rank, committed.snapshot("w"), 1)
        for name in ("master", "exp_avg"):
            source["w"].tensors[name].to_local().mul_(0).add_(7)
        if rank == 1:
            plain = reshard.copy_mapped, reshard.copy_from_process

            def die_after_one(*arguments, **more):
                plain[1](*arguments, **more)
                os.kill(os.getpid(), signal.SIGKILL)

            reshard.copy_from_process = die_after_one
        with pytest.raises(PeerLost) as caught:
            transfer.run()
        assert caught.value.rank == 1
        version, found = committed.snapshot("w")
        check_bundle(rank, (version, found), 1)
        transfer.close()
        return [version, found.scalars["step"], sent]


def test_a_bundle_is_the_old_one_when_a_rank_dies_in_the_middle_of_the_new_one(ranks):
    first, second = ranks(2, a_death_in_the_middle)
    assert first.get("result") == [1, 1.0, ["w//exp_avg", "w//master"]], first
    assert second == {"status": signal.SIGKILL}


def from_a_trainer_to_a_server(rank):
    """Rank 0 trains, rank 1 has the destination: neither holds what the other has."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    train()
    found = bundles.discover(model, optimizer)
    with arenas.create("server", 1 << 20) as arena:
        committed = commits.Committed(arena, found if rank == 1 else {})
        before = dict(committed.snapshot("weight")[1].scalars) if rank == 1 else None
        seen = []
        for _ in range(2):
            with commits.BundleTransfer(
                found if rank == 0 else {}, committed, timeout=SECONDS
            ) as transfer:
                assert transfer.plan.bytes == transfer.plan.lower_bound > 0
                assert "weight//exp_avg" in transfer.plan.explain()
                for _ in range(2):
                    if rank == 0:
                        train()
                    version = transfer.run()
                    if rank == 1:
                        seen.append([version, committed.snapshot("bias")[1].scalars["step"]])
                assert transfer.statistics()["num_runs"] == 2
        return [before, seen]


def refused_by_one_rank(rank):
    """The destination's optimizer on rank 1 has not stepped."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    source = bundles.discover(model)
    if rank == 1:
        optimizer.step()
    with arenas.create("server", 1 << 20) as arena:
        committed = commits.Committed(arena, bundles.discover(model, optimizer))
        commits.BundleTransfer(source, committed, timeout=SECONDS)


@pytest.mark.parametrize("backend", ["fake", groups.NAME])
def test_bundles_go_from_one_rank_to_another_with_the_step_of_that_moment(ranks, backend):
    first, second = ranks(2, from_a_trainer_to_a_server, backend=backend)
    assert first["result"] == [None, []], first
    steps = [[1, 2.0], [2, 3.0], [3, 4.0], [4, 5.0]]
    assert second["result"] == [{"step": 1.0}, steps], second


def one_runs_what_it_has_closed(rank):
    """The slip of one rank is refused there, and the group goes on."""
    source, destination = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    prepared = reshard.prepare(source if rank else {}, {} if rank else destination, timeout=SECONDS)
    prepared.run()
    prepared.close()
    if rank == 0:
        for call in (prepared.run, prepared.agree_all_done):
            with pytest.raises(ConfigError, match="is closed"):
                call()
    reshard.reshard(source if rank else {}, {} if rank else destination, timeout=SECONDS)
    return destination["w"].sum().item()


def test_a_transfer_that_is_run_after_its_end_is_refused_and_the_group_goes_on(ranks):
    assert [one.get("result", one) for one in ranks(2, one_runs_what_it_has_closed)] == [4, 0]


def after_a_missed_flip(rank):
    with arenas.create("behind", 1 << 20) as arena:
        source, destination = bundle_of(rank, arena, 1)
        committed = commits.Committed(arena, destination)
        with commits.BundleTransfer(source, committed, timeout=SECONDS) as transfer:
            transfer.run()
        if rank == 0:
            committed.commit(2)
        with commits.BundleTransfer(source, committed, timeout=SECONDS) as transfer:
            behind = committed.version("w")
            return [behind, transfer.run(), committed.version("w")]


def test_ranks_of_which_one_missed_its_flip_go_on_with_one_version(ranks):
    first, second = ranks(2, after_a_missed_flip)
    assert first["result"] == second["result"] == [2, 3, 3]


def test_bundles_that_one_rank_refuses_are_refused_on_all(ranks):
    first, second = ranks(2, refused_by_one_rank)
    assert first["error"] == "ConfigError", first
    assert "rank 1 refuses the transfer: weight: the source sends parameter" in first["text"]
    assert second["error"] == "MismatchError", second


def one_comes_too_late(rank):
    """Rank 1 runs when rank 0 has given up: it must not wait for it, and nobody may go on in this group."""
    source, destination = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    prepared = reshard.prepare(source if rank else {}, {} if rank else destination, timeout=SECONDS)
    store = dist.group.WORLD.get_group_store()
    said = []
    if rank == 0:
        with pytest.raises(TimedOut):
            prepared.run(timeout=0.05)
        store.set("late", "1")
    else:
        store.wait(["late"])
    for attempt in (prepared.run, prepared.agree_all_done, lambda: reshard.prepare({}, {})):
        try:
            attempt()
        except ArgosyError as failure:
            said.append([type(failure).__name__, str(failure)])
    prepared.close()
    return said


def test_after_a_one_sided_timeout_the_group_is_refused_on_all_ranks(ranks):
    for rank, one in enumerate(ranks(2, one_comes_too_late)):
        kinds, texts = zip(*one["result"], strict=True)
        assert kinds == ("ConfigError",) * 3, (rank, one)
        for text in texts:
            assert "rank 0 has left a transfer: the deadline has passed" in text
            assert "make a new group" in text
        assert one["leaked"] == 0


def one_never_prepares(rank):
    if rank == 0:
        with pytest.raises(TimedOut):
            reshard.prepare({}, {}, timeout=0.05)
        dist.group.WORLD.get_group_store().set("late", "1")
    else:
        dist.group.WORLD.get_group_store().wait(["late"])
    reshard.prepare({}, {}, timeout=SECONDS)


def test_a_preparation_that_one_rank_has_left_is_over_for_all(ranks):
    for one in ranks(2, one_never_prepares):
        assert one["error"] == "ConfigError", one
        assert "rank 0 has left a transfer" in one["text"]


def of_two_versions(rank):
    if rank == 1:
        reshard._VERSION = 7
    reshard.prepare({"w": torch.ones(4)}, {}, timeout=SECONDS)


def test_ranks_of_two_versions_are_refused_with_both_versions(ranks):
    first, second = ranks(2, of_two_versions)
    assert first["error"] == second["error"] == "ProtocolError", (first, second)
    assert "rank 1 speaks version 7 of resharding, rank 0 version 1" in first["text"]
    assert "rank 0 speaks version 1 of resharding, rank 1 version 7" in second["text"]


def with_a_replaced_reader(rank):
    """The process that takes over sees the committed version; its first transfer goes into the other slot."""
    with arenas.create("kept", 1 << 20) as arena:
        source, destination = bundle_of(rank, arena, 1)
        committed = commits.Committed(arena, destination)
        with commits.BundleTransfer(source, committed, timeout=SECONDS) as transfer:
            transfer.run()
        with pytest.raises(ConfigError, match=r"Committed\.reopen"):
            commits.Committed(arena, destination)
        other = {"w": bundles.Bundle("w", {"parameter": torch.zeros(3)}, {"step": 0})}
        with pytest.raises(MismatchError, match="reopen with the bundles"):
            commits.Committed.reopen(arena, other)
        _, unlike = bundle_of(rank, arena, 5)
        again = commits.Committed.reopen(arenas.attach(os.dup(arena.fileno())), unlike)
        check_bundle(rank, again.snapshot("w"), 1)
        for name in ("master", "exp_avg"):
            source["w"].tensors[name].to_local().mul_(2).sub_(0.5 * (name == "exp_avg"))
        source["w"].scalars["step"] = 2
        with commits.BundleTransfer(source, again, timeout=SECONDS) as transfer:
            transfer.run()
        check_bundle(rank, committed.snapshot("w"), 2)
        return [again.version("w"), committed.snapshot("w")[1].scalars["step"]]


def test_a_replacement_takes_committed_bundles_over(ranks):
    assert [one.get("result", one) for one in ranks(2, with_a_replaced_reader)] == [[2, 2.0]] * 2


def a_number_that_is_anothers(rank):
    """The source ends while it is read; the kernel would go on with whoever has its number."""
    source, destination = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    prepared = reshard.prepare(source if rank else {}, {} if rank else destination, timeout=SECONDS)
    if rank == 1:
        prepared._meeting.post(ENTERED, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    meeting, strange = prepared._meeting, torch.full((4,), 9.0)
    meeting.wait(ENTERED, 1, 1, time.monotonic() + SECONDS)
    select.select([meeting._locality.pidfds[1]], [], [], SECONDS)
    # As if the number had been given to a process with something else at that place: here to this one.
    (key,) = prepared._memories
    prepared._memories[key] = reshard._Private(os.getpid(), strange.data_ptr())
    prepared.run()


def test_what_is_read_from_a_stranger_with_the_number_of_a_dead_source_is_an_error(ranks):
    first, second = ranks(2, a_number_that_is_anothers)
    assert first.get("error") == "PeerLost", first
    assert second == {"status": signal.SIGKILL}


def test_private_names_of_torch_are_where_they_are_expected():
    for name in placements.PRIVATE_TORCH:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        assert found(0, split_factor=3).split_factor == 3
        assert found(1, split_factor=3).dim == 1
