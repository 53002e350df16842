"""Checkpoints go to other programs and come from them: the same bits, little memory, nothing run."""

import gc
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from argosy.checkpoint import Checkpointer, directio, exports, imports, pickledvalues
from argosy.checkpoint.commits import Store
from argosy.errors import ArgosyError, CheckpointDamaged, ConfigError, MismatchError


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48, bias=False))
    model.register_buffer("counts", torch.arange(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 48)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "progress": {"epoch": 3, "seen": [1, 2]}}


@pytest.fixture
def opened(trained, tmp_path):
    with Checkpointer(tmp_path / "store") as checkpointer:
        config = {"config.json": b'{"a": 1}'}
        checkpointer.save(5, trained, attachments=config)
        with checkpointer.open(5) as found:
            yield found


def take(source, store_path, step=7):
    store = Store(store_path)
    store.lock("test")
    try:
        imports.take_in(store, source, step, imports.form_of(source))
    finally:
        store.close()
    checkpointer = Checkpointer(store_path)
    assert checkpointer.catalogue.verify(step).faults == []
    return checkpointer


def test_a_hugging_face_directory_has_the_weights_and_the_config(opened, trained, tmp_path):
    exports.export(opened, tmp_path / "hf")
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in trained["model"].state_dict().items():
        assert torch.equal(found[name], tensor)
    checkpointer = take(tmp_path / "hf", tmp_path / "again")
    with checkpointer.open(7) as again:
        assert (again.path / "config.json").read_bytes() == b'{"a": 1}'
        for name, tensor in trained["model"].state_dict().items():
            assert torch.equal(again.tensor(name).read(), tensor)


def test_weights_are_cast_on_the_way_out(opened, trained, tmp_path):
    exports.export(opened, tmp_path / "hf", dtype="bfloat16")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    weight = trained["model"].state_dict()["0.weight"]
    assert torch.equal(found["0.weight"], weight.bfloat16())
    assert found["counts"].dtype == torch.int64


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_torchs_own_forms_go_out_and_come_back(form, opened, trained, tmp_path):
    exports.export(opened, tmp_path / "out", form)
    assert imports.form_of(tmp_path / "out") == form
    if form == "torch":
        state = torch.load(tmp_path / "out", weights_only=True)
        assert state["progress"] == {"epoch": 3, "seen": [1, 2]}
        assert torch.equal(state["model"]["0.bias"], trained["model"].state_dict()["0.bias"])
    checkpointer = take(tmp_path / "out", tmp_path / "again")
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48, bias=False))
    model.register_buffer("counts", torch.zeros(7, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    progress = {}
    checkpointer.load({"model": model, "optimizer": optimizer, "progress": progress}, streams=False)
    assert progress == {"epoch": 3, "seen": [1, 2]}
    assert optimizer.param_groups[0]["lr"] == 0.1
    for (name, ours), theirs in zip(
        model.named_parameters(), trained["model"].parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
        moments = trained["optimizer"].state[theirs]
        assert torch.equal(optimizer.state[ours]["exp_avg_sq"], moments["exp_avg_sq"])


def test_a_directory_that_torch_saved_is_read_without_running_its_pickle(tmp_path):
    state = {"model": {"w": torch.randn(6, 5), "b": torch.ones(2).bfloat16()}, "epoch": 4}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with take(tmp_path / "dcp", tmp_path / "store").open(7) as found:
        assert torch.equal(found.tensor("w").read(), state["model"]["w"])
        assert torch.equal(found.tensor("b").read(), state["model"]["b"])
        assert found.value("epoch") == 4


def test_files_of_torchs_old_kind_are_read_too(tmp_path):
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0]}]}
    state = {"state_dict": {"module.w": torch.ones(3)}, "optimizer": optimizer}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    taken = take(tmp_path / "old.pt", tmp_path / "store")
    with taken.open(7) as found:
        assert torch.equal(found.tensor("w").read(), torch.ones(3))
        assert found.value("optimizer") == optimizer
    model = torch.nn.ParameterDict({"w": torch.zeros(3)})
    with pytest.raises(MismatchError, match="has no optimizer under 'optimizer'"):
        taken.load({"model": model, "optimizer": torch.optim.SGD(model.parameters())})


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/argosy-evil-was-run",)


def test_nothing_that_a_file_names_is_run(tmp_path):
    import pickle

    data = pickle.dumps({"x": Evil()})
    made = pickledvalues.read(data, "it")["x"]
    assert (made.by.name, made.arguments) == ("mkdir", ("/tmp/argosy-evil-was-run",))
    assert not os.path.exists("/tmp/argosy-evil-was-run")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="describes no checkpoint"):
        take(tmp_path / "dcp", tmp_path / "store")
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match="weights-only"):
        take(tmp_path / "evil.pt", tmp_path / "store")
    assert not os.path.exists("/tmp/argosy-evil-was-run")
    assert Checkpointer(tmp_path / "store").steps() == []
    for length in range(0, len(data), 7):
        with pytest.raises(CheckpointDamaged):
            pickledvalues.read(data[:length], "it")


def test_nothing_is_replaced_and_nothing_half_done_is_left(opened, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="not replaced"):
        exports.export(opened, tmp_path / "there")
    with pytest.raises(ArgosyError, match="no weights under 'ema'"):
        exports.export(opened, tmp_path / "none", key="ema")
    file = opened.path / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="checksum"):
        exports.export(opened, tmp_path / "bad")
    assert sorted(os.listdir(tmp_path)) == ["store", "there"]


def resident(key):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(key)).split()[1]) / 1024


def test_going_in_and_out_takes_little_memory(tmp_path):
    (tmp_path / "hf").mkdir()
    for part in range(2):
        tensors = {f"w{part}{i}": torch.full((1 << 21,), part + i + 0.5) for i in range(6)}
        save_file(tensors, tmp_path / "hf" / f"model-0000{part + 1}-of-00002.safetensors")
    del tensors
    directio.BLOCKS._free.clear()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = resident("VmRSS")
    with take(tmp_path / "hf", tmp_path / "store").open(7) as opened:
        exports.export(opened, tmp_path / "out")
    assert resident("VmHWM") - before <= 64
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(found) == 12
    assert float(found["w13"][-1]) == 4.5


class Calls:
    def __reduce__(self):
        return print, ("was run",)


def test_a_file_that_is_refused_says_why_and_not_how_to_run_it(tmp_path, capsys):
    torch.save({"x": Calls()}, tmp_path / "calls.pt")
    (tmp_path / "text.pt").write_text("no archive\n")
    store = Store(tmp_path / "store")
    for name in ("calls.pt", "text.pt"):
        with pytest.raises(ConfigError, match="Error: ") as caught:
            imports.take_in(store, tmp_path / name, 1, "torch")
        assert "weights_only" not in caught.value.what
    assert "was run" not in capsys.readouterr().out
