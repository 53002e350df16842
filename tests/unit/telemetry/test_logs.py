import ctypes
import os

import pytest

from argosy.telemetry import logs
from argosy.telemetry.logs import INDEX_RECORD, LogReader
from argosy.telemetry.rundir import LogName, index_path, log_path, logs_directory, parse_log_name


class Output:
    """One process's output file with its index, written as the keeper and the agent do."""

    def __init__(self, run, role="train", index=0, number=0, stream="out"):
        os.makedirs(logs_directory(run), exist_ok=True)
        name = LogName(role=role, index=index, number=number, stream=stream)
        self.path = log_path(run, name)
        self.size = 0

    def write(self, text, at=None):
        data = text if isinstance(text, bytes) else text.encode()
        with open(self.path, "ab") as file:
            file.write(data)
        self.size = os.path.getsize(self.path)
        if at is not None:
            self.mark(at)

    def mark(self, at):
        with open(index_path(self.path), "ab") as file:
            file.write(INDEX_RECORD.pack(int(at * 1e9), self.size))

    def punch(self, end):
        libc = ctypes.CDLL(None, use_errno=True)
        with open(self.path, "r+b") as file:
            done = libc.fallocate(file.fileno(), 0x03, ctypes.c_long(0), ctypes.c_long(end))
        if done:
            pytest.skip("this file system cannot punch holes")


@pytest.fixture
def run(tmp_path):
    return str(tmp_path)


def texts(lines):
    return [line.text for line in lines]


def test_lines_of_several_processes_come_in_order_of_arrival(run):
    first, second = Output(run, index=0), Output(run, index=1)
    first.write("a\n", at=1)
    second.write("b\n", at=2)
    first.write("c\nd\n", at=3)
    lines = list(LogReader(run).lines())
    assert texts(lines) == ["a", "b", "c", "d"]
    assert [line.at for line in lines] == [1, 2, 3, 3]
    assert [line.index for line in lines] == [0, 1, 0, 0]


def test_each_line_is_read_once_when_following(run):
    output = Output(run)
    reader = LogReader(run)
    assert reader.read_new() == []
    output.write("a\nb", at=1)
    assert texts(reader.read_new()) == ["a"]
    output.write("c\n", at=2)
    assert texts(reader.read_new()) == ["bc"]
    assert reader.read_new() == []


def test_an_unfinished_line_is_given_only_when_asked_for(run):
    output = Output(run)
    output.write("prompt> ", at=1)
    reader = LogReader(run)
    assert reader.read_new() == []
    assert reader.has_unfinished
    (line,) = reader.read_new(should_flush=True)
    assert (line.text, line.partial) == ("prompt> ", True)
    output.write("yes\n", at=2)
    assert texts(reader.read_new()) == ["yes"]


def test_what_the_index_does_not_cover_has_the_time_of_the_file(run):
    output = Output(run)
    output.write("a\n", at=1)
    output.write("b\n")
    os.utime(output.path, (50, 50))
    assert [line.at for line in LogReader(run).lines()] == [1, 50]


def test_files_that_appear_later_are_found(run):
    reader = LogReader(run)
    Output(run).write("a\n", at=1)
    assert texts(reader.read_new()) == ["a"]
    Output(run, number=1).write("again\n", at=2)
    (line,) = reader.read_new()
    assert (line.text, line.number) == ("again", 1)


def test_one_role_or_one_process_can_be_asked_for(run):
    Output(run, role="train", index=0).write("a\n", at=1)
    Output(run, role="train", index=1).write("b\n", at=2)
    Output(run, role="eval", index=1, stream="err").write("c\n", at=3)
    assert texts(LogReader(run, role="train").lines()) == ["a", "b"]
    assert texts(LogReader(run, index=1).lines()) == ["b", "c"]


def test_a_dropped_head_is_skipped_together_with_the_line_it_cuts(run):
    output = Output(run)
    output.write("".join(f"line {number:05}\n" for number in range(2000)), at=1)
    output.punch(8192)
    found = list(LogReader(run).lines())
    lines = texts(found)
    assert lines[-1] == "line 01999"
    assert all(line.startswith("line ") and len(line) == 10 for line in lines)
    num_dropped = 8192 // 11 + 1
    assert len(lines) == 2000 - num_dropped
    assert [line.dropped for line in found] == [11 * num_dropped, *[0] * (len(lines) - 1)]
    assert [line.dropped for line in LogReader(run).tail(3)] == [0, 0, 0]
    assert LogReader(run).tail(5000)[0].dropped == 11 * num_dropped


def test_a_follower_survives_that_the_head_is_dropped_before_it(run):
    output = Output(run)
    reader = LogReader(run)
    output.write("seen\n", at=1)
    assert texts(reader.read_new()) == ["seen"]
    output.write("begun ")
    assert texts(reader.read_new()) == []
    output.write("x" * 8185 + "\n" + "y" * 8191 + "\nlast\n", at=2)
    output.punch(12288)
    (line,) = reader.read_new()
    assert (line.text, line.dropped) == ("last", 2 * 8192)


def test_a_truncated_file_is_read_anew(run):
    output = Output(run)
    reader = LogReader(run)
    output.write("old old old\n", at=1)
    assert texts(reader.read_new()) == ["old old old"]
    os.truncate(output.path, 0)
    output.write("new\n", at=5)
    (line,) = reader.read_new()
    assert (line.text, line.at) == ("new", 5)


def test_tail_gives_the_last_lines_of_all_processes(run):
    first, second = Output(run, index=0), Output(run, index=1)
    for number in range(100):
        (first if number % 2 else second).write(f"{number}\n", at=number + 1)
    reader = LogReader(run)
    assert texts(reader.tail(3)) == ["97", "98", "99"]
    first.write("100\n", at=200)
    assert texts(reader.read_new()) == ["100"]


@pytest.mark.parametrize("num_lines", [0, 1, 2, 3, 10])
def test_tail_of_a_file_with_an_unfinished_line(run, num_lines):
    output = Output(run)
    output.write("a\nb\nc", at=1)
    assert texts(LogReader(run).tail(num_lines)) == ["a", "b", "c"][3 - min(num_lines, 3) :]


def test_tail_reaches_back_over_several_blocks(run, monkeypatch):
    monkeypatch.setattr(logs, "_TAIL_BLOCK_BYTES", 7)
    output = Output(run)
    output.write("".join(f"{number}\n" for number in range(50)), at=1)
    assert texts(LogReader(run).tail(20)) == [str(number) for number in range(30, 50)]


def test_a_line_without_end_comes_in_pieces(run):
    output = Output(run)
    length = logs.MOST_LINE_BYTES * 5 + 17
    output.write("z" * length, at=1)
    lines = list(LogReader(run).lines())
    assert "".join(texts(lines)) == "z" * length
    assert all(line.partial for line in lines)


def test_bytes_that_are_no_text_do_not_stop_the_reader(run):
    output = Output(run)
    output.write(b"\xff\xfe\x00ok\r\nnext\n", at=1)
    assert texts(LogReader(run).lines()) == ["\ufffd\ufffd\x00ok", "next"]


def test_names_of_other_files_are_no_logs():
    assert parse_log_name("a.b.3.1.out") == LogName(role="a.b", index=3, number=1, stream="out")
    for name in ("train.0.0.out.index", "x.out", ".0.0.out", "train.a.0.err", "train.0.0.txt"):
        assert parse_log_name(name) is None
