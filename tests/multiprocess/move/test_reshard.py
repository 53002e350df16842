"""Resharding between real processes: DTensors on different meshes, memory of every kind, refusals, deaths."""

import json
import os
import signal
import traceback
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from argosy.errors import ArgosyError, ConfigError  # noqa: E402
from argosy.move import arenas, placements, plans, regions, reshard  # noqa: E402
from argosy.move.placements import Pieces  # noqa: E402

pytestmark = pytest.mark.multiprocess
SECONDS = 60.0


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Run `body(rank)` in forks that form a Gloo group; what each returned or raised, or how it ended."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(size, body, name="job"):
        directory = tmp_path / name
        directory.mkdir()
        pids = [_fork(rank, size, body, directory) for rank in range(size)]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        results = []
        for rank, status in enumerate(statuses):
            path = directory / f"{rank}.json"
            results.append(json.loads(path.read_text()) if path.exists() else {"status": status})
        return results

    return run


def _fork(rank, size, body, directory):
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(directory / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
        )
        before = len(os.listdir("/proc/self/fd"))
        try:
            result = {"result": body(rank)}
        except ArgosyError as error:
            result = {"error": type(error).__name__, "text": str(error)}
        result["leaked"] = len(os.listdir("/proc/self/fd")) - before
        (directory / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


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


def test_dtensors_move_between_all_meshes_and_placements(ranks):
    results = ranks(4, every_layout)
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
    regions.read_process_bytes = None
    reshard.read_process_bytes = lambda *_: None
    kinds = memory_of_every_kind(rank)
    return kinds


def test_where_the_kernel_forbids_reading_the_source_is_staged_once(ranks):
    kinds = [one.get("result", one) for one in ranks(2, without_reading)]
    for kind in kinds:
        assert kind["num_private"] == 0
        assert kind["num_staged"] > 0
