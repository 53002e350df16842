"""Token files say what they are; one that is not what it says is refused in two lines."""

import os
import pickle
import resource
import shutil
import signal

import numpy as np
import pytest

from argosy.data.tokenfiles import TokenFile, documents_path, hash_spots, read_sidecar, sidecar_path
from argosy.data.tokenizers import ByteTokenizer
from argosy.data.tokenwriter import TokenWriter
from argosy.errors import DataError


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "code.bin"
    with TokenWriter(path, ByteTokenizer(), made_from="a test") as writer:
        writer.append_documents([bytes([65 + number % 26]) * 300 for number in range(100)])
        writer.close()
    return path


def refusal(path, dtype=None):
    with pytest.raises(DataError) as caught:
        TokenFile(path, dtype)
    assert caught.value.fix
    assert "\n" not in caught.value.what + caught.value.fix
    return caught.value.what


def test_a_written_file_opens_and_verifies(packed):
    file = TokenFile(packed)
    assert (file.count, file.dtype) == (100 * 301, "uint16")
    assert file.tokens[:301].tolist() == [65] * 300 + [256]
    assert file.ends().tolist() == [301 * (number + 1) for number in range(100)]
    assert file.sidecar.vocabulary_size == 257
    file.verify()
    assert sorted(os.listdir(packed.parent)) == ["code.bin", "code.bin.documents", "code.bin.json"]


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with TokenWriter(tmp_path / "x.bin", ByteTokenizer()) as writer:
        writer.append_documents([b"text"])
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_named(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
    try:
        with (
            TokenWriter(tmp_path / "x.bin", ByteTokenizer()) as writer,
            pytest.raises(DataError, match=r"cannot write .*x\.bin"),
        ):
            writer.append_documents([b"x" * (1 << 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_without_tokens(tmp_path):
    with pytest.raises(DataError), TokenWriter(tmp_path / "x.bin", ByteTokenizer()) as writer:
        writer.close()
    assert os.listdir(tmp_path) == []


def test_a_file_of_another_dtype_is_refused(packed):
    assert "holds uint16, not uint32" in refusal(packed, "uint32")
    assert "int8" in refusal(packed, "int8")


def test_a_file_cut_short_is_refused(packed):
    os.truncate(packed, 1000)
    assert "cut short: 1000 bytes" in refusal(packed)


def test_an_empty_and_a_missing_file_and_a_directory_are_refused(tmp_path):
    (tmp_path / "empty.bin").touch()
    assert "is empty" in refusal(tmp_path / "empty.bin", "uint16")
    assert "No such file" in refusal(tmp_path / "nowhere.bin", "uint16")
    assert "not a file" in refusal(tmp_path, "uint16")


def test_other_bytes_of_the_same_size_are_refused(packed):
    with open(packed, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"changed!")
    assert "other bytes" in refusal(packed)


def test_a_change_between_the_spots_is_found_by_reading_all(tmp_path):
    path = tmp_path / "large.bin"
    with TokenWriter(path, ByteTokenizer()) as writer:
        writer.append(np.arange(1_000_000) % 251, [1_000_000])
        writer.close()
    with open(path, "r+b") as file:
        file.seek(20_000)
        file.write(b"!!")
    with pytest.raises(DataError, match="SHA-256"):
        TokenFile(path).verify()


@pytest.mark.parametrize("text", ["", "[]", '{"dtype": "uint16"}', '{"kind": "sheep"}', "\xff"])
def test_a_sidecar_that_is_none_is_refused(packed, text):
    sidecar_path(packed).write_text(text, encoding="latin-1")
    assert "no sidecar" in refusal(packed)


def test_a_sidecar_of_a_later_format_is_refused(packed):
    text = sidecar_path(packed).read_text()
    sidecar_path(packed).write_text(text.replace('"format": 1', '"format": 2'))
    assert "format 2" in refusal(packed)


def test_a_raw_file_needs_a_dtype_and_is_looked_at(tmp_path):
    path = tmp_path / "raw.bin"
    np.arange(1, 5000, dtype="<u2").tofile(path)
    assert "has no raw.bin.json" in refusal(path)
    assert TokenFile(path, "uint16").count == 4999
    assert "no whole number of uint32" in refusal(path, "uint32")
    np.arange(1, 5001, dtype="<u2").tofile(path)
    assert "look like uint32 but like uint16" in refusal(path, "uint32")
    np.arange(1, 5000, dtype="<u4").tofile(path)
    assert "look like uint16 but like uint32" in refusal(path, "uint16")
    assert TokenFile(path, "uint32").tokens[-1] == 4999
    path.write_bytes(b"odd")
    assert "no whole number" in refusal(path, "uint16")
    np.save(tmp_path / "array.npy", np.arange(100, dtype="<u2"))
    assert ".npy file" in refusal(tmp_path / "array.npy", "uint16")


def test_a_change_while_it_is_open_is_refused(packed):
    file = TokenFile(packed)
    file.check_unchanged()
    with open(packed, "r+b") as other:
        other.write(b"another beginning")
    with pytest.raises(DataError, match="changed since the run began"):
        file.check_unchanged()


def test_a_file_cut_short_while_it_is_open_is_refused_and_not_read(packed):
    file = TokenFile(packed)
    os.truncate(packed, 10)
    with pytest.raises(DataError, match="changed since the run began"):
        file.check_unchanged()


def test_a_touched_or_recopied_file_is_the_same_file(packed):
    file = TokenFile(packed)
    os.utime(packed, ns=(1, 1))
    file.check_unchanged()
    shutil.copy(packed, packed.with_name("copy"))
    os.replace(packed.with_name("copy"), packed)
    file.check_unchanged()


def test_fingerprints_tell_contents_apart_not_places(packed, tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    for path in (packed, sidecar_path(packed), documents_path(packed)):
        shutil.copy(path, other)
    assert TokenFile(other / "code.bin").fingerprint == TokenFile(packed).fingerprint
    raw = tmp_path / "raw.bin"
    np.arange(1, 99, dtype="<u2").tofile(raw)
    before = TokenFile(raw, "uint16").fingerprint
    np.arange(2, 100, dtype="<u2").tofile(raw)
    assert TokenFile(raw, "uint16").fingerprint != before


def test_an_index_of_other_documents_is_refused(packed):
    documents_path(packed).write_bytes(b"\1" * 16)
    with pytest.raises(DataError, match="does not belong"):
        TokenFile(packed).ends()
    documents_path(packed).unlink()
    with pytest.raises(DataError, match="cannot be read"):
        TokenFile(packed).ends()


def test_spots_cover_small_files_whole():
    tokens = np.arange(100, dtype="<u2")
    changed = tokens.copy()
    changed[57] += 1
    assert hash_spots(tokens) != hash_spots(changed)
    assert hash_spots(tokens) != hash_spots(tokens[:-1])


def test_another_process_gets_the_path_not_the_tokens(packed):
    text = pickle.dumps(TokenFile(packed))
    assert len(text) < 1000
    assert pickle.loads(text).fingerprint == TokenFile(packed).fingerprint


def test_no_sidecar_is_none(tmp_path):
    assert read_sidecar(tmp_path / "x.bin") is None
