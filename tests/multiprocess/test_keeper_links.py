from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import struct

import pytest

pytestmark = pytest.mark.multiprocess


def start_sleepers(keeper, agent, count, **fields):
    orders = [
        keeper.order("sleep", "1000", env={"RANK": str(rank)}, index=rank, **fields)
        for rank in range(count)
    ]
    agent.spawn(*orders)
    for order in orders:
        order["pid"] = agent.wait_event("started", attempt=order["attempt"])["pid"]
    return orders


def test_peers_are_told_of_a_death_over_their_links(keeper, agent):
    first, second, other = start_sleepers(keeper, agent, 3)
    stranger = start_sleepers(keeper, agent, 1, role="else")[0]
    links = [keeper.worker(second), keeper.worker(other)]
    far = keeper.worker(stranger)
    os.kill(first["pid"], signal.SIGKILL)
    for link in links:
        told = link.receive()
        assert (told["type"], told["attempt"], told["rank"]) == ("peer", first["attempt"], 0)
        assert (told["code"], told["signal"], told["generation"]) == (None, signal.SIGKILL, 1)
    agent.wait_event("exited", attempt=first["attempt"])
    agent.request("tell", attempt=stranger["attempt"], message={"tell": "nothing"})
    # Another role hears nothing of it: the next frame is what it was told.
    assert far.receive()["type"] == "told"


def test_the_end_of_a_member_that_re_formed_names_its_older_places(keeper, agent):
    first, second = start_sleepers(keeper, agent, 2)
    link = keeper.worker(second)
    keeper.worker(first)
    for generation, rank in ((2, 1), (2, 1), (3, 0)):
        message = {"tell": "reform", "generation": generation, "rank": rank, "world_size": 2}
        agent.request("tell", attempt=first["attempt"], message=message)
    os.kill(first["pid"], signal.SIGKILL)
    told = link.receive()
    assert (told["generation"], told["rank"]) == (3, 0)
    assert told["places"] == [[1, 0], [2, 1]]


def test_a_worker_that_connects_late_hears_what_was_told_before(keeper, agent):
    first, second, third = start_sleepers(keeper, agent, 3)
    reform = {"tell": "reform", "generation": 2, "rank": 1, "world_size": 3}
    keeper.worker(second)
    agent.request("tell", attempt=second["attempt"], message=reform)
    os.kill(first["pid"], signal.SIGKILL)
    exited = agent.wait_event("exited", attempt=first["attempt"])
    # That the exit is acknowledged, and forgotten, changes nothing.
    agent.request("ack", through=exited["number"])
    late = keeper.worker(third)
    told = late.receive()
    assert (told["type"], told["attempt"], told["signal"]) == ("peer", first["attempt"], 9)
    again = keeper.worker(second)
    assert again.receive()["attempt"] == first["attempt"]
    assert again.receive()["message"] == reform
    # A member of the new generation that could not be told in time: nobody may wait for it.
    place = {"tell": "reform", "generation": 2, "rank": 0, "world_size": 3}
    assert agent.request("tell", attempt=first["attempt"], message=place)["ok"]
    for link in (late, again):
        told = link.receive()
        assert (told["generation"], told["rank"], told["places"]) == (2, 0, [[1, 0]])
    # A newcomer of a later generation is not concerned.
    newcomer = start_sleepers(keeper, agent, 1, generation=3)[0]
    link = keeper.worker(newcomer)
    agent.request("tell", attempt=newcomer["attempt"], message={"tell": "nothing"})
    assert link.receive()["type"] == "told"


def test_neither_a_command_beside_a_member_nor_a_failed_start_is_a_quiet_end_of_its_rank(
    keeper, agent
):
    first, second = start_sleepers(keeper, agent, 2)
    link = keeper.worker(second)
    guest = keeper.order("false", env={"RANK": "0"}, index=0, join=first["attempt"])
    agent.spawn(guest)
    agent.wait_event("exited", attempt=guest["attempt"])
    broken = keeper.order("true", env={"RANK": "2"}, index=2, env_blob="there is none")
    agent.spawn(broken)
    agent.wait_event("exited", attempt=broken["attempt"])
    told = link.receive()
    assert (told["attempt"], told["rank"], told["code"]) == (broken["attempt"], 2, 127)


def test_a_worker_needs_its_own_token(keeper, agent):
    (order,) = start_sleepers(keeper, agent, 1)
    for fields in ({"token": "wrong"}, {}, {"attempt": "unknown"}, {"attempt": 7}):
        answer = keeper.peer().hello("worker", **{"attempt": order["attempt"], **fields})
        assert answer["type"] == "error"
        assert answer["fix"]
    assert keeper.worker(order)


def test_what_a_worker_says_becomes_an_event_and_an_error_goes_into_the_exit(keeper, agent):
    (order,) = start_sleepers(keeper, agent, 1)
    link = keeper.worker(order)
    link.send({"type": "say", "message": {"say": "join", "generation": 1}})
    event = agent.wait_event("link", attempt=order["attempt"])
    assert event["message"] == {"say": "join", "generation": 1}
    link.send({"type": "say", "message": {"say": "error", "text": "Traceback: boom"}})
    agent.wait_event("link", message={"say": "error", "text": "Traceback: boom"})
    agent.request("kill", attempt=order["attempt"])
    assert agent.wait_event("exited", attempt=order["attempt"])["error"] == "Traceback: boom"


def test_a_chatty_worker_is_bounded_and_its_exit_is_never_lost(keeper, agent):
    (order,) = start_sleepers(keeper, agent, 1)
    agent.close()
    link = keeper.worker(order)
    link.send({"type": "say", "message": {"say": "fail", "reason": "said once"}})
    for step in range(2000):
        link.send({"type": "say", "message": {"say": "step", "step": step}})
    link.send({"type": "arena_open", "id": 1, "name": "none"})
    assert link.receive()["ok"] is False
    os.kill(order["pid"], signal.SIGKILL)
    late = keeper.agent()
    late.request("list")
    late.wait_event("exited", attempt=order["attempt"])
    said = [e["message"] for e in late.events if e["event"] == "link"]
    steps = [message["step"] for message in said if message["say"] == "step"]
    assert steps[-1] == 1999
    assert len(steps) <= 256
    # Steps do not drive out what is said once.
    assert said[0]["say"] == "fail"


def test_arenas_are_shared_by_name_within_a_run(keeper, agent):
    one, two = start_sleepers(keeper, agent, 2)
    (foreign,) = start_sleepers(keeper, agent, 1, run="run-2")
    first, second, far = keeper.worker(one), keeper.worker(two), keeper.worker(foreign)
    ask = {"type": "arena_create", "id": 1, "name": "grads", "size": 8192, "scope": "process"}
    first.send(ask)
    made = first.receive()
    assert (made["ok"], made["size"]) == (True, 8192)
    second.send({"type": "arena_open", "id": 2, "name": "grads"})
    opened = second.receive()
    with (
        mmap.mmap(made["_fds"][0], 8192) as writer,
        mmap.mmap(opened["_fds"][0], 8192) as reader,
    ):
        writer[:5] = b"hello"
        assert reader[:5] == b"hello"
    with pytest.raises(PermissionError):
        os.ftruncate(opened["_fds"][0], 1)
    far.send({"type": "arena_open", "id": 3, "name": "grads"})
    assert "no arena 'grads'" in far.receive()["error"]
    second.send({**ask, "id": 4, "size": 4096})
    assert "exists with 8192 bytes" in second.receive()["error"]
    for wrong in ({"size": 0}, {"size": "x"}, {"scope": "ever"}, {"name": ""}):
        second.send({**ask, "name": "other", **wrong})
        assert second.receive()["ok"] is False


def test_arenas_live_as_long_as_their_scope_says(keeper, agent):
    one, two = start_sleepers(keeper, agent, 2)
    first, second = keeper.worker(one), keeper.worker(two)
    for name, scope in (("short", "process"), ("long", "run"), ("without memory", "run")):
        first.send({"type": "arena_create", "id": 1, "name": name, "size": 4096, "scope": scope})
        (made,) = first.receive()["_fds"]
        if name == "long":
            os.pwrite(made, b"1", 0)
        second.send({"type": "arena_open", "id": 1, "name": name})
        second.receive()
        hold = agent.wait_other("hold", name=f"run-1/{name}")
        assert (hold["kind"], hold["run"], hold["size"], hold["scope"]) == (
            "arena",
            "run-1",
            4096,
            scope,
        )
        assert os.fstat(hold["_fds"][0]).st_size == 4096
    agent.request("kill", attempt=one["attempt"])
    agent.wait_event("exited", attempt=one["attempt"])
    there = {arena["name"] for arena in agent.request("list")["arenas"]}
    assert there == {"short", "long", "without memory"}
    assert second.receive()["type"] == "peer"
    second.send({"type": "arena_release", "id": 2, "name": "short"})
    assert second.receive()["ok"]
    agent.wait_other("unhold", name="run-1/short")
    assert "live attempts" in agent.request("end_run", run="run-1")["error"]
    agent.request("kill", attempt=two["attempt"])
    agent.wait_event("exited", attempt=two["attempt"])
    assert {arena["name"] for arena in agent.request("list")["arenas"]} == {"long"}
    assert agent.request("end_run", run="run-1")["arenas"] == 1
    agent.wait_other("unhold", name="run-1/long")


def test_a_new_agent_takes_over_and_gets_holds_and_unacknowledged_events(keeper, agent):
    order = keeper.order("true")
    agent.request("put_blob", name="digest", data="text")
    agent.spawn(order)
    number = agent.wait_event("exited", attempt=order["attempt"])["number"]
    new = keeper.agent()
    listed = new.request("list")
    assert [(a["attempt"], a["state"]) for a in listed["attempts"]] == [
        (order["attempt"], "exited")
    ]
    assert listed["blobs"] == ["digest"]
    again = new.wait_event("exited", attempt=order["attempt"])
    assert again["number"] == number
    assert os.pread(new.wait_other("hold", kind="blob", name="digest")["_fds"][0], 9, 0) == b"text"
    while (message := agent.receive()) is not None:
        last = message
    assert last["type"] == "error"
    record = keeper.directory / "exits" / f"{new.welcome['keeper']}-{number}.json"
    assert json.loads(record.read_text())["attempt"] == order["attempt"]
    new.request("ack", through=number)
    assert not record.exists()
    assert new.request("list")["attempts"] == []


def test_blobs_are_sealed_and_can_be_read_back_and_dropped(keeper, agent):
    assert agent.request("put_blob", name="n", data="héllo")["ok"]
    assert agent.request("put_blob", name="n", data="again")["ok"]
    assert agent.request("get_blob", name="n")["data"] == "héllo"
    fd = agent.wait_other("hold", name="n")["_fds"][0]
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    assert agent.request("drop_blob", name="n")["ok"]
    assert not agent.request("get_blob", name="n")["ok"]


def test_ports_are_held_until_the_run_takes_them_and_a_used_one_is_named(keeper, agent):
    reply = agent.request("reserve", run="r", ports={"a/0/http": 0, "a/1/http": 0})
    ports = reply["ports"]
    assert len(set(ports.values())) == 2
    assert agent.request("reserve", run="r", ports={"a/0/http": 0})["ports"] == {
        "a/0/http": ports["a/0/http"]
    }
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taker.bind(("127.0.0.1", ports["a/0/http"]))
        taker.listen()
        clash = agent.request("reserve", run="s", ports={"x": ports["a/0/http"]})
        assert not clash["ok"]
        assert str(ports["a/0/http"]) in clash["error"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        used = listener.getsockname()[1]
        clash = agent.request("reserve", run="s", ports={"free": 0, "x": used})
        assert clash["error"] == f"port {used} on 127.0.0.1 is in use"
    assert "s" not in agent.request("list")["ports"]
    for wrong in ({"x": 70000}, {"x": "80"}, ["x"]):
        assert not agent.request("reserve", run="s", ports=wrong)["ok"]
    agent.request("unreserve", run="r")
    assert agent.request("list")["ports"] == {}


def test_without_a_zygote_rank_zero_can_listen_on_the_stores_port(keeper, agent):
    code = """
import os, socket
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))); s.listen()
print(os.environ['MASTER_PORT'], os.environ['TORCHELASTIC_USE_AGENT_STORE'])
"""
    order = keeper.python(code)
    store = agent.spawn(order, store={"host": "127.0.0.1"})["store"]
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
    assert keeper.output(order) == f"{store['port']} False\n"


def test_a_terminal_shows_output_live_takes_typing_and_resizes(keeper, agent, client):
    code = """
import os, sys
print(os.isatty(0), os.isatty(1), os.isatty(2), os.ttyname(0) != '', flush=True)
print('typed', input('> '), os.get_terminal_size().columns, flush=True)
"""
    order = keeper.python(code, tty=True)
    agent.spawn(order)
    agent.wait_event("started", attempt=order["attempt"])
    resize = keeper.peer().hello("resize", attempt=order["attempt"], rows=40, columns=123)
    assert resize["type"] == "welcome"
    client.wait_until(lambda: "> " in keeper.output(order), "the prompt")
    view = keeper.peer()
    assert view.hello("attach", attempt=order["attempt"])["type"] == "welcome"
    view.socket.sendall(b"abc\n")
    seen = b""
    while data := view.socket.recv(4096):
        seen += data
    assert b"typed abc 123" in seen
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
    log = keeper.output(order)
    assert "True True True True" in log
    assert "typed abc 123" in log


def test_a_process_with_a_terminal_that_floods_is_never_blocked_by_a_client(keeper, agent):
    order = keeper.order("sh", "-c", "sleep 0.2; seq 200000", tty=True)
    agent.spawn(order)
    agent.wait_event("started", attempt=order["attempt"])
    lazy = keeper.peer()
    lazy.hello("attach", attempt=order["attempt"])
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
    assert keeper.output(order).splitlines()[-1] == "200000"


def test_attach_without_a_terminal_says_how_to_get_one(keeper, agent):
    (order,) = start_sleepers(keeper, agent, 1)
    answer = keeper.peer().hello("attach", attempt=order["attempt"])
    assert answer["type"] == "error"
    assert "--tty" in answer["fix"]


GARBAGE = {
    "not json": struct.pack(">I", 4) + b"oops",
    "no object": struct.pack(">I", 2) + b"[]",
    "oversized": struct.pack(">I", (1 << 20) + 1),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "deep": struct.pack(">I", 200000) + b"[" * 200000,
    "not a hello": struct.pack(">I", 15) + b'{"type":"list"}',
    "no such kind": struct.pack(">I", 28) + b'{"type":"hello","as":"king"}',
    "wrong version": struct.pack(">I", 41) + b'{"type":"hello","version":9,"as":"agent"}',
    "fds that are not there": struct.pack(">I", 24) + b'{"type":"hello","fds":7}',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_ends_that_connection_with_a_reason_and_nothing_else(keeper, agent, name):
    peer = keeper.peer()
    if name == "fds that are not there":
        data = GARBAGE[name]
        data = struct.pack(">I", len(data) - 4) + data[4:]
    else:
        data = GARBAGE[name]
    peer.socket.sendall(data)
    answer = peer.receive()
    assert answer["type"] == "error"
    assert answer["what"]
    assert peer.receive() is None
    assert agent.request("statistics")["ok"]


def test_half_frames_and_hang_ups_disturb_nobody(keeper, agent):
    for data in (b"", b"\0", struct.pack(">I", 100) + b'{"type"'):
        peer = keeper.peer()
        peer.socket.sendall(data)
        peer.close()
    (order,) = start_sleepers(keeper, agent, 1)
    for message in ({"type": "nonsense"}, {"type": "say", "message": 3}):
        link = keeper.worker(order)
        link.send(message)
        assert link.receive()["type"] == "error"
        assert link.receive() is None
    assert agent.request("statistics")["ok"]


def test_wrong_requests_are_answered_and_the_keeper_goes_on(keeper, agent):
    for kind, fields in (
        ("magic", {}),
        ("stop", {"attempt": "none"}),
        ("stop", {"attempt": [], "signal": "SIGTERM"}),
        ("signal", {"attempt": "none", "signal": "SIGNONE"}),
        ("spawn", {"batch": None}),
        ("spawn", {"batch": {"attempts": [None]}}),
        ("spawn", {"batch": {"attempts": [], "zygote": 3}}),
        ("spawn", {"batch": {"attempts": [], "store": {}}}),
        ("ack", {"through": "all"}),
        ("put_blob", {"name": 3, "data": ""}),
        ("release", {"attempt": "none"}),
        ("tell", {"attempt": "none", "message": {}}),
        ("warm", {"zygote": {"python": ""}}),
        ("hold", {"kind": "arena"}),
    ):
        reply = agent.request(kind, **fields)
        assert (reply["ok"], bool(reply["error"])) == (False, True)
    assert agent.request("statistics")["ok"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can pose as somebody else")
def test_another_user_is_refused(keeper, agent):
    os.chmod(keeper.runtime, 0o755)
    os.chmod(keeper.socket_path, 0o777)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(keeper.socket_path)
        os.write(write, sock.recv(4096)[4:])
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    answer = json.loads(os.read(read, 4096))
    os.close(read)
    assert answer["type"] == "error"
    assert "uid 65534" in answer["what"]
    assert agent.request("statistics")["ok"]


def test_one_that_saves_has_a_new_grace_with_each_word_and_is_killed_when_it_falls_silent(
    keeper, agent, start_saver
):
    steady = start_saver(keeper, agent, 9.0, "leave")
    stuck = start_saver(keeper, agent, 0.1, "hang")
    for order in (steady, stuck):
        agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=4)
    assert agent.wait_event("exited", attempt=stuck["attempt"])["signal"] == signal.SIGKILL
    assert "silent" in keeper.output(stuck)
    assert agent.wait_event("exited", attempt=steady["attempt"])["code"] == 0


def test_a_shorter_grace_a_kill_and_a_shutdown_do_not_wait_for_a_save(
    keeper, agent, client, start_saver
):
    orders = [start_saver(keeper, agent, 1000, "hang") for _ in range(3)]
    for order in orders:
        agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=1000)
        agent.wait_event("link", attempt=order["attempt"])
    shorter, killed, ended = (order["attempt"] for order in orders)
    agent.request("stop", attempt=shorter, signal="SIGTERM", grace_seconds=0.2)
    assert agent.wait_event("exited", attempt=shorter)["signal"] == signal.SIGKILL
    agent.request("kill", attempt=killed)
    assert agent.wait_event("exited", attempt=killed)["signal"] == signal.SIGKILL
    agent.request("shutdown", grace_seconds=0.2)
    assert agent.wait_event("exited", attempt=ended)["signal"] == signal.SIGKILL
    keeper.process.wait(client.DEADLINE_SECONDS)
