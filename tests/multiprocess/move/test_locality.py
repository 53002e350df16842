"""Proof of locality between real processes: groups, subgroups, peers that die, lie, differ or live elsewhere."""

import ctypes
import os
import signal
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
from torch.distributed import FileStore, PrefixStore  # noqa: E402

from argosy.errors import PeerLost, ProtocolError, TimedOut  # noqa: E402
from argosy.move import arenas, cards, handover, locality  # noqa: E402

pytestmark = pytest.mark.multiprocess
SECONDS = 30.0


@pytest.fixture
def fork_ranks(forked):
    """Run `body(rank, store)` in forks; what each returned or raised, or how it ended."""

    def run(size, body):
        return forked(size, body, lambda _, directory: FileStore(str(directory / "store"), -1))

    return run


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def leave_network():
    """Into a network namespace of its own: what another host's sockets look like from here."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000) != 0:
        pytest.skip("network namespaces need privileges")


def test_one_that_nobody_closes_gives_its_descriptors_back(fork_ranks):
    def body(rank, store):
        found = locality.prove(store, rank, 2, timeout=SECONDS)
        assert found.watched()[1 - rank] >= 0
        del found

    assert [said.get("leaked") for said in fork_ranks(2, body)] == [0, 0]


def test_eight_ranks_prove_themselves_and_share_one_segment(fork_ranks):
    def body(rank, store):
        with locality.prove(store, rank, 8, timeout=SECONDS) as found:
            watched = found.watched()
            assert watched[rank] == -1
            assert all(fd >= 0 for fd in watched[:rank] + watched[rank + 1 :])
            found.check_alive()
            if found.is_leader:
                segment = arenas.create("segment", 1 << 16)
                segment.empty((8,), torch.int64, name="ranks")
                shared = arenas.attach(found.share(segment.fileno(), timeout=SECONDS))
            else:
                shared = arenas.attach(found.share(timeout=SECONDS))
            shared.tensor("ranks")[rank] = rank + 1
            # Every rank's own memory, too: and a second collective call on the same store.
            mine = os.memfd_create("argosy-mine")
            os.write(mine, bytes([rank]))
            received = found.share_all(mine, timeout=SECONDS)
            content = [os.pread(fd, 1, 0)[0] for fd in received.values()]
            for fd in (*received.values(), mine):
                os.close(fd)
            # After this nobody writes any more.
            with locality.prove(store, rank, 8, timeout=SECONDS) as again:
                assert again.groups == found.groups
            total = shared.tensor("ranks").tolist()
            shared.close()
            if found.is_leader:
                segment.close()
            return [found.groups, total, content]

    for result in fork_ranks(8, body):
        assert result == {
            "result": [[list(range(8))], list(range(1, 9)), list(range(8))],
            "threads": 1,
            "leaked": 0,
        }


def test_subgroups_prove_themselves_side_by_side(fork_ranks):
    def body(rank, store):
        half, inside = rank % 2, rank // 2
        own = locality.prove(PrefixStore(f"half{half}", store), inside, 2, timeout=SECONDS)
        whole = locality.prove(PrefixStore("whole", store), rank, 4, timeout=SECONDS)
        groups = [own.groups, whole.groups, own.watched().index(-1), whole.leader]
        own.close()
        whole.close()
        whole.close()
        return groups

    results = fork_ranks(4, body)
    assert [result["result"] for result in results] == [
        [[[0, 1]], [[0, 1, 2, 3]], rank // 2, 0] for rank in range(4)
    ]
    assert all(result["leaked"] == 0 for result in results)


@pytest.mark.parametrize("has_hints", [True, False])
def test_ranks_of_another_network_namespace_are_not_local(fork_ranks, has_hints, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("network namespaces need privileges")
    if not has_hints:
        monkeypatch.setattr(cards, "_namespace", lambda kind: "")

    def body(rank, store):
        if rank >= 2:
            leave_network()
        with locality.prove(store, rank, 3, timeout=SECONDS) as found:
            return [found.groups, sorted(found.reasons), found.reasons.get(2, "")]

    results = fork_ranks(3, body)
    assert [result["result"][0] for result in results] == [[[0, 1], [2]]] * 3
    assert results[0]["result"][1] == [2]
    assert results[2]["result"][1] == [0, 1]
    expected = "another network namespace" if has_hints else "no connection to it"
    assert expected in results[0]["result"][2]


@pytest.mark.parametrize("moment", ["before", "published", "connected"])
def test_a_rank_that_dies_during_the_proof_is_named(fork_ranks, moment):
    def body(rank, store):
        if rank == 2:
            if moment == "before":
                die()
            target = {"published": "connect", "connected": "read_nonce"}[moment]
            setattr(handover, target, lambda *arguments: die())
        try:
            locality.prove(store, rank, 3, timeout=1.0 if moment == "before" else SECONDS)
        finally:
            # Who leaves first would be a lost rank to the other.
            store.set(f"told {rank}", b"")
            store.wait(["told 0", "told 1"], timedelta(seconds=SECONDS))

    results = fork_ranks(3, body)
    assert results[2] == {"status": signal.SIGKILL}
    for result in results[:2]:
        assert result["leaked"] == 0
        if moment == "before":
            assert result["error"] == TimedOut.__name__
            assert "[2]" in result["text"]
        else:
            assert result["error"] == PeerLost.__name__
            assert "rank 2" in result["text"]


def test_a_rank_of_another_version_is_refused_by_all(fork_ranks):
    def body(rank, store):
        if rank == 1:
            cards.VERSIONS = {**cards.VERSIONS, "kernels": 99}
        locality.prove(store, rank, 3, timeout=SECONDS)

    for rank, result in enumerate(fork_ranks(3, body)):
        assert result["error"] == ProtocolError.__name__
        assert "kernels 99" in result["text"]
        assert f"kernels {cards.VERSIONS['kernels']}" in result["text"]
        assert f"(rank {rank})" in result["text"]
        assert result["leaked"] == 0


def test_memory_with_another_nonce_proves_nothing(fork_ranks):
    def body(rank, store):
        if rank == 1:
            honest = handover.nonce_memfd
            handover.nonce_memfd = lambda nonce: honest(bytes(len(nonce)))
        with locality.prove(store, rank, 3, timeout=SECONDS) as found:
            return [found.groups, found.reasons.get(1, "")]

    results = fork_ranks(3, body)
    assert [result["result"][0] for result in results] == [[[0, 2], [1]]] * 3
    assert "another nonce" in results[0]["result"][1]
    assert all(result["leaked"] == 0 for result in results)


def test_a_member_that_dies_before_the_sharing_is_a_lost_peer(fork_ranks):
    def body(rank, store):
        found = locality.prove(store, rank, 2, timeout=SECONDS)
        if rank == 0:
            die()
        try:
            found.share(timeout=SECONDS)
        finally:
            found.close()

    results = fork_ranks(2, body)
    assert results[1]["error"] == PeerLost.__name__
    assert results[1]["leaked"] == 0


def test_a_lost_peer_has_the_name_that_the_program_has_for_it(fork_ranks):
    def body(rank, store):
        with locality.prove(store, rank, 2, timeout=SECONDS) as found:
            found.names = [7, 5]
            if rank == 0:
                die()
            with pytest.raises(PeerLost) as caught:
                found.share(timeout=SECONDS)
            return caught.value.rank

    assert fork_ranks(2, body)[1]["result"] == 7


def test_groups_are_the_same_whoever_computes_them():
    assert locality_groups([{1, 2}, {0, 2}, {0, 1}]) == [[0, 1, 2]]
    assert locality_groups([{2}, {3}, {0}, {1}]) == [[0, 2], [1, 3]]
    # One-sided and broken chains join nobody who has not proven itself.
    assert locality_groups([{1}, set()]) == [[0], [1]]
    assert locality_groups([{1}, {0, 2}, {1}]) == [[0, 1], [2]]


def locality_groups(views):
    from argosy.move.proofs import group_by_host

    return group_by_host(views)
