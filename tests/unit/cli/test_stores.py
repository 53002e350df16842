"""Where a path is wanted an address is refused: it would become directories of that name, here."""

import os

import pytest

from argosy.cli.app import main


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
