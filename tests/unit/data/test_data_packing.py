"""Packing: the same inputs give the same bytes, however many workers; bad inputs are refused before anything is written."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from argosy.cli.app import main
from argosy.data import inputs as inputs_module
from argosy.data import shards as shards_module
from argosy.data.corpus import stdlib_corpus
from argosy.data.inputs import PackSettings, find_inputs, plan_shards
from argosy.data.packing import pack
from argosy.data.tokenfiles import TokenFile
from argosy.data.tokenizers import ByteTokenizer
from argosy.errors import ArgosyError, ConfigError, DataError


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "code"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.py").write_text("b = 1\n")
    (folder / "a.py").write_text("a = 'ä'\n")
    (folder / "inner" / "c.py").write_text("c\n")
    (folder / "empty.py").touch()
    (folder / "binary.py").write_bytes(b"\0\1\2")
    (folder / "notes.txt").write_text("not code")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.py").write_text("hidden")
    return folder


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(inputs_module, "SHARD_BYTES", 64)


def text_of(path):
    return ByteTokenizer().decode(TokenFile(path).tokens)


def test_a_directory_of_code_becomes_documents_in_sorted_order(code, tmp_path):
    packed = pack([code], tmp_path / "out.bin", PackSettings(kind="code", globs=("*.py",)))
    assert text_of(tmp_path / "out.bin") == "a = 'ä'\n␄b = 1\n␄c\n␄"
    assert (packed.documents, packed.files, packed.skipped) == (3, 5, 1)
    assert sorted(os.listdir(tmp_path)) == ["code", "out.bin", "out.bin.documents", "out.bin.json"]
    TokenFile(tmp_path / "out.bin").verify()


def test_lines_of_json_become_documents(tmp_path, small_shards):
    rows = [{"text": f"document {number} ü", "other": number} for number in range(50)]
    path = tmp_path / "x.jsonl"
    path.write_text(
        "\n".join(json.dumps(row) for row in rows[:20])
        + "\n\n"
        + "\n".join(json.dumps(row, ensure_ascii=False) for row in rows[20:])
    )
    packed = pack([path], tmp_path / "x.bin", PackSettings(kind="jsonl", field="text", workers=1))
    assert packed.shards > 10
    assert text_of(tmp_path / "x.bin") == "".join(row["text"] + "␄" for row in rows)


@pytest.mark.parametrize(
    ("line", "text"),
    [("{", "line 31 is no JSON object"), ("[1]", "line 31 is no JSON object"), ('{"body": "x"}', "line 31 has no field 'text'"),
     ('{"text": 5}', "line 31 has no text in 'text' but int")],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, small_shards, line, text):
    lines = [json.dumps({"text": f"line {number}"}) for number in range(30)]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, line, *lines]))
    with pytest.raises(DataError, match=text):
        pack([tmp_path / "x.jsonl"], tmp_path / "x.bin", PackSettings(kind="jsonl", workers=1))
    assert not (tmp_path / "x.bin").exists()


def test_a_large_text_is_one_document_however_it_is_cut(tmp_path, small_shards):
    text = "".join(f"line {number} with some words\n" for number in range(100))
    (tmp_path / "large.txt").write_text(text)
    (tmp_path / "small.txt").write_text("end")
    packed = pack(
        [tmp_path / "large.txt", tmp_path / "small.txt"],
        tmp_path / "t.bin",
        PackSettings(workers=1),
    )
    assert packed.shards > 20
    assert packed.documents == 2
    assert text_of(tmp_path / "t.bin") == text + "␄end␄"


def test_lines_are_never_cut_for_tokenizers_of_words(tmp_path, small_shards):
    text = "".join("x" * (number % 150) + "\n" for number in range(60)) + "no newline at the end"
    (tmp_path / "t.txt").write_text(text)
    shards = plan_shards([tmp_path / "t.txt"], PackSettings(tokenizer="words"), "")
    pieces = [inputs_module.read_piece(p, is_cut_at_lines=True) for s in shards for p in s.pieces]
    assert b"".join(pieces).decode() == text
    assert all(piece.endswith(b"\n") for piece in pieces[:-3] if piece)


def test_work_that_was_done_is_not_done_again(tmp_path, small_shards, monkeypatch):
    (tmp_path / "t.txt").write_text("some words and more\n" * 100)
    done = []
    real = shards_module.write_shard

    def dying(directory, shard, settings, tokenizer):
        if len(done) == 7:
            raise KeyboardInterrupt
        done.append(shard.identity)
        return real(directory, shard, settings, tokenizer)

    monkeypatch.setattr("argosy.data.packing.write_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        pack([tmp_path / "t.txt"], tmp_path / "t.bin", PackSettings(workers=1))
    assert sorted(os.listdir(tmp_path)) == ["t.bin.partial", "t.txt"]
    # A shard that is not whole is made again.
    next((tmp_path / "t.bin.partial").glob("*.tokens")).write_bytes(b"")
    monkeypatch.setattr("argosy.data.packing.write_shard", real)
    packed = pack([tmp_path / "t.txt"], tmp_path / "t.bin", PackSettings(workers=1))
    assert packed.resumed_shards == 6
    assert text_of(tmp_path / "t.bin") == "some words and more\n" * 100 + "␄"
    whole = pack([tmp_path / "t.txt"], tmp_path / "u.bin", PackSettings(workers=1))
    assert (whole.sha256, whole.resumed_shards) == (packed.sha256, 0)


def test_changed_inputs_are_packed_again(tmp_path, small_shards):
    (tmp_path / "t.txt").write_text("before\n" * 50)
    settings = PackSettings(workers=1)
    shards = plan_shards(find_inputs([tmp_path / "t.txt"], settings), settings, "")
    (tmp_path / "t.txt").write_text("after!\n" * 50)
    os.utime(tmp_path / "t.txt", ns=(5, 5))
    with pytest.raises(DataError, match="changed while"):
        shards_module.write_shard(tmp_path, shards[0], settings, ByteTokenizer())


@pytest.mark.parametrize(
    ("inputs", "out", "text"),
    [(["nowhere.txt"], "o.bin", "there is no file"), (["t.txt"], "t.txt", "exists"), (["t.txt"], ".", "is a directory"),
     (["t.txt"], "no/such/o.bin", "does not exist"), ([], "o.bin", "nothing to pack"), (["folder"], "o.bin", "matches"), (["empty.txt"], "o.bin", "no tokens")],
)  # fmt: skip
def test_bad_requests_are_refused_and_nothing_is_lost(tmp_path, monkeypatch, inputs, out, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("kept")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArgosyError, match=text):
        pack(inputs, out)
    assert (tmp_path / "t.txt").read_text() == "kept"
    assert not (tmp_path / "o.bin").exists()


def test_an_existing_file_is_replaced_only_on_request(tmp_path):
    (tmp_path / "t.txt").write_text("new")
    pack([tmp_path / "t.txt"], tmp_path / "t.bin")
    with pytest.raises(ConfigError, match="--overwrite"):
        pack([tmp_path / "t.txt"], tmp_path / "t.bin")
    (tmp_path / "t.txt").write_text("newer")
    pack([tmp_path / "t.txt"], tmp_path / "t.bin", PackSettings(should_overwrite=True))
    assert text_of(tmp_path / "t.bin") == "newer␄"


def test_a_missing_tokenizer_library_is_named_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(ConfigError) as caught:
        pack([tmp_path / "t.txt"], tmp_path / "t.bin", PackSettings(tokenizer="gpt2"))
    assert "'gpt2' needs the package tokenizers" in caught.value.what
    assert ".[tokenizers]" in caught.value.fix
    assert os.listdir(tmp_path) == ["t.txt"]


def test_the_command_packs_and_shows(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["data", "pack", "--code", "code", "--glob", "*.py", "--out", "c.bin", "--json"]) == 0
    )
    packed = json.loads(capsys.readouterr().out)
    assert (packed["documents"], packed["dtype"], packed["vocabulary_size"]) == (3, "uint16", 257)
    assert main(["data", "show", "c.bin", "--json", "--samples", "--verify"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tokens"] == packed["tokens"]
    assert shown["samples"][0]["text"].startswith("a = 'ä'\n␄")
    assert packed["sha256"] in shown["fingerprint"]
    assert main(["data", "show", "c.bin", "--samples"]) == 0
    assert "c\n␄" in capsys.readouterr().out
    assert main(["data", "pack", "code", "--out", "c.bin"]) == 64
    assert main(["data", "pack", "--out", "d.bin"]) == 64
    assert main(["data", "pack", "code"]) == 64
    assert main(["data", "pack", "code", "code/notes.txt", "--out", "d.bin"]) == 64
    assert main(["data", "pack", "--text", "--jsonl", "x", "code", "--out", "d.bin"]) == 64
    (tmp_path / "c.bin").write_bytes(b"short")
    assert main(["data", "show", "c.bin"]) == 65
    assert "cut short" in capsys.readouterr().err


def test_the_command_never_imports_torch():
    program = "import sys, argosy.cli.data, argosy.data.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_corpus_is_the_same_each_time_and_not_made_twice(tmp_path):
    first = stdlib_corpus(tmp_path / "one.bin", max_bytes=200_000)
    second = stdlib_corpus(tmp_path / "deep" / "two.bin", max_bytes=200_000)
    assert TokenFile(first).fingerprint == TokenFile(second).fingerprint
    assert 100_000 < TokenFile(first).count < 210_000
    before = first.stat()
    assert stdlib_corpus(first, max_bytes=200_000) == first
    assert first.stat() == before or first.stat().st_ino == before.st_ino
    (tmp_path / "mine.bin").write_bytes(b"my own")
    with pytest.raises(DataError, match="is not the standard library"):
        stdlib_corpus(tmp_path / "mine.bin")
    assert (tmp_path / "mine.bin").read_bytes() == b"my own"


def test_byte_tokens_show_as_text():
    tokens = np.array([*"häß".encode(), 256, 65, 256], "<u2")
    assert ByteTokenizer().decode(tokens) == "häß␄A␄"


def test_of_a_directory_without_code_the_ending_of_its_files_is_named(tmp_path, capsys):
    folder = tmp_path / "books"
    folder.mkdir()
    assert main(["data", "pack", str(folder), "--out", str(tmp_path / "b.bin")]) == 64
    assert "name a directory that has files in it" in capsys.readouterr().err
    for name in ("a.txt", "b.txt", "c.rtf"):
        (folder / name).write_text("words\n")
    assert main(["data", "pack", str(folder), "--out", str(tmp_path / "b.bin")]) == 64
    assert "--glob '*.txt'" in capsys.readouterr().err


def test_input_that_is_refused_at_once_leaves_no_directory(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("no JSON\n")
    assert main(["data", "pack", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "a.bin")]) == 65
    assert os.listdir(tmp_path) == ["a.jsonl"]
