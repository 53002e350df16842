from __future__ import annotations

import os
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest

from argosy.control.keeper import census
from argosy.control.keeper.arenas import ArenaError, Arenas, Blobs
from argosy.control.keeper.attempts import Attempt, OrderError, command_line, make_attempt
from argosy.control.keeper.children import read_report
from argosy.control.keeper.containment import Group, find_containment
from argosy.control.keeper.ends import Ends
from argosy.control.keeper.environment import build_environment, open_log, read_regular
from argosy.control.keeper.loop import READ, Loop
from argosy.control.keeper.ports import PortError, Reservations, bind_port
from argosy.control.keeper.services import next_pause

ORDER = {
    "attempt": "a",
    "run": "r",
    "role": "main",
    "index": 0,
    "program": {"kind": "exec", "argv": ["true"]},
    "env": {"RANK": "3"},
}


def test_the_rank_is_taken_from_the_environment():
    assert make_attempt(ORDER).rank == 3
    assert make_attempt({**ORDER, "env": {}}).rank is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index": "0"}, "index"),
        ({"run": None}, "run"),
        ({"attempt": "x" * 201}, "201 characters"),
        ({"program": {"kind": "script", "path": "x.py"}}, "python is missing"),
        ({"program": {"kind": "exec", "argv": ["a\0b"]}}, "NUL"),
        ({"limits": {"nofile": [1]}}, "limits['nofile']"),
        ({"secret_blobs": {"a b": "x"}}, "secret_blobs"),
    ],
)
def test_a_wrong_order_names_its_field(change, words):
    with pytest.raises(OrderError) as raised:
        make_attempt({**ORDER, **change})
    assert words in str(raised.value)


def test_scripts_and_modules_become_command_lines():
    script = {"python": "py", "program": {"kind": "script", "path": "t.py", "args": ["1"]}}
    module = {"python": "py", "program": {"kind": "module", "name": "m", "args": ["2"]}}
    assert command_line(script) == ["py", "t.py", "1"]
    assert command_line(module) == ["py", "-m", "m", "2"]


def test_a_report_separates_notes_from_the_error():
    text = b'{"note": "n1"}\nnonsense\n{"error": "e"}\n'
    assert read_report(text) == (["n1"], "e")
    assert read_report(b"") == ([], "")


def test_arenas_are_released_with_their_last_user_or_with_the_run():
    arenas = Arenas()
    told = []
    arenas.announce = lambda frame, fds: told.append((frame["type"], frame["name"]))
    arenas.create("r", "p", 4096, "process", "a")
    arenas.open("r", "p", "b")
    os.pwrite(arenas.create("r", "k", 4096, "run", "a").fd, b"1", 0)
    arenas.user_ended("r", "a")
    assert {entry["name"] for entry in arenas.listing()} == {"p", "k"}
    arenas.user_ended("r", "b")
    assert {entry["name"] for entry in arenas.listing()} == {"k"}
    assert arenas.run_ended("r") == 1
    assert arenas.listing() == []
    assert told[-2:] == [("unhold", "r/p"), ("unhold", "r/k")]
    with pytest.raises(ArenaError):
        arenas.open("r", "k", "a")


def test_a_name_is_free_again_when_nobody_has_memory_under_it():
    arenas = Arenas()
    arenas.create("r", "huge", 1 << 45, "run", "a")
    arenas.open("r", "huge", "b")
    arenas.release("r", "huge", "a")
    assert [entry["users"] for entry in arenas.listing()] == [["b"]]
    arenas.release("r", "huge", "b")
    assert arenas.create("r", "huge", 4096, "run", "a").size == 4096
    arenas.run_ended("r")


@pytest.mark.parametrize("name", ["a\0b", "é" * 512, "\udc80"])
def test_every_name_of_an_arena_has_a_label(name):
    arenas = Arenas()
    assert arenas.create("r", name, 4096, "run", "a") is arenas.open("r", name, "b")
    arenas.run_ended("r")


def test_an_adopted_arena_keeps_its_name_and_run():
    arenas = Arenas()
    fd = os.memfd_create("x")
    os.ftruncate(fd, 100)
    arenas.adopt({"run": "r", "name": "r/sub/name", "scope": "run"}, fd)
    assert arenas.open("r", "sub/name", "a").size == 100
    arenas.run_ended("r")


def test_a_blob_is_what_was_put_first():
    blobs = Blobs()
    blobs.put("n", "one")
    blobs.put("n", "two")
    assert blobs.get("n") == b"one"
    blobs.drop("n")
    blobs.drop("n")
    with pytest.raises(ArenaError):
        blobs.get("n")


def test_ports_are_reserved_all_or_none():
    ports = Reservations()
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        with pytest.raises(PortError, match="in use"):
            ports.reserve("r", {"a": 0, "b": used.getsockname()[1]})
    assert ports.listing() == {}
    held = ports.reserve("r", {"a": 0})
    with pytest.raises(PortError, match="held for run r"):
        ports.reserve("s", {"x": held["a"]})
    assert ports.release("r") == 1
    assert ports.release("r") == 0


def test_a_port_is_held_also_when_its_socket_listens_no_longer():
    held = bind_port("127.0.0.1", 0)
    address = held.getsockname()
    held.listen()
    held.shutdown(socket.SHUT_RDWR)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(address)
    with bind_port(*address) as taker:
        taker.listen()
        socket.create_connection(address).close()
    held.close()


def test_a_scan_without_a_leader_finds_nobody():
    assert Group("", "mark").members() == []


def test_all_who_ask_in_one_turn_share_a_look_at_the_processes(monkeypatch):
    looks = []
    look = census.look_at_all
    monkeypatch.setattr(census, "look_at_all", lambda: looks.append(1) or look())
    containment, turn = find_containment("argosy-unit-none", "scan"), time.monotonic()
    containment.lookout.turn_began = lambda: turn
    groups = [containment.make_group(f"a{number}", f"mark {number}") for number in range(20)]
    leader = subprocess.Popen(["sleep", "100"])
    for group in groups:
        group.add(leader.pid)
        assert group.kill() == []
        assert group.is_empty()
    assert len(looks) == 1
    turn = time.monotonic()
    assert groups[0].is_empty()
    assert len(looks) == 2
    leader.kill()
    leader.wait()


def test_a_scan_finds_by_session_by_ancestry_and_by_mark():
    words = ["sh", "-c", "sleep 100 & echo; wait"]
    leader = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
    mark = f"some mark of {os.getpid()}"  # the same test may run elsewhere on this machine
    environment = {**os.environ, "ARGOSY_MARK": mark}
    marked = subprocess.Popen(["sleep", "100"], env=environment, start_new_session=True)
    leader.stdout.readline()
    group = find_containment("argosy-unit-none", "scan").make_group("a", mark)
    group.add(leader.pid)
    found = {seen.pid for seen in group.members()}
    assert marked.pid in found
    assert len(found) == 2
    assert leader.pid not in found
    assert set(group.kill()) == found
    marked.wait(10)
    leader.wait(10)
    assert group.is_empty()
    leader.stdout.close()


def test_a_containment_that_cannot_be_had_is_an_error_and_auto_always_finds_one():
    assert find_containment("argosy-unit-none", "scan").method == "scan"


def test_a_fifo_in_the_place_of_a_log_or_error_file_blocks_nobody(tmp_path):
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device"):
        open_log(path)
    assert read_regular(path, 100) == ""
    assert read_regular(str(tmp_path / "missing"), 100) == ""


def test_logs_are_appended_and_their_directories_made(tmp_path):
    path = str(tmp_path / "deep" / "er" / "log")
    for word in (b"one ", b"two"):
        fd = open_log(path)
        os.write(fd, word)
        os.close(fd)
    assert read_regular(path, 100) == "one two"


def test_a_callback_that_raises_does_not_end_the_loop(capfd):
    loop = Loop()
    read, write = os.pipe()
    os.write(write, b"x")
    calls = []

    def fail(mask):
        calls.append(mask)
        raise RuntimeError("a bug")

    def look():
        if len(calls) < 3:
            loop.after(0.01, look)
        else:
            loop.after(0.05, loop.stop)

    loop.watch(read, READ, fail)
    look()
    loop.run()
    # Dropped after three failures: a bug must not spin either.
    assert len(calls) == 3
    assert "a bug" in capfd.readouterr().err
    os.close(read)
    os.close(write)


def test_a_descriptor_that_takes_the_number_of_a_forgotten_one_is_not_taken_for_it():
    loop = Loop()
    first, old = os.pipe(), os.pipe()
    os.write(first[1], b"x")
    os.write(old[1], b"x")
    called = []

    def replace(mask):
        os.read(first[0], 1)
        loop.forget(old[0])
        os.close(old[0])
        # Nothing can be read from what has the number now.
        os.dup2(pair[0], old[0])
        loop.watch(old[0], READ, lambda mask: called.append(mask))
        loop.after(0.0, loop.stop)

    pair = os.pipe()
    loop.watch(first[0], READ, replace)
    loop.watch(old[0], READ, lambda mask: called.append(mask))
    loop.run()
    assert called == []
    for fd in (*first, *old, *pair):
        os.close(fd)


def test_timers_fire_in_order_and_cancelled_ones_do_not():
    loop = Loop()
    fired = []
    loop.after(0.02, lambda: fired.append("late"))
    loop.after(0.0, lambda: fired.append("soon"))
    loop.after(0.01, lambda: fired.append("never")).cancel()
    loop.after(float("inf"), lambda: fired.append("end of time"))
    loop.after(0.03, loop.stop)
    loop.run()
    assert fired == ["soon", "late"]


def test_a_service_that_ends_quickly_by_itself_waits_longer_each_time_and_a_killed_one_never():
    pauses = [0.0]
    for _ in range(12):
        pauses.append(next_pause(pauses[-1], 0.1, is_killed=False))
    assert pauses[1] > 0.0
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] <= 10.0
    assert next_pause(pauses[-1], 0.1, is_killed=True) == 0.0
    assert next_pause(pauses[-1], 60.0, is_killed=False) == 0.0


def end(attempt, generation, rank):
    frame = {"type": "peer", "attempt": attempt, "rank": rank, "index": 0, "code": 0}
    return {**frame, "generation": generation, "places": [], "signal": None}


def test_ends_are_kept_while_somebody_could_wait_for_them_and_survive_a_new_program():
    ends = Ends()
    ends.remember("r", "a", end("r.a.0.0", 1, 0), lambda: 1)
    ends.remember("r", "b", end("r.b.0.0", 1, 0), lambda: 1)
    ends.remember("r", "a", end("r.a.9.0", 1, None), lambda: 1)
    ends.remember("r", "a", end("r.a.1.0", 2, 1), lambda: 1)
    assert [frame["attempt"] for frame in ends.since("r", "a", 1)] == ["r.a.0.0", "r.a.1.0"]
    assert ends.give_place("r.a.1.0", 2, 3) is None
    assert ends.give_place("r.a.0.0", 3, 0)["places"] == [[1, 0]]
    successor = Ends()
    successor.take_state(ends.to_state())
    assert successor.since("r", "a", 3) == ends.since("r", "a", 3) != []
    ends.run_ended("r")
    assert (ends.since("r", "a", 0), ends.role_of("r.b.0.0")) == ([], None)


def test_ends_that_concern_nobody_any_more_do_not_pile_up():
    ends = Ends()
    for generation in range(1, 1001):
        name = f"r.a.0.{generation}"
        ends.remember("r", "a", end(name, generation, 0), lambda: generation)  # noqa: B023
    kept = ends.since("r", "a", 0)
    assert kept[-1]["generation"] == 1000
    assert len(kept) < 200
    assert ends.role_of("r.a.0.1") is None


@pytest.mark.parametrize("beside", ["", "r1.train.0.0"])
def test_a_command_beside_a_process_gets_no_token(beside):
    keeper = SimpleNamespace(
        blobs=SimpleNamespace(get=lambda name: '{"ARGOSY_TOKEN": "outer", "HOME": "/h"}'),
        mark=lambda attempt: "m",
        socket_path="/s",
    )
    order = {"env_blob": "b", "env": {"RANK": "0"}}
    attempt = Attempt(order, "a", "r1", "train", 0, token="secret", host=beside)
    environment = build_environment(keeper, attempt, {})
    assert (environment["RANK"], environment["HOME"]) == ("0", "/h")
    assert environment.get("ARGOSY_TOKEN") == (None if beside else "secret")
