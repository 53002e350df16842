"""Pools: blocks come back when their storages die, are joined and used again."""

import os
import random

import pytest

torch = pytest.importorskip("torch")

from argosy.errors import ConfigError  # noqa: E402
from argosy.move import arenas  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def pool():
    with arenas.Pool(prefix="test", growth_bytes=MIB) as made:
        yield made


def test_a_block_is_used_again_when_its_last_view_has_died(pool):
    first = pool.empty((1000,), torch.float32).fill_(1)
    address, view = first.data_ptr(), first[5:].numpy()
    del first
    assert pool.empty((1000,)).data_ptr() != address
    del view
    assert pool.empty((1000,)).data_ptr() == address
    assert pool.statistics()["mappings"] == 1


def test_free_neighbours_are_joined(pool):
    blocks = [pool.empty((MIB // 4,), torch.uint8) for _ in range(4)]
    assert pool.statistics() | {"allocations": 0} == {
        "reserved": MIB, "in_use": MIB, "peak": MIB, "mappings": 1, "fragments": 0,
        "allocations": 0, "reuses": 0,
    }  # fmt: skip
    del blocks[2], blocks[0]
    assert pool.statistics()["fragments"] == 2
    blocks.clear()
    assert pool.statistics()["fragments"] == 1
    whole = pool.empty((MIB,), torch.uint8)
    assert pool.statistics()["mappings"] == 1
    assert pool.statistics()["reuses"] == 1
    del whole
    assert pool.statistics()["in_use"] == 0
    assert pool.trim() == MIB
    assert pool.statistics()["reserved"] == 0


def test_random_use_never_gives_bytes_twice(pool):
    chooser = random.Random(7)
    live = []
    for number in range(400):
        if live and chooser.random() < 0.45:
            tensor, mark = live.pop(chooser.randrange(len(live)))
            assert (tensor == mark).all()
            del tensor
        else:
            shape = (chooser.randrange(1, 60_000),)
            live.append((pool.empty(shape, torch.uint8).fill_(number % 251), number % 251))
    assert all((tensor == mark).all() for tensor, mark in live)
    in_use = pool.statistics()["in_use"]
    assert in_use == sum((tensor.numel() + 4095) // 4096 * 4096 for tensor, _ in live)
    live.clear()
    assert pool.statistics()["in_use"] == 0
    assert pool.statistics()["fragments"] == pool.statistics()["mappings"]


def test_a_peer_finds_a_block_by_mapping_and_offset(pool):
    tensor = pool.empty((3, 5), torch.int64, strides=(1, 3)).copy_(torch.arange(15).view(3, 5))
    name, offset = pool.locate(tensor)
    with arenas.open(name) as peer:
        found = peer.at(offset, (3, 5), torch.int64, (1, 3))
        assert torch.equal(found, tensor)
        del found
    assert pool.is_inside(tensor)
    assert not pool.is_inside(torch.zeros(1))
    with pytest.raises(ConfigError):
        pool.locate(torch.zeros(1))


def test_tensors_outlive_their_pool():
    pool = arenas.Pool(growth_bytes=MIB)
    tensor = pool.empty((100,)).fill_(2)
    pool.close()
    pool.close()
    del pool
    assert tensor.sum() == 200
    with pytest.raises(ConfigError):
        arenas.Pool(growth_bytes=0)


def test_a_forked_child_takes_nothing_from_its_parents_mappings(pool):
    kept = pool.empty((10,), torch.uint8).fill_(1)
    pid = os.fork()
    if pid == 0:
        own = pool.empty((10,), torch.uint8)
        own.fill_(9)
        mine = pool.statistics()["mappings"] == 1 and not kept.eq(9).any()
        os._exit(0 if mine else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.empty((10,), torch.uint8).sum() == 0
    assert kept.sum() == 10
