"""Tokenizers of the Hugging Face library, made here from a few words; skipped where the optional extra is not installed."""

import json

import pytest

from argosy.cli.app import main
from argosy.data.inputs import PackSettings
from argosy.data.packing import pack
from argosy.data.tokenfiles import TokenFile
from argosy.data.tokenizers import load_tokenizer
from argosy.errors import ConfigError

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def words(tmp_path):
    vocabulary = {word: number for number, word in enumerate(["?", "</s>", "the", "cat", "sat"])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    return str(tmp_path / "words.json")


def test_a_tokenizer_file_packs_and_shows(words, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("the cat sat")
    (tmp_path / "u.txt").write_text("the dog sat")
    settings = PackSettings(tokenizer=words, workers=1)
    packed = pack([tmp_path / "t.txt", tmp_path / "u.txt"], tmp_path / "t.bin", settings)
    file = TokenFile(tmp_path / "t.bin")
    assert file.tokens.tolist() == [2, 3, 4, 1, 2, 0, 4, 1]
    assert file.ends().tolist() == [4, 8]
    assert (packed.vocabulary_size, file.sidecar.end_of_document, file.dtype) == (5, 1, "uint16")
    assert main(["data", "show", str(tmp_path / "t.bin"), "--samples", "--json"]) == 0
    assert "the cat sat" in json.loads(capsys.readouterr().out)["samples"][0]["text"]


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "bad.json"))
