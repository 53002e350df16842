from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess


def test_an_exec_attempt_starts_runs_and_exits_with_its_code(keeper, agent):
    order = keeper.order("sh", "-c", "echo out; echo err >&2; exit 3")
    assert agent.spawn(order)["ok"]
    started = agent.wait_event("started", attempt=order["attempt"])
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert (started["how"], started["pid"] > 1) == ("exec", True)
    assert (exited["code"], exited["signal"], exited["swept"]) == (3, None, 0)
    assert exited["number"] > started["number"]
    assert (keeper.output(order), keeper.output(order, "stderr")) == ("out\n", "err\n")


def test_a_signal_death_is_reported_as_the_signal(keeper, agent):
    order = keeper.order("sh", "-c", "kill -SEGV $$")
    agent.spawn(order)
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert (exited["code"], exited["signal"]) == (None, signal.SIGSEGV)


def test_a_command_that_does_not_exist_is_a_clean_exit_with_the_reason(keeper, agent, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("not a program")
    lost = tmp_path / "lost"
    lost.write_text("#!/no/such/interpreter\n")
    lost.chmod(0o755)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x00\x01\x02")
    binary.chmod(0o755)
    cases = {
        "no-such-command-here": "command not found: no-such-command-here",
        "/no/such/file": "no such file: /no/such/file",
        str(plain): f"not executable: {plain} (permission denied)",
        str(tmp_path): f"not executable: {tmp_path} is a directory",
        str(lost): f"{lost} names an interpreter that does not exist",
        str(binary): f"not executable: {binary} is no program and has no #! line",
    }
    for command, reason in cases.items():
        order = keeper.order(command)
        agent.spawn(order)
        exited = agent.wait_event("exited", attempt=order["attempt"])
        assert (exited["code"], exited["signal"], exited["error"]) == (None, None, reason)
    assert not [event for event in agent.events if event["event"] == "started"]


def test_a_bad_working_directory_is_a_clean_exit_with_the_reason(keeper, agent):
    order = keeper.order("true", cwd="/no/such/directory")
    agent.spawn(order)
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert exited["error"] == "working directory /no/such/directory: No such file or directory"


def test_the_same_attempt_is_started_once(keeper, agent, tmp_path):
    order = keeper.order("sh", "-c", f"echo x >> {tmp_path}/count")
    for _ in range(3):
        assert agent.spawn(order)["ok"]
    exited = agent.wait_event("exited", attempt=order["attempt"])
    agent.request("ack", through=exited["number"])
    assert agent.spawn(order)["ok"]
    agent.spawn(last := keeper.order("true"))
    agent.wait_event("exited", attempt=last["attempt"])
    assert (tmp_path / "count").read_text() == "x\n"


def test_a_process_gets_the_submitters_surroundings_and_nothing_of_the_keepers(keeper, agent):
    code = """
import json, os, resource, signal
mask = next(l for l in open('/proc/self/status') if l.startswith('SigBlk')).split()[1]
ignored = next(l for l in open('/proc/self/status') if l.startswith('SigIgn')).split()[1]
print(json.dumps({'cwd': os.getcwd(), 'umask': os.umask(0), 'nofile': resource.getrlimit(resource.RLIMIT_NOFILE),
  'core': resource.getrlimit(resource.RLIMIT_CORE), 'fds': sorted(os.listdir('/proc/self/fd')), 'nice': os.nice(0),
  'sid': os.getsid(0) == os.getpid(), 'blocked': mask, 'ignored': int(ignored, 16), 'affinity': sorted(os.sched_getaffinity(0)),
  'stdin': os.readlink('/proc/self/fd/0'), 'env': dict(os.environ), 'oom': int(open('/proc/self/oom_score_adj').read())}))
"""
    order = keeper.python(
        code, nice=3, umask=0o027, limits={"core": [0, 0]}, affinity=[0], env={"COLOUR": "red"}
    )
    agent.spawn(order)
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
    seen = json.loads(keeper.output(order))
    assert seen["cwd"] == str(keeper.directory)
    assert (seen["umask"], seen["nice"], seen["sid"]) == (0o027, 3, True)
    assert seen["core"] == [0, 0]
    assert seen["nofile"] == list(__import__("resource").getrlimit(7))
    # 3 is the directory that the listing itself has open.
    assert seen["fds"] == ["0", "1", "2", "3"]
    assert seen["stdin"] == "/dev/null"
    assert int(seen["blocked"], 16) == 0
    # Python itself ignores SIGPIPE and SIGXFSZ; 32 and 33 are the C library's, and `make` leaves them ignored.
    own = (1 << 31) | (1 << 32)
    assert seen["ignored"] & ~own == (1 << (signal.SIGPIPE - 1)) | (1 << (signal.SIGXFSZ - 1))
    assert seen["affinity"] == [0]
    assert seen["oom"] > 0
    env = seen["env"]
    assert env["COLOUR"] == "red"
    assert env["ARGOSY_ATTEMPT"] == order["attempt"]
    assert env["ARGOSY_TOKEN"] == order["token"]
    assert env["ARGOSY_KEEPER_SOCKET"] == keeper.socket_path
    assert env["PYTHONUNBUFFERED"] == "1"
    assert env["TORCHELASTIC_ERROR_FILE"] == order["error_file"]
    assert "HOME" not in env


def test_the_environment_comes_from_the_blob_and_the_orders_own_variables_win(keeper, agent):
    agent.request("put_blob", name="b1", data=json.dumps({"A": "blob", "B": "blob"}))
    order = keeper.order("sh", "-c", "echo $A $B", env_blob="b1", env={"B": "order"})
    agent.spawn(order)
    agent.wait_event("exited", attempt=order["attempt"])
    assert keeper.output(order) == "blob order\n"


def test_a_lost_environment_is_a_clean_exit(keeper, agent):
    order = keeper.order("true", env_blob="never-put")
    agent.spawn(order)
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert exited["code"] is None
    assert "never-put" in exited["error"]


def test_each_process_reads_its_secret_from_the_beginning(keeper, agent):
    agent.request("put_blob", name="s1", data="hush")
    orders = [
        keeper.order("sh", "-c", 'eval "cat <&$ARGOSY_SECRET_KEY_FD"', secret_blobs={"key": "s1"})
        for _ in range(3)
    ]
    agent.spawn(*orders)
    for order in orders:
        agent.wait_event("exited", attempt=order["attempt"])
        assert keeper.output(order) == "hush"


def test_script_and_module_are_started_by_exec_without_a_zygote(keeper, agent, tmp_path):
    script = tmp_path / "hello.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")
    by_path = keeper.order("one", "two", script=script)
    by_name = keeper.order(script.parent.name, module="platform")
    agent.spawn(by_path, by_name)
    for order in (by_path, by_name):
        assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
    assert keeper.output(by_path) == "__main__ ['one', 'two']\n"
    assert keeper.output(by_name).startswith("Linux")


def test_a_parked_exec_waits_at_its_gate_and_is_released_with_more_variables(keeper, agent):
    order = keeper.order("sh", "-c", "echo rank $RANK", parked=True)
    agent.spawn(order)
    started = agent.wait_event("started", attempt=order["attempt"])
    (listed,) = agent.request("list")["attempts"]
    assert (listed["state"], listed["pid"]) == ("parked", started["pid"])
    assert keeper.output(order) == ""
    agent.request(
        "release", attempt=order["attempt"], env={"RANK": "5"}, gang={"generation": 2, "rank": 5}
    )
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
    assert keeper.output(order) == "rank 5\n"


def test_a_parked_process_can_be_stopped(keeper, agent):
    order = keeper.order("true", parked=True)
    agent.spawn(order)
    agent.wait_event("started", attempt=order["attempt"])
    agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=20)
    assert agent.wait_event("exited", attempt=order["attempt"])["signal"] == signal.SIGTERM


def test_bad_orders_are_refused_before_anything_is_started(keeper, agent):
    good = keeper.order("true")
    cases = [
        ({**good, "attempt": ""}, "attempt id"),
        ({**good, "program": {"kind": "magic"}}, "program.kind"),
        ({**good, "program": {"kind": "exec", "argv": []}}, "program.argv"),
        ({**good, "env": {"A=B": "x"}}, "env['A=B']"),
        ({**good, "env": {"A": 1}}, "env['A']"),
        ({**good, "limits": {"nonsense": [1, 2]}}, "limits['nonsense']"),
        ({**good, "affinity": ["x"]}, "affinity"),
        ({**good, "nice": "low"}, "nice"),
        ("text", "no"),
    ]
    for bad, words in cases:
        reply = agent.spawn(good, bad) if isinstance(bad, dict) else agent.request("spawn", batch=3)
        assert not reply["ok"]
        assert words in reply["error"]
    assert agent.request("list")["attempts"] == []


def test_a_log_that_cannot_be_opened_is_a_note_and_the_process_runs(keeper, agent):
    order = keeper.order("true", stdout="/proc/no/such/place")
    agent.spawn(order)
    assert "stdout is lost" in agent.wait_event("note", attempt=order["attempt"])["text"]
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0


def test_the_error_file_is_in_the_exit(keeper, agent):
    order = keeper.order("sh", "-c", 'echo "it broke" > $TORCHELASTIC_ERROR_FILE; exit 1')
    agent.spawn(order)
    assert agent.wait_event("exited", attempt=order["attempt"])["error"] == "it broke\n"


@pytest.mark.parametrize("method", ["auto", "scan"])
def test_a_guest_runs_in_the_group_of_its_host_and_dies_with_it(make_keeper, method):
    keeper = make_keeper("--containment", method)
    agent = keeper.agent()
    host = keeper.order("sleep", "1000")
    agent.spawn(host)
    pid = agent.wait_event("started", attempt=host["attempt"])["pid"]
    guest = keeper.order("sleep", "1000", join=host["attempt"])
    agent.spawn(guest)
    guest_pid = agent.wait_event("started", attempt=guest["attempt"])["pid"]
    assert Path(f"/proc/{pid}/cgroup").read_text() == Path(f"/proc/{guest_pid}/cgroup").read_text()
    agent.request("kill", attempt=host["attempt"])
    assert agent.wait_event("exited", attempt=guest["attempt"])["signal"] == signal.SIGKILL
    agent.wait_event("exited", attempt=host["attempt"])
    late = keeper.order("true", join=host["attempt"])
    agent.spawn(late)
    assert "is not running" in agent.wait_event("exited", attempt=late["attempt"])["error"]


@pytest.mark.parametrize("method", ["auto", "scan"])
def test_what_a_guest_leaves_running_ends_with_it_and_its_host_goes_on(
    make_keeper, client, tmp_path, method
):
    keeper = make_keeper("--containment", method)
    agent = keeper.agent()
    host = keeper.order("sleep", "1000")
    agent.spawn(host)
    pid = agent.wait_event("started", attempt=host["attempt"])["pid"]
    place = tmp_path / "left"
    leave = f"setsid sh -c 'echo $$ > {place}.new; mv {place}.new {place}; exec sleep 1000' &"
    until = f"until test -e {place}; do sleep 0.01; done; exit 3"
    guest = keeper.order("sh", "-c", f"{leave} {until}", join=host["attempt"])
    agent.spawn(guest)
    exited = agent.wait_event("exited", attempt=guest["attempt"])
    assert (exited["code"], exited["swept"]) == (3, 1)
    assert not client.is_alive(int(place.read_text()))
    assert client.is_alive(pid)


def test_a_memory_limit_ends_the_process_and_is_named_as_the_cause(keeper, agent):
    order = keeper.python("b = bytearray(600 << 20); print(len(b))", memory_bytes=100 << 20)
    agent.spawn(order)
    exited = agent.wait_event("exited", attempt=order["attempt"])
    notes = [event["text"] for event in agent.events if event["event"] == "note"]
    if any("memory is not limited" in text for text in notes):
        pytest.skip("no memory controller is writable here")
    assert (exited["signal"], exited["is_oom"]) == (signal.SIGKILL, True)


def test_many_short_attempts_all_exit_and_leave_no_descriptor_behind(keeper, agent):
    agent.request("list")
    before = agent.request("statistics")["descriptors"]
    orders = [keeper.order("true") for _ in range(60)]
    agent.spawn(*orders)
    for order in orders:
        assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
    assert agent.request("statistics")["descriptors"] == before
    assert os.listdir(keeper.directory / "attempts") == []
