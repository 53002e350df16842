import contextlib
import json
import os
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from argosy.errors import ArgosyError, NotFoundError

pytestmark = pytest.mark.multiprocess
DEADLINE_SECONDS = 60.0


def wait_until(condition, what):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return value


def raw(path, request):
    """Status and parsed body of a request given as bytes."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(DEADLINE_SECONDS)
        sock.connect(path)
        sock.sendall(request)
        file = sock.makefile("rb")
        status = int(file.readline().split()[1])
        length = 0
        while line := file.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, json.loads(file.read(length))


def post(path, target, body, length=None):
    head = f"POST {target} HTTP/1.1\r\nhost: x\r\ncontent-length: {length or len(body)}\r\n\r\n"
    return raw(path, head.encode() + body)


def test_a_run_is_submitted_seen_and_read_back(cluster):
    run = cluster.submit(
        {
            "main": {
                "command": ["sh", "-c", "echo out $NAME; echo err >&2; exit 4"],
                "env": {"NAME": "x"},
            }
        }
    )
    view = cluster.wait_ended(run)
    assert (view["outcome"], view["exit_code"]) == ("failed", 4)
    assert {(line["stream"], line["text"]) for line in cluster.lines(run)} == {
        ("out", "out x"),
        ("err", "err"),
    }
    assert [line["text"] for line in cluster.lines(run, tail=1, role="main", index=0)]
    kinds = [fact["kind"] for fact in cluster.facts(run)]
    assert kinds[0] == "run.submitted"
    assert kinds[-1] == "run.ended"
    listed = cluster.get("/v1/runs?all=1")["runs"]
    assert [entry["run"] for entry in listed] == [run]
    assert cluster.get("/v1/runs")["runs"] == []
    assert cluster.get("/v1/hosts")["hosts"][0]["connected"]
    assert cluster.get("/v1/queue") == {"queue": []}


def test_the_stream_of_a_run_has_lines_facts_and_the_end(cluster, follow):
    run = cluster.submit({"main": {"command": ["sh", "-c", "for i in 1 2 3; do echo $i; done"]}})
    seen = list(follow(f"/v1/runs/{run}/stream").events())
    assert [data["text"] for event, data in seen if event == "line"] == ["1", "2", "3"]
    facts = [data["fact"]["kind"] for event, data in seen if event == "fact"]
    assert facts[0] == "run.submitted"
    assert facts[-1] == "run.ended"
    assert seen[-1][0] == "end"
    assert seen[-1][1]["outcome"] == "succeeded"


def test_a_client_that_comes_back_sees_each_line_once(cluster, follow, tmp_path):
    gate = tmp_path / "gate"
    script = f"echo one; echo two; while [ ! -e {gate} ]; do sleep 0.05; done; echo three"
    run = cluster.submit({"main": {"command": ["sh", "-c", script]}})
    first = follow(f"/v1/runs/{run}/stream")
    seen = []
    for event, data in first.events():
        seen += [data["text"]] if event == "line" else []
        if seen == ["one", "two"]:
            break
    first.close()
    gate.touch()
    again = follow(f"/v1/runs/{run}/stream", last_id=first.last_id)
    later = list(again.events())
    assert [data["text"] for event, data in later if event == "line"] == ["three"]
    assert "run.submitted" not in [d["fact"]["kind"] for e, d in later if e == "fact"]


def test_following_logs_shows_an_unfinished_line_and_ends_with_the_run(cluster, follow, tmp_path):
    gate = tmp_path / "gate"
    script = f"printf 'prompt> '; while [ ! -e {gate} ]; do sleep 0.05; done; echo yes"
    run = cluster.submit({"main": {"command": ["sh", "-c", script]}})
    events = follow(f"/v1/runs/{run}/logs?follow=1").events()
    event, line = next(events)
    assert (event, line["text"], line["partial"]) == ("line", "prompt> ", True)
    gate.touch()
    event, line = next(events)
    assert (event, line["text"], line["partial"]) == ("line", "yes", False)
    assert next(events)[0] == "end"


def test_events_are_followed_from_a_number_on(cluster, follow):
    run = cluster.submit({"main": {"command": ["true"]}})
    cluster.wait_ended(run)
    last = cluster.get("/v1/events?limit=100000")["events"][-1]["seq"]
    stream = follow(f"/v1/events?follow=1&after={last - 1}").events()
    assert next(stream)[1]["seq"] == last
    cluster.submit({"main": {"command": ["true"]}})
    assert next(stream)[1]["seq"] == last + 1


@pytest.mark.parametrize(
    ("target", "body", "status", "word"),
    [
        ("/v1/runs", b"{not json", 400, "JSON"),
        ("/v1/runs", b'"text"', 422, "Expected"),
        ("/v1/runs", b'{"spec": {"roles": {}}, "cwdd": "/"}', 422, "cwdd"),
        (
            "/v1/runs",
            b'{"spec": {"roles": {"a": {"command": ["x"], "count": "two"}}}}',
            422,
            "count",
        ),
        ("/v1/runs", b'{"spec": {"roles": {"a": {"command": ["x"], "count": -1}}}}', 422, "count"),
        ("/v1/runs/none/stop", b"{}", 404, "none"),
        ("/v1/processes/none/signal", b'{"signal": "SIGTERM"}', 404, "none"),
        ("/v1/processes/none/exec", b'{"argv": []}', 422, "argv"),
        ("/v1/nothing", b"{}", 404, "nothing"),
        ("/v1/status", b"{}", 405, "status"),
    ],
)
def test_bad_requests_are_refused_with_a_fix(quiet_cluster, target, body, status, word):
    found, problem = post(quiet_cluster.paths.http_socket, target, body)
    assert found == status
    assert word in problem["error"]
    assert set(problem) == {"error", "fix"}
    assert quiet_cluster.get("/v1/runs?all=1")["runs"] == []


def test_an_oversized_body_is_refused_unread(quiet_cluster):
    status, problem = post(quiet_cluster.paths.http_socket, "/v1/runs", b"{", length=17 << 20)
    assert status == 413
    assert "limit" in problem["error"]


def test_a_wrong_query_is_refused(quiet_cluster):
    for target in ("/v1/runs?limt=3", "/v1/events?after=x", "/v1/events?follow=2"):
        request = f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        status, problem = raw(quiet_cluster.paths.http_socket, request)
        assert status == 422
        assert "query" in problem["error"]


def test_tcp_takes_only_the_token_under_its_own_name(quiet_cluster):
    port = json.loads(Path(quiet_cluster.paths.http_json).read_text())["port"]
    token = Path(quiet_cluster.paths.token).read_text().strip()
    assert os.stat(quiet_cluster.paths.token).st_mode & 0o777 == 0o600

    def ask(target="/v1/status", method="GET", **headers):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{target}",
            headers={k.title(): v for k, v in headers.items()},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code if set(json.loads(error.read())) == {"error", "fix"} else None

    bearer = f"Bearer {token}"
    assert ask() == 401
    assert ask(authorization="Bearer wrong") == 401
    assert ask(authorization=bearer) == 200
    assert ask(authorization=bearer, host="evil.example") == 403
    assert ask(authorization=bearer, origin="http://evil.example") == 403
    assert ask(authorization=bearer, origin=f"http://localhost:{port}") == 200
    # What a browser's EventSource can send, and nothing else.
    streams, stream = {"accept": "text/event-stream"}, f"/v1/events?follow=1&token={token}"
    assert ask(stream, **streams) == 200
    assert ask(stream) == 401
    assert ask("/v1/events?follow=1&token=wrong", **streams) == 401
    assert ask(stream, origin="http://evil.example", **streams) == 403
    assert ask(f"/v1/down?token={token}", "POST", **streams) == 401


def test_processes_can_be_listed_and_asked_for_by_their_id(cluster):
    run = cluster.submit({"main": {"command": ["sleep", "1000"], "count": 2}})
    cluster.wait_state(run, "running")
    found = cluster.get(f"/v1/processes?run={run}")["processes"]
    assert found == cluster.processes(run)
    assert cluster.get("/v1/processes")["processes"][:2] == found, "the newest run first"
    assert len(cluster.get("/v1/processes?limit=1")["processes"]) == 1
    assert cluster.get(f"/v1/processes/{found[1]['attempt']}") == found[1]
    for missing in (f"{run}.main.0.9", run, "none.main.0.0"):
        with pytest.raises(NotFoundError):
            cluster.get(f"/v1/processes/{missing}")
    cluster.post(f"/v1/runs/{run}/stop", {"hard": True})
    cluster.wait_ended(run)
    ended = cluster.get("/v1/processes?all=1")["processes"][:2]
    assert [process["state"] for process in ended] == ["exited", "exited"]


def test_values_of_environment_and_secrets_reach_the_process_and_nothing_else(cluster):
    script = 'echo "$PLAIN $OWN" > seen; cat <&$ARGOSY_SECRET_KEY_FD > secret; echo done'
    run = cluster.submit(
        {
            "main": {
                "command": ["sh", "-c", script],
                "env": {"OWN": "ownvalue-77aa"},
                "secrets": ["KEY"],
                "cwd": str(cluster.home.parent),
            }
        },
        env={**os.environ, "PLAIN": "plainvalue-5d2f"},
        secrets={"KEY": "secretvalue-9c1e"},
    )
    assert cluster.wait_ended(run)["outcome"] == "succeeded"
    assert (cluster.home.parent / "seen").read_text().strip() == "plainvalue-5d2f ownvalue-77aa"
    assert (cluster.home.parent / "secret").read_text().strip() == "secretvalue-9c1e"
    for path in cluster.home.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"plainvalue-5d2f" not in content, path
            assert b"ownvalue-77aa" not in content, path
            assert b"secretvalue-9c1e" not in content, path


def test_the_keeper_forgets_values_with_the_last_run_that_needs_them(cluster):
    def held():
        num_blobs = 0
        for path in Path(f"/proc/{cluster.pids()['keeper']}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                num_blobs += "argosy:blob" in os.readlink(path)
        return num_blobs

    def submit(value, **more):
        role = {"command": ["sleep", "1000"], "env": {"OWN": value}}
        return cluster.submit({"main": role}, env={"PATH": os.environ["PATH"]}, **more)

    runs = [submit("one"), submit("one"), submit("two")]
    assert held() == 3
    for run, left in zip(runs, (3, 2, 0), strict=True):
        cluster.post(f"/v1/runs/{run}/stop", {"hard": True})
        cluster.wait_ended(run)
        wait_until(lambda left=left: held() == left, f"{left} values are held")
    again = submit("one")
    cluster.wait_state(again, "running")


def test_a_tied_run_ends_when_its_client_vanishes(cluster, follow):
    run = cluster.submit({"main": {"command": ["sleep", "1000"]}}, tied=True)
    stream = follow(f"/v1/runs/{run}/stream?tied=1")
    next(stream.events())
    cluster.wait_state(run, "running")
    stream.close()
    view = cluster.wait_ended(run)
    assert view["outcome"] == "stopped"
    assert any(
        "client" in fact.get("text", "") + fact.get("reason", "") for fact in cluster.facts(run)
    )


def test_a_run_that_is_not_tied_outlives_its_client(cluster, follow):
    run = cluster.submit({"main": {"command": ["sleep", "1000"]}})
    stream = follow(f"/v1/runs/{run}/stream")
    next(stream.events())
    stream.close()
    tied = cluster.submit({"main": {"command": ["sleep", "1000"]}})
    follow(f"/v1/runs/{tied}/stream?tied=1").close()
    cluster.wait_ended(tied)
    assert cluster.view(run)["state"] != "ended"


def test_signals_reach_a_process(cluster):
    script = "trap 'echo got; exit 0' USR1; echo ready; while :; do sleep 0.05; done"
    run = cluster.submit({"main": {"command": ["sh", "-c", script]}})
    wait_until(lambda: cluster.lines(run), "the trap is set")
    (process,) = cluster.processes(run)
    target = f"/v1/processes/{process['attempt']}/signal"
    status, problem = post(cluster.paths.http_socket, target, b'{"signal": "SIGNONE"}')
    assert status == 422
    assert "SIGNONE" in problem["error"]
    assert cluster.post(target, {"signal": "SIGUSR1"}) == {"ok": True}
    assert cluster.wait_ended(run)["outcome"] == "succeeded"
    assert cluster.lines(run)[-1]["text"] == "got"


def test_a_command_is_started_beside_a_process(cluster):
    run = cluster.submit({"main": {"command": ["sleep", "1000"], "env": {"MARK": "m1"}}})
    (process,) = cluster.wait_state(run, "running")
    target = f"/v1/processes/{process['attempt']}/exec"
    started = cluster.post(
        target, {"argv": ["sh", "-c", "echo $MARK $MORE; exit 7"], "env": {"MORE": "m2"}}
    )
    state = wait_until(
        lambda: s if not (s := cluster.get(f"/v1/exec/{started['attempt']}"))["running"] else None,
        "the end of the command",
    )
    assert state["code"] == 7
    assert Path(started["stdout"]).read_text() == "m1 m2\n"
    assert cluster.view(run)["state"] == "running"
    with pytest.raises(ArgosyError):
        cluster.get("/v1/exec/none")


def test_stacks_of_a_sleeping_and_of_a_stopped_python_process(cluster, tmp_path, halt):
    script = tmp_path / "sleeper.py"
    script.write_text(
        "import time\ndef deep():\n    print('in', flush=True)\n    time.sleep(1000)\ndeep()\n"
    )
    role = {"script": str(script), "warm": False, "count": 2}
    run = cluster.submit({"main": role})
    wait_until(lambda: len(cluster.lines(run)) == 2, "both sleep")
    processes = cluster.processes(run)
    halt(processes[1]["pid"])
    stacks = cluster.get(f"/v1/runs/{run}/stacks")["stacks"]
    assert [stack["index"] for stack in stacks] == [0, 1]
    for stack in stacks:
        frames = [frame["function"] for thread in stack["threads"] for frame in thread["frames"]]
        assert "deep" in frames, stack
        assert stack["source"] == "py-spy"
    assert stacks[1]["state"].startswith("T")
    only = cluster.get(f"/v1/runs/{run}/stacks?role=main&index=0")["stacks"]
    assert [stack["index"] for stack in only] == [0]


def test_stacks_of_what_is_not_python_say_why(cluster):
    run = cluster.submit({"main": {"command": ["sleep", "1000"]}})
    cluster.wait_state(run, "running")
    (stack,) = cluster.get(f"/v1/runs/{run}/stacks")["stacks"]
    assert stack["threads"] == []
    assert stack["error"]


def test_down_is_refused_while_something_is_alive_and_forced_ends_it_in_the_log(cluster):
    run = cluster.submit({"main": {"command": ["sleep", "1000"]}}, service=True)
    cluster.wait_state(run, "running")
    status, problem = post(cluster.paths.http_socket, "/v1/down", b"{}")
    assert status == 409
    assert "--force" in problem["fix"]
    cluster.post("/v1/down", {"force": True})
    wait_until(lambda: not cluster.leftovers(), "nothing is left")
    assert not os.path.exists(cluster.paths.http_socket)
