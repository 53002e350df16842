"""What the words of `argosy checkpoint` mean: directories, runs and steps; where a path is wanted an address is refused."""

import json
import os

import pytest

from argosy.cli.app import main
from argosy.cli.stores import store_on_disk
from argosy.errors import NotFoundError


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        ("checkpoint pull file:///a/objects file:///a/objects", "pull URL STORE"),
        ("checkpoint pull s3://bucket/run s3://bucket/other 5", "pull URL STORE"),
        ("checkpoint import s3://bucket/run model-hf", "import STORE SOURCE"),
        ("checkpoint import store s3://bucket/model", "import STORE SOURCE"),
        ("checkpoint export store --out file:///a/out", "--out PATH"),
    ],
)
def test_an_address_is_no_path(line, usage, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 64
    told = capsys.readouterr().err
    assert "is an address, not a path" in told
    assert usage in told
    assert os.listdir() == []


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs of one name in clusters of two boots, and one that has saved nothing."""
    monkeypatch.setenv("ARGOSY_HOME", str(tmp_path / "home"))
    made = {}
    for place, (run, name) in enumerate((("rab1", "train"), ("rab2", "train"), ("rc3", "idle"))):
        directory = tmp_path / "home" / "clusters" / f"{place:012x}" / "runs" / run
        directory.mkdir(parents=True)
        (directory / "spec.json").write_text(json.dumps({"kind": "run.submitted", "name": name}))
        os.utime(directory / "spec.json", (1000 + place, 1000 + place))
        made[run] = directory
    for run in ("rab1", "rab2"):
        (made[run] / "checkpoints" / "step-000000007").mkdir(parents=True)
    return made


def test_a_run_stands_for_its_checkpoints(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word, run in (("rab1", "rab1"), ("train", "rab2"), (str(runs["rab1"]), "rab1")):
        assert store_on_disk(word).path == runs[run] / "checkpoints"
        assert store_on_disk(word).steps() == [7]
    assert store_on_disk(str(runs["rab1"] / "checkpoints" / "step-000000007")).steps() == [7]
    with pytest.raises(NotFoundError, match="2 runs begin with 'rab'"):
        store_on_disk("rab")
    with pytest.raises(NotFoundError, match="run rc3 has no checkpoints"):
        store_on_disk("rc")
    with pytest.raises(NotFoundError, match="other is neither a directory nor a run"):
        store_on_disk("other")


def test_a_directory_goes_before_a_run_of_its_name(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train" / "step-000000003").mkdir(parents=True)
    (tmp_path / "train" / "checkpoints").mkdir()
    assert store_on_disk("train").steps() == [3], "it is a store itself"


def test_without_a_home_there_is_no_run_and_none_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("ARGOSY_HOME", str(tmp_path / "home"))
    with pytest.raises(NotFoundError):
        store_on_disk("train")
    assert os.listdir(tmp_path) == []
