from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.control.keeper.census import MARK_BYTES, cluster_key, look_at, make_mark
from argosy.control.keeper.outbox import MOST_ERROR_BYTES, Outbox, bounded_error, bounded_text
from argosy.control.keeper.records import Records, file_name


def make_outbox(tmp_path):
    records = Records(str(tmp_path))
    records.make_directories()
    outbox = Outbox("k", records)
    sent = []
    outbox.send = lambda frame: sent.append((frame["number"], frame["event"]["event"]))
    return outbox, records, sent


def exited(attempt):
    return {"event": "exited", "attempt": attempt, "run": "r", "code": 0, "at": 1.0}


def test_events_are_numbered_kept_and_sent_again_until_acknowledged(tmp_path):
    outbox, records, sent = make_outbox(tmp_path)
    outbox.emit({"event": "started", "attempt": "a"})
    outbox.emit(exited("a"))
    outbox.emit({"event": "started", "attempt": "b"})
    assert [(keeper, number) for keeper, number, _ in records.read_exits()] == [("k", 2)]
    sent.clear()
    assert outbox.acknowledge(2) == ["a"]
    assert outbox.tidy() is False
    assert records.read_exits() == []
    outbox.resend()
    assert sent == [(3, "started")]


def test_what_workers_say_gives_way_and_exits_never_do(tmp_path):
    outbox, _, sent = make_outbox(tmp_path)
    outbox.emit(exited("a"))
    for step in range(5000):
        outbox.emit({"event": "link", "attempt": "b", "run": "r", "message": {"step": step}})
    sent.clear()
    outbox.resend()
    assert sent[0] == (1, "exited")
    assert len(sent) == 257
    assert sent[-1][0] == 5001


def test_a_disk_that_refuses_is_told_once_and_nothing_is_lost(tmp_path):
    outbox, records, sent = make_outbox(tmp_path)
    records.exits = f"{tmp_path}/gone"
    outbox.emit(exited("a"))
    outbox.emit(exited("b"))
    assert sent == [(1, "exited"), (2, "note"), (3, "exited")]


def test_exits_of_a_dead_keeper_are_reported_once_under_the_new_one(tmp_path):
    old, records, _ = make_outbox(tmp_path)
    old.emit(exited("a"))
    new = Outbox("k2", records)
    for keeper, number, event in records.read_exits():
        new.adopt(keeper, number, event)
    assert [(keeper, number) for keeper, number, _ in records.read_exits()] == [("k2", 1)]
    third = Outbox("k3", records)
    for keeper, number, event in records.read_exits():
        third.adopt(keeper, number, event)
        # The first keeper's name stays: the log may have the event already.
        assert third.to_state()["waiting"][0][1]["was"] == ["k", 1]
    third.acknowledge(1)
    third.tidy()
    assert records.read_exits() == []


def test_records_of_many_acknowledged_exits_are_removed_a_few_at_a_time(tmp_path):
    outbox, records, _ = make_outbox(tmp_path)
    for number in range(10):
        outbox.emit(exited(f"a{number}"))
    outbox.acknowledge(9)
    assert outbox.tidy(4) is True
    assert [number for _, number, _ in records.read_exits()] == [5, 6, 7, 8, 9, 10]
    # A successor program would not know of those that are left.
    outbox.to_state()
    assert [number for _, number, _ in records.read_exits()] == [10]


def test_a_shorter_record_in_the_place_of_a_longer_one_leaves_nothing_of_it(tmp_path):
    records = Records(str(tmp_path))
    records.make_directories()
    records.write_attempt("a", {"attempt": "a", "pid": 1, "cgroup": "x" * 100})
    records.write_attempt("a", {"attempt": "a", "pid": 2})
    assert records.read_attempts() == [{"attempt": "a", "pid": 2}]


def test_half_a_record_is_no_record(tmp_path):
    records = Records(str(tmp_path))
    records.make_directories()
    records.write_attempt("good", {"attempt": "good", "pid": 1})
    (tmp_path / "attempts" / "bad.json").write_text('{"attempt": "b')
    assert [record["attempt"] for record in records.read_attempts()] == ["good"]
    records.remove_attempts()
    assert os.listdir(tmp_path / "attempts") == []


@given(st.text(min_size=1, max_size=300))
def test_no_attempt_id_leaves_the_directory(attempt):
    name = file_name(attempt)
    assert "/" not in name
    assert not name.startswith(".")
    assert len(os.fsencode(name)) <= 255


def test_attempts_that_look_alike_have_different_files():
    names = ["a/b", "a_b", "a:b", "a b", "ä", "", ".", "..", "x" * 201, "x" * 202]
    assert len({file_name(name) for name in names}) == len(names)


@given(st.text(min_size=1, max_size=300))
def test_every_mark_has_the_same_length_so_that_it_can_be_overwritten_in_place(attempt):
    mark = make_mark("c" * 16, "k" * 12, attempt)
    assert len(mark.encode()) == MARK_BYTES
    assert mark.startswith("c" * 16 + ".")


def test_marks_of_different_attempts_differ():
    names = ["a", "a.", "b" * 150, "b" * 151, "ä", "ö"]
    assert len({make_mark("c", "k", name) for name in names}) >= 5


def test_a_cluster_has_one_key_whatever_path_names_it(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert cluster_key(str(link)) == cluster_key(str(tmp_path))
    assert cluster_key(str(tmp_path)) != cluster_key(str(tmp_path / "other"))


def test_a_process_can_be_looked_at_whatever_its_name(tmp_path):
    seen = look_at(os.getpid())
    assert (seen.pid, seen.parent, seen.is_alive) == (os.getpid(), os.getppid(), True)
    assert look_at(2**22 + 1) is None


def test_a_long_error_keeps_its_end():
    text = "first\n" + "x" * (2 * MOST_ERROR_BYTES) + "\nlast é line"
    bounded = bounded_text(text)
    assert bounded.endswith("last é line")
    assert len(bounded.encode()) <= MOST_ERROR_BYTES


@pytest.mark.parametrize("filler", ["x", "\n", "é", '"', "\x01"])
def test_a_long_error_file_stays_readable(filler):
    stack = "Traceback\n" + filler * MOST_ERROR_BYTES + "\nValueError: bad batch 17"
    inside = {"message": "ValueError: bad batch 17", "extraInfo": {"py_callstack": stack}}
    bounded = bounded_error(json.dumps({"message": inside}))
    assert len(bounded.encode()) <= MOST_ERROR_BYTES
    read = json.loads(bounded)["message"]
    assert read["message"] == "ValueError: bad batch 17"
    assert read["extraInfo"]["py_callstack"].endswith("\nValueError: bad batch 17")
    assert "[…]" in read["extraInfo"]["py_callstack"]


def test_errors_of_other_forms_are_bounded_as_text():
    for text in ("{" + "x" * 2 * MOST_ERROR_BYTES, json.dumps({"a": "x" * 2 * MOST_ERROR_BYTES})):
        assert bounded_error(text) == bounded_text(text)
    plain = bounded_error(json.dumps({"message": "x" * 2 * MOST_ERROR_BYTES}))
    assert json.loads(plain)["message"]["message"].startswith("xxx")
    assert bounded_error("short") == "short"


def test_neither_steps_nor_what_only_informs_drives_out_what_is_said_once(tmp_path):
    outbox, _, sent = make_outbox(tmp_path)
    outbox.emit({"event": "link", "attempt": "a", "message": {"say": "join", "generation": 1}})
    for number in range(1000):
        say = "info" if number % 2 else "step"
        outbox.emit({"event": "link", "attempt": "a", "message": {"say": say, "step": number}})
    sent.clear()
    outbox.resend()
    assert sent[0] == (1, "link")
    assert len(sent) < 500
