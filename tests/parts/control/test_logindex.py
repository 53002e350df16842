import asyncio
import functools
import os
import time

import pytest

from argosy.control import logindex
from argosy.control.logindex import LogIndex, last_indexed_end
from argosy.telemetry.logs import INDEX_RECORD, LogReader
from argosy.telemetry.rundir import LogName, index_path, log_path, logs_directory


def in_loop(test):
    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 30))

    return run


async def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def paths(tmp_path):
    os.makedirs(logs_directory(str(tmp_path)), exist_ok=True)
    return [
        log_path(str(tmp_path), LogName(role="a", index=0, number=0, stream=stream))
        for stream in ("out", "err")
    ]


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


def records(path):
    with open(index_path(path), "rb") as file:
        return list(INDEX_RECORD.iter_unpack(file.read()))


@in_loop
async def test_every_growth_is_indexed_with_its_time(tmp_path):
    out, err = paths(tmp_path)
    index = LogIndex(lambda *_: None)
    index.watch("a1", "r", [out, err], 1 << 30)
    begin = time.time_ns()
    append(out, b"one\n")
    await until(lambda: last_indexed_end(index_path(out)) == 4)
    append(err, b"error\n")
    append(out, b"two\n")
    await until(lambda: last_indexed_end(index_path(out)) == 8)
    await until(lambda: last_indexed_end(index_path(err)) == 6)
    times = [at for at, _ in records(out)]
    assert begin <= times[0] <= times[-1] <= time.time_ns()
    assert next(LogReader(str(tmp_path)).lines()).text == "one"
    index.close()


@in_loop
async def test_many_writes_make_few_records(tmp_path):
    out, _ = paths(tmp_path)
    index = LogIndex(lambda *_: None)
    index.watch("a1", "r", [out], 1 << 30)
    for _ in range(500):
        append(out, b"x\n")
        await asyncio.sleep(0)
    await until(lambda: last_indexed_end(index_path(out)) == 1000)
    assert len(records(out)) < 100
    index.close()


@in_loop
async def test_what_came_before_the_watch_and_last_is_indexed(tmp_path):
    out, _ = paths(tmp_path)
    append(out, b"early\n")
    index = LogIndex(lambda *_: None)
    index.watch("a1", "r", [out], 1 << 30)
    assert last_indexed_end(index_path(out)) == 6
    append(out, b"last words\n")
    index.forget("a1")
    assert last_indexed_end(index_path(out)) == 17
    assert index.statistics() == {"num_files": 0}
    index.close()


@in_loop
async def test_a_new_agent_goes_on_where_the_old_one_stopped(tmp_path):
    out, _ = paths(tmp_path)
    first = LogIndex(lambda *_: None)
    first.watch("a1", "r", [out], 1 << 30)
    append(out, b"a\n")
    first.close()
    second = LogIndex(lambda *_: None)
    second.watch("a1", "r", [out], 1 << 30)
    assert [end for _, end in records(out)] == [2]
    append(out, b"b\n")
    await until(lambda: [end for _, end in records(out)] == [2, 4])
    second.close()


@in_loop
async def test_output_over_its_limit_loses_its_head_and_keeps_its_end(tmp_path):
    out, err = paths(tmp_path)
    index = LogIndex(lambda *_: None)
    index.watch("a1", "r", [out, err], 100_000)
    for number in range(60_000):
        if number % 5000 == 0:
            await asyncio.sleep(0.06)
        append(out, b"line %08d\n" % number)
    index.forget("a1")
    with open(out, "rb") as file:
        first = os.lseek(file.fileno(), 0, os.SEEK_DATA)
    if first == 0:
        pytest.skip("this file system cannot punch holes")
    size = os.path.getsize(out)
    assert size == 60_000 * 14
    assert size - first <= 100_000 + 4096
    assert os.stat(out).st_blocks * 512 < 400_000
    lines = [line.text for line in LogReader(str(tmp_path)).lines()]
    assert lines[-1] == "line 00059999"
    assert all(line.startswith("line ") and len(line) == 13 for line in lines)
    index.close()


@in_loop
async def test_a_disk_that_fills_is_reported_once_per_run(tmp_path, monkeypatch):
    monkeypatch.setattr(logindex, "LOW_SPACE_BYTES", 1 << 62)
    monkeypatch.setattr(logindex, "_SPACE_EVERY_SECONDS", 0.0)
    told = []
    out, err = paths(tmp_path)
    index = LogIndex(lambda run, attempt, text: told.append((run, attempt, text)))
    index.watch("a1", "r", [out, err], 1 << 30)
    for path in (out, err, out):
        append(path, b"x\n")
        await until(lambda path=path: last_indexed_end(index_path(path)) == os.path.getsize(path))
    assert [(run, attempt) for run, attempt, _ in told] == [("r", "a1")]
    assert "nearly full" in told[0][2]
    index.close()


@in_loop
async def test_a_truncated_file_is_indexed_from_its_new_beginning(tmp_path):
    out, _ = paths(tmp_path)
    index = LogIndex(lambda *_: None)
    index.watch("a1", "r", [out], 1 << 30)
    append(out, b"a long old line\n")
    await until(lambda: last_indexed_end(index_path(out)) == 16)
    os.truncate(out, 0)
    append(out, b"new\n")
    await until(lambda: last_indexed_end(index_path(out)) == 4)
    assert [line.text for line in LogReader(str(tmp_path)).lines()] == ["new"]
    index.close()
