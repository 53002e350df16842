"""`argosy checkpoint`: what it prints, what it ends with, what it leaves."""

import contextlib
import io
import json
import os

import pytest
import torch

from argosy.checkpoint import Checkpointer
from argosy.cli.app import main


def argosy(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["checkpoint", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


def asked(*words):
    code, out, err = argosy(*words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def store(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 256)
    optimizer = torch.optim.SGD([{"params": model.parameters()}], lr=0.1, momentum=0.9)
    path = tmp_path / "store"
    with Checkpointer(path) as checkpointer:
        for step in range(1, 5):
            model(torch.ones(2, 128)).sum().backward()
            optimizer.step()
            if step == 4:
                model.weight.grad = None
                with torch.no_grad():
                    model.bias.add_(1.0)
                    model.weight[0, 0] = float("nan")
            state = {"model": model, "optimizer": optimizer}
            checkpointer.save(step, state, metrics={"loss": abs(step - 2.0)})
    return path


def test_a_listing_shows_steps_metrics_pins_and_damage(store):
    assert argosy("pin", store, 2, "--why", "the best")[0] == 0
    (store / "step-000000001" / "MANIFEST.json").write_text("{}")
    rows = asked("ls", store)["checkpoints"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[1]["pinned"] == "the best"
    assert rows[1]["metrics"] == {"loss": 0.0}
    assert "checksum" in rows[0]["fault"]
    text = argosy("ls", store)[1]
    assert "pinned: the best" in text
    assert "cannot be used: " in text


def test_a_listing_shows_what_lacks_a_file_or_has_one_cut_off(store):
    os.truncate(store / "step-000000002" / "model-00001-of-00001.safetensors", 100)
    (store / "step-000000003" / "extra.json").unlink()
    rows = asked("ls", store)["checkpoints"]
    assert "has 100 bytes" in rows[1]["fault"]
    assert "lacks its file extra.json" in rows[2]["fault"]
    assert rows[1]["bytes"] == rows[3]["bytes"]
    assert rows[0]["fault"] is rows[3]["fault"] is None


def test_show_tells_tensors_and_values(store):
    found = asked("show", store, 3, "--tensors", "--values")
    assert found["step"] == 3
    assert found["parent"] == 2
    assert {"name": "weight", "class": "model", "dtype": "F32", "shape": [256, 128]} in found[
        "tensors"
    ]
    assert found["values"]["optimizer"]["groups"][0]["lr"] == 0.1
    assert asked("show", store)["step"] == 4
    assert "weight" in argosy("show", store / "step-000000002", "--tensors")[1]


def flip_a_bit(store, step):
    file = store / f"step-{step:09d}" / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.unlink()
    file.write_bytes(data)


def test_verify_ends_with_65_and_names_the_tensor(store):
    assert argosy("verify", store, "--all")[0] == 0
    flip_a_bit(store, 3)
    code, out, _ = argosy("verify", store, 3)
    assert code == 65
    assert "in them: " in out
    assert argosy("verify", store)[0] == 0


def test_verify_does_not_call_a_newer_format_damaged(store):
    manifest = store / "step-000000004" / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":9', 1))
    code, out, _ = argosy("verify", store, "--all")
    assert code == 64
    assert "step 4: not known: it cannot be read\n" in out
    assert "version 9" in out
    assert "damaged" not in out
    flip_a_bit(store, 3)
    code, out, _ = argosy("verify", store, "--all")
    assert code == 65
    assert "step 3: damaged\n" in out


def test_cleaning_up_keeps_the_last_the_best_and_the_pinned(store):
    argosy("pin", store, 1)
    (store / ".staging-000000009-dead").mkdir()
    dry = asked("gc", store, "--last", 1, "--best", "loss", "--dry")
    assert [one["step"] for one in dry["removed"]] == [3]
    assert dry["leftovers"] == [".staging-000000009-dead"]
    assert (store / ".staging-000000009-dead").exists()
    code, out, _ = argosy("gc", store, "--last", 1, "--best", "loss")
    assert code == 0
    assert "step 4 was read and is whole" in out
    assert Checkpointer(store).steps() == [1, 2, 4]
    assert not (store / ".staging-000000009-dead").exists()
    assert argosy("pin", store, 1, "--remove")[0] == 0
    assert asked("gc", store, "--last", 1)["verified"] == 4
    assert Checkpointer(store).steps() == [4]
    assert asked("gc", store)["removed"] == []


def test_cleaning_up_counts_whole_ones_alone(store):
    flip_a_bit(store, 4)
    dry = asked("gc", store, "--last", 2, "--dry")
    assert [one["step"] for one in dry["removed"]] == [1]
    assert not (store / ".damaged-000000004").exists()
    (store / "step-000000003" / "extra.json").unlink()
    found = asked("gc", store, "--last", 2)
    assert found["removed"] == []
    assert found["verified"] == 2
    assert [text.split(":")[0] for text in found["damaged"]] == ["step 3", "step 4"]
    flip_a_bit(store, 4)  # back
    (store / "step-000000003" / "extra.json").write_bytes(
        (store / "step-000000002" / "extra.json").read_bytes()
    )
    code, out, _ = argosy("gc", store, "--last", 2)
    assert code == 0
    assert "not counted: step 3: " in out
    assert Checkpointer(store).steps() == [2, 3, 4]
    assert not (store / ".damaged-000000004").exists()


def test_a_metric_that_no_checkpoint_has_is_refused_and_nothing_goes(store):
    code, _, err = argosy("gc", store, "--best", "los")
    assert code == 64
    assert "no whole checkpoint has the metric 'los'; there are loss" in err
    assert Checkpointer(store).steps() == [1, 2, 3, 4]


def test_a_second_pin_keeps_the_reason_of_the_first(store):
    argosy("pin", store, 1, "--why", "table 2")
    argosy("pin", store, 1)
    assert asked("ls", store)["checkpoints"][0]["pinned"] == "table 2"


def test_cleaning_up_is_refused_while_a_run_saves_there(store):
    with Checkpointer(store, run="mine") as checkpointer:
        checkpointer.save(9, {"x": 1})
        code, _, err = argosy("gc", store, "--last", 1)
    assert code == 64
    assert "is being saved into" in err
    assert "fix:" in err


def test_steps_and_stores_that_are_not_there_are_66(store, tmp_path):
    assert argosy("show", store, 77)[0] == 66
    assert argosy("ls", tmp_path / "nowhere")[0] == 66
    os.mkdir(tmp_path / "empty")
    assert argosy("verify", tmp_path / "empty")[0] == 66
    assert argosy("show", store, "newest")[0] == 64
    assert argosy("pin", store, 77)[0] == 66


def test_differences_and_exports_are_made_by_a_process_with_torch(store, tmp_path):
    found = asked("diff", store, 3, 4)
    assert found == asked("diff", store / "step-000000003", store / "step-000000004")
    assert argosy("diff", 3, 4)[0] == 66
    code, _, err = argosy("diff", store / "step-000000003", store)
    assert code == 64
    assert "step-000000004" in err
    changed = {one["name"]: one for one in found["changed"]}
    assert changed["bias"]["changed_share"] == 1.0
    assert changed["bias"]["max_abs"] >= 0.5
    assert changed["bias"]["max_ulp"] > 1000
    assert changed["weight"]["max_abs"] is None
    code, out, err = argosy("export", store, 4, "--out", tmp_path / "hf", "--form", "h5")
    assert (code, out) == (64, "")
    assert "fix: one of hf" in err
    code, out, err = argosy("export", store, 4, "--out", store)
    assert code == 64
    assert "exists" in err


def test_an_export_without_a_config_says_what_transformers_need(store, tmp_path):
    code, out, err = argosy("export", store, 4, "--out", tmp_path / "bare")
    assert code == 0, err
    assert f"model.config.save_pretrained('{tmp_path / 'bare'}')" in out
    with Checkpointer(store) as checkpointer:
        state = {"model": torch.nn.Linear(2, 2)}
        checkpointer.save(5, state, attachments={"config.json": b"{}"})
    code, out, err = argosy("export", store, 5, "--out", tmp_path / "whole")
    assert code == 0, err
    assert "config.json" not in out
    assert (tmp_path / "whole" / "config.json").read_bytes() == b"{}"


def test_checkpoints_are_pushed_listed_verified_and_pulled(store, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    url, key = f"file://{tmp_path}/far", ("--secret", secret)
    sent = asked("push", store, url, 2, *key)["checkpoints"]
    assert [(one["step"], one["is_new"]) for one in sent] == [(2, True)]
    sent = asked("push", store, url, "--all", *key)["checkpoints"]
    assert [(one["step"], one["is_new"]) for one in sent] == [
        (1, True),
        (2, False),
        (3, True),
        (4, True),
    ]
    assert "is there already" in argosy("push", store, url, *key)[1]
    assert [row["step"] for row in asked("ls", url, *key)["checkpoints"]] == [1, 2, 3, 4]
    code, _, err = argosy("show", url)
    assert code == 64
    assert "is encrypted" in err
    assert asked("show", f"{url}/step-000000003", *key)["path"] == f"{url}/step-000000003"
    told = asked("verify", url, "--all", *key)
    assert told["store"] == url
    assert all(one["is_good"] and one["bytes_read"] for one in told["checkpoints"])
    assert argosy("pin", url, 1, "--why", "first")[0] == 0
    assert "pinned: first" in argosy("ls", url, *key)[1]
    new = tmp_path / "pulled"
    assert asked("pull", url, new, 3, *key)["step"] == 3
    assert asked("diff", new, new / "step-000000003", store / "step-000000003")["is_equal"]
    assert argosy("pull", f"{url}/step-000000001", new, *key)[0] == 0
    assert [row["step"] for row in asked("ls", new)["checkpoints"]] == [1, 3]
    # What was pulled into an empty directory goes on with the prefix.
    assert argosy("push", new, url, 3, *key)[0] == 0


def test_addresses_that_cannot_be_meant_are_refused(store, tmp_path):
    far = tmp_path / "far"
    assert argosy("ls", f"file://{far}")[0] == 66
    assert not far.exists()
    assert argosy("push", store, far)[0] == 64
    assert argosy("pull", store, far)[0] == 64
    assert argosy("ls", "ftp://host/x")[0] == 64
    (far / "writers").mkdir(parents=True)
    (far / "writers" / "000000001.json").write_text('{"store":"other","run":"seven"}')
    code, _, err = argosy("push", store, f"file://{far}")
    assert code == 64
    assert "the run 'seven'" in err
    code, _, err = argosy("export", f"file://{far}", 1, "--out", tmp_path / "out")
    assert code == 66
    assert "argosy checkpoint pull" in err
