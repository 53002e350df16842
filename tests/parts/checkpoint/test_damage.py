"""Bytes that are not what was saved are found, named and gone around; failures of the disk leave what was there."""

import errno
import os
import random
import shutil

import pytest
import torch

from argosy.checkpoint import Checkpointer, Keep, Writing
from argosy.checkpoint.cleaning import clean
from argosy.checkpoint.commits import Store
from argosy.checkpoint.directio import Files
from argosy.checkpoint.listings import Listing
from argosy.errors import ArgosyError, CheckpointDamaged, ConfigError, HomeError, NotFoundError


def tensors(value):
    generator = torch.Generator().manual_seed(value)
    shapes = [(300, 64), (7,), (128, 128), ()]
    return {f"t{i}": torch.randn(s, generator=generator) for i, s in enumerate(shapes)}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored")
    with Checkpointer(path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"user": tensors(step), "note": "é"})
    return path


@pytest.fixture
def store(stored, tmp_path):
    shutil.copytree(stored, tmp_path / "store")
    return tmp_path / "store"


def loaded_step(store):
    user = {}
    loaded = Checkpointer(store).load({"user": user, "note": ""})
    for name, tensor in tensors(loaded.step).items():
        assert torch.equal(user[name], tensor), name
    return loaded


def test_flipped_bits_are_all_found_and_the_older_checkpoint_is_loaded(store):
    draw = random.Random(5)
    newest = store / "step-000000002"
    files = sorted(newest.iterdir())
    for trial in range(60):
        path = files[trial % len(files)]
        good = path.read_bytes()
        place = draw.randrange(len(good))
        bad = bytearray(good)
        bad[place] ^= 1 << draw.randrange(8)
        if path.name == "MANIFEST.json" and place == len(good) - 1:
            continue  # the newline at the end
        path.write_bytes(bad)
        report = Checkpointer(store).catalogue.verify(2)
        assert not report.is_good, (path.name, place)
        if place >= 4096:
            assert loaded_step(store).step == 1
        path.write_bytes(good)
    assert Checkpointer(store).catalogue.verify(2).is_good
    assert loaded_step(store).step == 2


def test_a_damaged_chunk_names_checkpoint_file_and_tensor(store):
    path = store / "step-000000002" / "extra-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged) as caught:
        Checkpointer(store).load({"user": {}, "note": ""}, step=2)
    for part in (
        "step-000000002",
        "extra-00001-of-00001.safetensors",
        "bytes 0 to 65536",
        "user/t",
    ):
        assert part in caught.value.what
    found = loaded_step(store)
    assert found.step == 1
    assert "checksum" in found.skipped[0]


@pytest.mark.parametrize(
    "how",
    ["cut", "lengthened", "missing", "link", "directory", "swapped", "manifest gone", "renamed"],
)
def test_files_that_are_not_as_saved_are_refused(store, how):
    newest = store / "step-000000002"
    path = newest / "extra-00001-of-00001.safetensors"
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[:-1])
    elif how == "lengthened":
        path.write_bytes(data + b"\0")
    elif how == "missing":
        path.unlink()
    elif how == "link":
        path.rename(store / "elsewhere")
        path.symlink_to(store / "elsewhere")
    elif how == "directory":
        path.unlink()
        path.mkdir()
    elif how == "swapped":
        shutil.copy(store / "step-000000001" / path.name, path)
    elif how == "manifest gone":
        (newest / "MANIFEST.json").unlink()
    else:
        newest.rename(store / "step-000000003")
    step = 3 if how == "renamed" else 2
    report = Checkpointer(store).catalogue.verify(step)
    assert len(report.faults) >= 1
    with pytest.raises(CheckpointDamaged):
        Checkpointer(store).load({"user": {}, "note": ""}, step=step)
    assert loaded_step(store).step == 1


@pytest.mark.parametrize("wait", [True, False])
def test_a_step_that_proved_damaged_can_be_saved_again(store, wait):
    newest = store / "step-000000002"
    path = newest / "extra-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    state = {"user": tensors(2), "note": ""}
    with Checkpointer(store) as checkpointer, pytest.raises(ConfigError, match="never overwritten"):
        checkpointer.save(2, state)  # nobody has read it yet
    assert loaded_step(store).step == 1
    with Checkpointer(store) as checkpointer:
        checkpointer.catalogue.pin(2, "to be looked at")
        with pytest.raises(ConfigError, match="never overwritten"):
            checkpointer.save(2, state)
        checkpointer.catalogue.unpin(2)
        checkpointer.save(2, state) if wait else checkpointer.save(2, state, wait=False).wait(
            timeout=60
        )
        assert checkpointer.catalogue.verify(2).faults == []
        with pytest.raises(ConfigError, match="never overwritten"):
            checkpointer.save(2, state)
    assert loaded_step(store).step == 2
    assert not [name for name in os.listdir(store) if name.startswith((".damaged", ".removed"))]


def test_a_newer_format_is_gone_around_and_named_when_asked_for(store):
    path = store / "step-000000002" / "MANIFEST.json"
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises(ConfigError, match="version 2"):
        Checkpointer(store).open(2)
    assert loaded_step(store).step == 1


def test_when_nothing_can_be_used_the_newest_failure_is_told(store):
    for step in (1, 2):
        (store / f"step-00000000{step}" / "MANIFEST.json").write_bytes(b"{}")
    with pytest.raises(
        CheckpointDamaged, match=r"no checkpoint of .* can be used; the newest: step 2"
    ):
        Checkpointer(store).load({"user": {}})


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    assert Checkpointer(tmp_path / "none").load({"x": {}}) is None
    with pytest.raises(NotFoundError, match="no step 5"):
        Checkpointer(tmp_path).open(5)
    (tmp_path / "step-000000005").mkdir()
    with pytest.raises(CheckpointDamaged, match="has no MANIFEST"):
        Checkpointer(tmp_path).open(5)


class Failing(Files):
    """The n-th call of one kind fails."""

    def __init__(self, call, at, error):
        self.call, self.left, self.error = call, at, error

    def _count(self, call):
        if call == self.call:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.error, os.strerror(self.error))

    def open(self, *args, **kwargs):
        self._count("open")
        return super().open(*args, **kwargs)

    def write(self, *args):
        self._count("write")
        return super().write(*args)

    def reserve(self, *args):
        self._count("reserve")
        return super().reserve(*args)

    def flush(self, *args):
        self._count("flush")
        return super().flush(*args)

    def flush_directory(self, *args):
        self._count("flush_directory")
        return super().flush_directory(*args)

    def rename(self, *args):
        self._count("rename")
        return super().rename(*args)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "write", "reserve", "flush", "flush_directory", "rename"])
def test_a_disk_that_fails_at_any_call_leaves_the_last_good_checkpoint(tmp_path, call, error):
    with Checkpointer(tmp_path) as good:
        good.save(1, {"user": tensors(1), "note": ""})
    descriptors = len(os.listdir("/proc/self/fd"))
    for at in range(100):
        failing = Checkpointer(tmp_path, writing=Writing(files=Failing(call, at, error)))
        try:
            failing.save(2, {"user": tensors(2), "note": ""})
        except HomeError as failure:
            told = failure
        else:
            break
        finally:
            failing.close()
        assert os.strerror(error) in told.what
        assert told.fix
        # A flush of the store that fails comes after the rename: the step is there, though nobody was promised it.
        assert set(Checkpointer(tmp_path).steps()) <= {1, 2}
        assert loaded_step(tmp_path).step in (1, 2)
        if 2 in Checkpointer(tmp_path).steps():
            shutil.rmtree(tmp_path / "step-000000002")
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".staging")]
    assert 1 <= at < 99
    assert loaded_step(tmp_path).step == 2
    assert len(os.listdir("/proc/self/fd")) <= descriptors


class Unreadable(Files):
    """The newer checkpoint lies on sectors that cannot be read any more."""

    def read(self, descriptor, into, offset):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "step-000000002" in path and path.endswith(".safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(descriptor, into, offset)


def test_what_cannot_be_read_is_gone_around_and_named_when_asked_for(store):
    checkpointer, user = Checkpointer(store, writing=Writing(files=Unreadable())), {}
    loaded = checkpointer.load({"user": user, "note": ""})
    assert loaded.step == 1
    assert torch.equal(user["t0"], tensors(1)["t0"])
    assert "Input/output error" in loaded.skipped[0]
    with pytest.raises(HomeError, match=r"extra-00001-of-00001\.safetensors of step-000000002"):
        checkpointer.load({"user": {}, "note": ""}, step=2)


class Locked(Files):
    """A manifest that is there and cannot be opened, for whatever reason that may pass."""

    def open(self, name, flags, directory):
        if name == "MANIFEST.json" and not flags & os.O_CREAT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(name, flags, directory)


def test_a_manifest_that_cannot_be_opened_is_no_damage_and_costs_nothing(store):
    with pytest.raises(ArgosyError, match="Input/output error"):
        Checkpointer(store, writing=Writing(files=Locked())).load({"user": {}, "note": ""})
    assert not [name for name in os.listdir(store) if name.startswith(".damaged")]
    with Checkpointer(store) as checkpointer, pytest.raises(ConfigError, match="never overwritten"):
        checkpointer.save(2, {"user": tensors(2), "note": ""})
    assert loaded_step(store).step == 2


@pytest.mark.parametrize("wait", [True, False])
def test_a_step_that_has_become_whole_again_is_not_replaced(store, wait):
    path = store / "step-000000002" / "extra-00001-of-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert loaded_step(store).step == 1
    path.write_bytes(data)
    state = {"user": tensors(2), "note": ""}
    with Checkpointer(store) as checkpointer, pytest.raises(ConfigError, match="never overwritten"):
        checkpointer.save(2, state, wait=wait).wait()
    assert loaded_step(store).step == 2
    assert not [name for name in os.listdir(store) if name.startswith(".damaged")]


def test_what_retention_cannot_read_just_now_is_not_noted_to_be_damaged(store):
    listing = Listing(store, files=Unreadable())
    report = listing.verify(2)
    assert report.is_unreadable
    assert not report.is_good
    cleaned = clean(Store(store), listing, Keep(last=1))
    assert (cleaned.verified, cleaned.removed) == (1, [])
    assert not [name for name in os.listdir(store) if name.startswith(".damaged")]
    (store / ".damaged-000000002").touch()
    with (
        Checkpointer(store, writing=Writing(files=Unreadable())) as checkpointer,
        pytest.raises(HomeError, match="cannot be read now"),
    ):
        checkpointer.save(2, {"user": tensors(2), "note": ""})
    assert loaded_step(store).step == 2


class Small(Files):
    """A disk with little room."""

    def free_bytes(self, descriptor):
        return 1 << 20


def test_a_save_that_cannot_fit_is_refused_before_it_begins(tmp_path):
    with pytest.raises(
        HomeError,
        match=r"needs .* MiB and the disk has 1\.0 MiB free, of which 16\.0 MiB are left alone",
    ):
        Checkpointer(tmp_path, writing=Writing(files=Small())).save(1, {"user": tensors(1)})


class Buffered(Files):
    """A file system without direct transfers."""

    def open(self, name, flags, directory=None, mode=0o644):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return super().open(name, flags, directory, mode)


def test_without_direct_transfers_the_bytes_are_the_same(tmp_path):
    state = {"user": tensors(1), "note": ""}
    Checkpointer(tmp_path / "a").save(1, state, streams=False)
    Checkpointer(tmp_path / "b", writing=Writing(files=Buffered())).save(1, state, streams=False)
    name = "step-000000001/extra-00001-of-00001.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    user = {}
    Checkpointer(tmp_path / "a", writing=Writing(files=Buffered())).load(
        {"user": user, "note": ""}, streams=False
    )
    assert torch.equal(user["t0"], tensors(1)["t0"])


def test_what_a_dead_session_left_is_swept_by_the_next(tmp_path):
    Checkpointer(tmp_path).save(1, {"x": torch.zeros(1)})
    for name in (".staging-000000002-abc", ".removed-000000000-def"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "notes").mkdir()
    Checkpointer(tmp_path).close()
    assert (tmp_path / ".staging-000000002-abc").exists()
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ArgosyError):
        checkpointer.save(1, {"x": torch.zeros(1)})
    assert sorted(os.listdir(tmp_path)) == [".sessions", ".writer", "notes", "step-000000001"]
