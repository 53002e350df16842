"""Disks that are really full or read-only: saves are refused by name, the last good checkpoint stays and loads, and the next save works when there is room again."""

import contextlib
import os
import subprocess

import pytest
import torch

from argosy.checkpoint import Checkpointer, Writing
from argosy.checkpoint.directio import Files
from argosy.checkpoint.writer.client import wait_gone
from argosy.errors import HomeError

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a small disk"),
]
MEBIBYTE = 1 << 20


@contextlib.contextmanager
def mounted(path, options):
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


@pytest.fixture
def disk(tmp_path):
    with mounted(tmp_path / "disk", "size=64m") as found:
        yield found


def value(step):
    return {"x": torch.full((2 * MEBIBYTE,), float(step))}


def assert_only_first(store):
    state = value(0)
    assert Checkpointer(store).load(state).step == 1
    assert torch.equal(state["x"], value(1)["x"])
    assert not [name for name in os.listdir(store) if name.startswith(".staging")]


class Hopeful(Files):
    """Believes that there is room: what is missing is found by the disk itself."""

    def free_bytes(self, descriptor):
        return 1 << 40


def test_a_full_disk_refuses_a_save_and_takes_the_next_one_when_there_is_room(disk):
    store, ballast = disk / "store", disk / "ballast"
    with Checkpointer(store) as checkpointer:
        checkpointer.save(1, value(1))
        ballast.write_bytes(bytes(52 * MEBIBYTE))
        with pytest.raises(HomeError, match=r"step 2 needs 8\.\d MiB and the disk has"):
            checkpointer.save(2, value(2))
        with pytest.raises(HomeError, match=r"step 2 needs 8\.\d MiB and the disk has"):
            checkpointer.save(2, value(2), wait=False).wait(timeout=60)
        assert_only_first(store)
    with Checkpointer(store, writing=Writing(files=Hopeful())) as checkpointer:
        with pytest.raises(HomeError, match="No space left on device") as caught:
            checkpointer.save(2, value(2))
        assert "safetensors" in caught.value.what
        assert "free some space" in caught.value.fix
        assert_only_first(store)
    with Checkpointer(store) as checkpointer:
        ballast.unlink()
        checkpointer.save(2, value(2), wait=False).wait(timeout=60)
        assert checkpointer.catalogue.verify(2).faults == []
    assert wait_gone(store, 10)


def test_a_disk_that_has_become_read_only_refuses_a_save_and_loads(disk):
    store = disk / "store"
    with Checkpointer(store) as checkpointer:
        checkpointer.save(1, value(1))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with Checkpointer(store) as checkpointer:
        for wait in (True, False):
            with pytest.raises(HomeError, match="Read-only file system") as caught:
                checkpointer.save(2, value(2), wait=wait)
            assert "mounted for writing" in caught.value.fix
    assert_only_first(store)
