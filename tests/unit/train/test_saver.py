"""What a save leaves behind for the next one, which may be another rank's; whose checkpoints in peers' memory a run goes on with."""

from types import SimpleNamespace

import pytest

from argosy.checkpoint import Peers
from argosy.checkpoint.peers import notes
from argosy.train import saver
from argosy.train.checkpoints import Checkpoints
from argosy.train.saver import Saver

PEERS = Peers(hosts=("a", "b"), host="a", keep=5)


@pytest.mark.parametrize("is_failing", [False, True])
def test_the_store_is_free_before_the_pin_goes(is_failing):
    done = []

    def unlock():
        done.append("unlocked")
        if is_failing:
            raise OSError("the disk is gone")

    found = object.__new__(Saver)
    found.checkpointer = SimpleNamespace(unlock=unlock)
    found._state = SimpleNamespace(unpin=lambda version, owner: done.append("unpinned"))
    found._owner = 0
    hold = SimpleNamespace(release=lambda: done.append("released"))
    try:
        found._leave(7, hold)
    except OSError:
        assert is_failing
    assert done == ["unlocked", "unpinned", "released"]


def test_a_run_asks_peers_for_its_own_checkpoints_alone(tmp_path):
    assert saver._peers_of(tmp_path, Checkpoints(peers=PEERS)) is None, "a new run begins anew"
    name = notes.note(PEERS, tmp_path).run
    assert saver._peers_of(tmp_path, Checkpoints()) is None
    moved = Peers(hosts=("a", "b", "c"), host="c")
    found = saver._peers_of(tmp_path, Checkpoints(peers=moved))
    assert (found.run, found.hosts, found.host) == (name, ("a", "b", "c"), "c")
