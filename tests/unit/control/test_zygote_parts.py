import json
import os
import socket
import struct
import subprocess
import sys

import pytest

from argosy.control.zygote import errorfile
from argosy.control.zygote.assignment import BatchError, read_batch
from argosy.control.zygote.frames import Channel, FrameError
from argosy.control.zygote.kernel import ExecMemory
from argosy.control.zygote.preload import PreloadError, Preloads
from argosy.control.zygote.surroundings import Surroundings, expand_python_path


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_frames_and_descriptors_arrive_together_and_in_order(pair):
    channel, theirs = pair
    other = Channel(theirs)
    read_end, write_end = os.pipe()
    other.send({"type": "a", "fds": 2}, [read_end, write_end])
    other.send({"type": "b", "text": "é\udcff" * 5_000})
    message, descriptors = channel.receive()
    assert message["type"] == "a"
    os.write(descriptors[1], b"x")
    assert os.read(read_end, 1) == b"x"
    for descriptor in (read_end, write_end, *descriptors):
        os.close(descriptor)
    assert channel.receive() == ({"type": "b", "text": "é\udcff" * 5_000}, [])
    other.close()
    assert channel.receive() is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", "4294967295 bytes"),
        (b"\0\0\0\x03abc", "not JSON"),
        (b"\0\0\0\x02[]", "not a JSON object"),
        (b'\0\0\0\x09{"a"', "ended after 4 of 9"),
        (b"\0\0", "ended after 2 of 4"),
        (struct.pack(">I", 9) + b'{"fds":1}', "0 descriptors came with a frame naming 1"),
    ],
)
def test_what_is_no_frame_is_an_error(pair, data, words):
    channel, theirs = pair
    theirs.sendall(data)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(FrameError, match=words):
        channel.receive()


def surroundings(mark_room=100):
    return Surroundings(
        memory=ExecMemory(mark_room=mark_room),
        library_path=("/lib/a", "/lib/b"),
        coerced_locale="",
        affinity=frozenset({0}),
    )


def item(**fields):
    program = {"kind": "script", "path": "train.py", "args": []}
    return {"attempt": "a", "program": program, "env": {}, "cwd": "/", **fields}


def test_descriptors_are_dealt_in_the_order_of_the_attempts():
    message = {
        "keeper": 7,
        "attempts": [item(secret_names=["one", "two"]), item(attempt="b", mark="m")],
    }
    first, second = read_batch(message, list(range(10, 18)), surroundings())
    assert (first.gate, first.stdout, first.stderr) == (10, 11, 12)
    assert first.secrets == {"one": 13, "two": 14}
    assert (second.gate, second.stdout, second.stderr, second.secrets) == (15, 16, 17, {})
    assert (second.attempt, second.mark, second.keeper) == ("b", "m", 7)


@pytest.mark.parametrize(
    ("attempts", "count", "words"),
    [
        ([], 0, "without attempts"),
        ([item()], 2, "malformed"),
        ([item()], 4, "1 descriptors too many"),
        ([item(program={"kind": "exec", "argv": ["ls"]})], 3, "'exec' is not started by a fork"),
        ([item(program=None)], 3, "malformed"),
        ([item(mark="m" * 101)], 3, "the mark needs 101 bytes"),
        ([item(umask="wide open")], 3, "malformed"),
        (["text"], 3, "malformed"),
    ],
)
def test_a_batch_that_cannot_be_forked_is_refused_as_a_whole(attempts, count, words):
    with pytest.raises(BatchError, match=words):
        read_batch({"keeper": 7, "attempts": attempts}, list(range(10, 10 + count)), surroundings())


def test_the_import_directory_is_the_scripts_or_the_working_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    def directory(program):
        message = {"keeper": 1, "attempts": [item(program=program, cwd=str(tmp_path))]}
        return read_batch(message, [1, 2, 3], surroundings())[0].import_directory()

    real = os.path.realpath(tmp_path)
    assert directory({"kind": "script", "path": "link/train.py"}) == f"{real}/real"
    assert directory({"kind": "script", "path": "link"}) == f"{real}/real"
    assert directory({"kind": "module", "name": "train"}) == real


def test_the_search_path_is_made_anew_for_the_ranks_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = os.getcwd()
    made = surroundings().search_path("/first", "relative::/lib/b:relative")
    assert made == ["/first", f"{here}/relative", here, "/lib/b", "/lib/a"]
    assert surroundings().search_path(None, "") == ["/lib/a", "/lib/b"]
    assert expand_python_path("") == []


def test_a_preload_that_exits_is_an_error_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "leaving_early.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")
    with pytest.raises(PreloadError, match="SystemExit") as caught:
        Preloads().load(["json", "leaving_early"])
    assert caught.value.module == "leaving_early"
    assert caught.value.error == "SystemExit: 3", "people are told the last line"
    assert "leaving_early.py" in str(caught.value), "the log has the traceback"


def test_a_preload_with_a_question_mark_is_left_out_where_it_cannot_be_imported(
    tmp_path, monkeypatch
):
    (tmp_path / "leaving_early_too.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")
    preloads = Preloads()
    preloads.load(["json?", "there_is_no_such_module?", "leaving_early_too?"])
    assert preloads.modules == ["json"]


def test_imported_files_from_elsewhere_are_known_with_their_times(tmp_path, monkeypatch):
    file = tmp_path / "from_a_checkout.py"
    file.write_text("x = 1")
    os.utime(file, ns=(5, 5))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")
    preloads = Preloads()
    preloads.load(["from_a_checkout", "json"])
    sources = preloads.sources()
    assert sources[str(file)] == 5
    assert json.__file__ not in sources
    os.utime(file)
    assert preloads.sources()[str(file)] == 0, "changed since: nobody knows which was read"


def test_only_files_that_a_fresh_interpreter_would_import_shadow(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")
    preloads = Preloads()
    for name in ("train.py", "os.py", "sys.py", "encodings.py", "json.txt"):
        (tmp_path / name).touch()
    (tmp_path / "json").mkdir()
    assert preloads.find_shadow(str(tmp_path)) == ""
    (tmp_path / "json" / "__init__.py").touch()
    assert preloads.find_shadow(str(tmp_path)) == "json"
    assert preloads.find_shadow(str(tmp_path / "absent")) == ""


def test_the_error_file_survives_odd_exceptions(tmp_path):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("not even a text")

    path = tmp_path / "error.json"
    errorfile.write(str(path), Odd())
    assert json.loads(path.read_text())["message"]["message"].startswith("Odd: <")
    errorfile.write(str(path), ValueError("later"))
    assert "later" not in path.read_text()
    errorfile.write(str(tmp_path / "absent" / "error.json"), ValueError())
    assert os.listdir(tmp_path) == ["error.json"]


def test_a_huge_exception_is_cut(tmp_path):
    path = tmp_path / "error.json"
    errorfile.write(str(path), ValueError("x" * 1_000_000))
    assert path.stat().st_size < 300_000


def test_this_process_knows_where_its_exec_memory_is():
    memory = ExecMemory.find()
    assert memory.command_room > 0
    assert "PATH" in memory.names
    with pytest.raises(ValueError, match="does not fit"):
        ExecMemory(mark_room=3).write_mark("four")


def test_signals_of_a_fresh_interpreter_are_left_alone():
    program = "from argosy.control.zygote import kernel; print(kernel.find_touched_signals())"

    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout == "()\n", shown.stderr
    program = f"import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); {program}"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout == "(2, 10, 13, 25)\n", shown.stderr
