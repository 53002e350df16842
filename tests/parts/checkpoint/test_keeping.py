"""What stays and what is written again: retention after each save, unchanged files, the alarm, signatures."""

import os

import pytest
import torch

from argosy.checkpoint import Checkpointer, Writing, signatures
from argosy.checkpoint.diffs import diff
from argosy.checkpoint.directio import SPARE_BYTES, Files
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.retention import Keep
from argosy.cli.app import main
from argosy.errors import CheckpointDamaged, ConfigError, HomeError


def adapter():
    """Ninety per cent frozen, and an adapter that is trained."""
    torch.manual_seed(0)
    base = torch.nn.Linear(512, 1024)
    base.requires_grad_(False)
    model = torch.nn.Sequential(base, torch.nn.Linear(1024, 8))
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    return model, optimizer


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 512)).square().sum().backward()
    optimizer.step()


def frozen_file(store, step):
    with Checkpointer(store).open(step) as opened:
        (name,) = [name for name, one in opened.manifest.files.items() if one.kind == "frozen"]
        return store / f"step-{step:09d}" / name, opened.manifest.files[name]


def saved(store, steps=3, **more):
    model, optimizer = adapter()
    with Checkpointer(store, **more) as checkpointer:
        for step in range(1, steps + 1):
            train(model, optimizer)
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
    return model, optimizer


def test_frozen_files_are_linked_and_survive_those_they_came_from(tmp_path):
    model, _ = saved(tmp_path, keep=Keep(last=1))
    assert Checkpointer(tmp_path).steps() == [3]
    path, record = frozen_file(tmp_path, 3)
    assert record.origin.step == 1
    assert record.stored == "here"
    assert path.stat().st_nlink == 1
    assert Checkpointer(tmp_path).catalogue.verify(3).faults == []
    again, _ = adapter()
    torch.nn.init.zeros_(again[0].weight)
    Checkpointer(tmp_path).load({"model": again})
    assert torch.equal(again[0].weight, model[0].weight)


def test_only_what_changed_is_written(tmp_path):
    saved(tmp_path)
    first, _ = frozen_file(tmp_path, 1)
    third, _ = frozen_file(tmp_path, 3)
    assert first.stat().st_ino == third.stat().st_ino
    with Checkpointer(tmp_path).open(3) as opened:
        own = [name for name, one in opened.manifest.files.items() if one.origin is None]
        assert sum(opened.manifest.files[name].size for name in own) < 0.2 * first.stat().st_size
        lazy = opened.tensor("0.weight")
        assert lazy[:, 0:64].shape == (1024, 64)


def test_frozen_weights_that_did_change_are_written(tmp_path):
    model, optimizer = adapter()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
        with torch.no_grad():
            model[0].weight[1000, 500] += 1.0
        checkpointer.save(2, {"model": model, "optimizer": optimizer})
        assert frozen_file(tmp_path, 2)[1].origin is None
        changed = checkpointer.open(2).tensor("0.weight")[1000, 500]
    assert changed == model[0].weight[1000, 500]


class NoLinks(Files):
    def link(self, name, source, directory):
        raise PermissionError(1, "no links here")


def test_without_links_files_are_referred_to_and_what_is_referred_to_stays(tmp_path):
    saved(tmp_path, steps=4, keep=Keep(last=1), writing=Writing(files=NoLinks()))
    path, record = frozen_file(tmp_path, 4)
    assert not path.exists()
    assert (record.stored, record.origin.step) == ("origin", 1)
    assert Checkpointer(tmp_path).steps() == [1, 4]
    assert Checkpointer(tmp_path).catalogue.verify(4).faults == []


class Tight(Files):
    """Room for what is trained, and not for what is frozen."""

    is_tight = False

    def free_bytes(self, descriptor):
        return SPARE_BYTES + (1 << 20) if self.is_tight else super().free_bytes(descriptor)


def test_what_is_linked_needs_no_room(tmp_path):
    model, optimizer = adapter()
    state, files = {"model": model, "optimizer": optimizer}, Tight()
    with Checkpointer(tmp_path, writing=Writing(files=files)) as checkpointer:
        checkpointer.save(1, state)
        files.is_tight = True
        train(model, optimizer)
        checkpointer.save(2, state)
        train(model, optimizer)
        checkpointer.save(3, state, wait=False).wait(timeout=30)
        with torch.no_grad():
            model[0].weight.mul_(2.0)
        with pytest.raises(HomeError, match=r"step 4 needs .* MiB and the disk has 17\.0 MiB free"):
            checkpointer.save(4, state)
        assert checkpointer.steps() == [1, 2, 3]
    assert frozen_file(tmp_path, 3)[0].stat().st_nlink == 3


def test_pinned_checkpoints_stay(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=Keep(last=1))
    checkpointer.save(1, {"x": 1})
    checkpointer.catalogue.pin(1, "wanted")
    for step in (2, 3):
        checkpointer.save(step, {"x": step})
    checkpointer.close()
    assert checkpointer.steps() == [1, 3]


class LosesBytes(Files):
    """A disk that forgets what was written to some files, as a broken one does."""

    is_broken = False

    def flush(self, descriptor):
        super().flush(descriptor)
        if self.is_broken and os.fstat(descriptor).st_size > 100_000:
            os.pwrite(descriptor, b"\1", 70_000)


def test_nothing_goes_while_the_newer_one_is_damaged(tmp_path):
    files = LosesBytes()
    with Checkpointer(tmp_path, keep=Keep(last=1), writing=Writing(files=files)) as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(50_000)})
        files.is_broken = True
        checkpointer.save(2, {"x": torch.ones(50_000)})
        checkpointer.cleaner.wait()
        assert checkpointer.steps() == [1, 2]
        assert "checksum" in checkpointer.cleaner.last.damaged[0]
        files.is_broken = False
        checkpointer.save(3, {"x": torch.full((50_000,), 2.0)})
        checkpointer.cleaner.wait()
        assert checkpointer.steps() == [3]


def test_no_file_is_linked_from_a_checkpoint_that_is_known_to_be_damaged(tmp_path):
    model, optimizer = adapter()
    state = {"model": model, "optimizer": optimizer}
    files = LosesBytes()
    with Checkpointer(tmp_path, keep=Keep(last=1), writing=Writing(files=files)) as checkpointer:
        checkpointer.save(1, state)
        with torch.no_grad():
            model[0].bias.add_(1.0)
        files.is_broken = True
        checkpointer.save(2, state)
        files.is_broken = False
        checkpointer.save(3, state)
        checkpointer.cleaner.wait()
        assert frozen_file(tmp_path, 3)[1].origin is None
        assert checkpointer.steps() == [3]
        assert checkpointer.catalogue.verify(3).faults == []
    assert [name for name in os.listdir(tmp_path) if name.startswith(".damaged")] == []


def test_trained_tensors_that_stand_still_raise_an_alarm(tmp_path, caplog):
    model, optimizer = adapter()
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            train(model, optimizer)
            checkpointer.save(step, state)
        checkpointer.cleaner.wait()
        assert checkpointer.cleaner.stuck == []
        checkpointer.save(3, state)
        checkpointer.cleaner.wait()
        assert sorted(checkpointer.cleaner.stuck) == ["1.bias", "1.weight"]
    assert "have not changed since step 2" in caplog.text


def test_the_alarm_needs_no_state_of_the_optimizer(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        with torch.no_grad():
            model[0].weight.add_(1.0)
        checkpointer.save(2, state)
        checkpointer.cleaner.wait()
        assert sorted(checkpointer.cleaner.stuck) == ["0.bias", "1.bias", "1.weight"]
        with checkpointer.open(1) as first, checkpointer.open(2) as second:
            assert sorted(diff(first, second).stuck) == ["0.bias", "1.bias", "1.weight"]


def test_signed_checkpoints_are_trusted_and_others_are_not(tmp_path):
    pytest.importorskip("cryptography")
    for name in "ab":
        signatures.make_keys(tmp_path / f"{name}.pem", tmp_path / f"{name}.pub")
    model, optimizer = adapter()
    with Checkpointer(tmp_path / "store") as checkpointer:
        checkpointer.save(1, {"model": model})
        checkpointer.sign_with(tmp_path / "a.pem")
        checkpointer.save(2, {"model": model, "optimizer": optimizer})
    reader = Checkpointer(tmp_path / "store")
    reader.trust(tmp_path / "b.pub", tmp_path / "a.pub")
    assert reader.load({"model": model}).step == 2
    with pytest.raises(CheckpointDamaged, match="not signed"):
        reader.open(1)
    verify = ["checkpoint", "verify", str(tmp_path / "store"), "--key", str(tmp_path / "a.pub")]
    assert main(verify) == 0
    assert main([*verify, "--all"]) == 65
    with pytest.raises(ConfigError, match="private key"):
        reader.sign_with(tmp_path / "a.pub")
    reader.trust(tmp_path / "b.pub")
    with pytest.raises(CheckpointDamaged, match="not trusted"):
        reader.open(2)
    reader.trust(tmp_path / "a.pub")
    manifest = tmp_path / "store" / "step-000000002" / "MANIFEST.json"
    other = tmp_path / "store" / "step-000000001" / "MANIFEST.json"
    manifest.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointDamaged):
        reader.open(2)


def test_a_save_below_what_was_not_gone_on_from_stays_and_so_does_that(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, {"x": step})
    listing = Listing(tmp_path)
    with Checkpointer(tmp_path, keep=Keep(last=1)) as checkpointer:
        for step, rest in ((25, [25, 30]), (26, [26, 30]), (31, [31])):
            checkpointer.save(step, {"x": step})
            checkpointer.cleaner.wait()
            assert listing.steps() == rest
