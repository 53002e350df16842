"""Bringing the cluster up and down, and everything that can be in the way."""

import json
import os
import shutil
import signal
import socket
import tempfile
import threading

import pytest

from argosy.control.home import locate_cluster, look_at_cluster
from argosy.control.stalled import parts_of

pytestmark = pytest.mark.multiprocess


def test_up_status_down_leave_nothing_behind(fresh):
    assert fresh.json("status", code=3)["running"] is False
    assert "cluster started" in fresh("up").stdout
    assert "already up" in fresh("up").stdout
    assert set(fresh.json("status")["pids"]) == {"controller", "keeper", "agent"}
    fresh("down")
    assert fresh.leftovers() == {}
    fresh("status", code=3)
    assert "no cluster was running" in fresh("down").stdout
    assert not os.path.exists(locate_cluster(str(fresh.home)).runtime)


def test_down_refuses_while_a_run_is_alive_unless_forced(fresh):
    run = fresh.detach("--", "sleep", "600")
    (process,) = fresh.wait_running(run)
    refused = fresh("down", code=69)
    assert "alive" in refused.stderr
    assert "--force" in refused.stderr
    assert "argosy stop --all" in refused.stderr
    assert os.path.exists(f"/proc/{process['pid']}")
    (ended,) = fresh.json("down", "--force")["runs"]
    assert (ended["run"], ended["outcome"]) == (run, "stopped")
    assert ended["reason"].startswith("argosy down --force")
    assert fresh.leftovers() == {}


def test_a_cluster_whose_home_was_moved_away_is_still_taken_down(fresh):
    fresh("up")
    moved = fresh.home.with_name("moved")
    fresh.home.rename(moved)
    assert "cluster stopped" in fresh("down").stdout
    assert fresh.leftovers() == {}


def test_another_shell_finds_the_cluster_wherever_its_sockets_are(fresh):
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        fresh.environment["XDG_RUNTIME_DIR"] = runtime
        run = fresh.detach("--", "sleep", "600")
        (process,) = fresh.wait_running(run)
        pids = fresh.json("status")["pids"]
        del fresh.environment["XDG_RUNTIME_DIR"]
        assert fresh.json("status")["pids"] == pids
        assert fresh("run", "--", "echo", "hello").stdout == "hello\n"
        assert fresh.json("status")["pids"] == pids
        assert fresh.is_alive(process["pid"])
        fresh("stop", run)
        fresh("down")
        assert os.listdir(runtime) == []
    assert fresh.leftovers() == {}


def test_a_cluster_whose_sockets_were_removed_is_named_kept_and_ended_by_force(fresh):
    run = fresh.detach("--", "sleep", "600")
    (process,) = fresh.wait_running(run)
    fresh.wait_until(
        lambda: parts_of(look_at_cluster(fresh.environment))["keeper"].age_seconds > 10,
        "a keeper that has not just begun",
    )
    shutil.rmtree(locate_cluster(str(fresh.home)).runtime)
    for words in (["ps"], ["status"], ["down"], ["run", "--", "true"]):
        refused = fresh(*words, code=69).stderr
        assert "a cluster is running, but nobody listens" in refused
        assert "argosy down --force" in refused
    assert fresh.is_alive(process["pid"])
    assert "ended by force" in fresh("down", "--force").stdout
    assert not fresh.is_alive(process["pid"])
    assert fresh.leftovers() == {}


def test_all_runs_are_stopped_at_once(fresh):
    runs = [fresh.detach("--", "sleep", "600") for _ in range(2)]
    said = fresh("stop", "--all").stdout
    assert all(f"run {run} stopped" in said for run in runs)
    assert "no run is alive" in fresh("stop", "--all").stdout
    fresh("down")


def test_read_commands_start_nothing_and_say_how_to(fresh):
    for words in (["ps"], ["logs"], ["stop"], ["queue"], ["why"], ["tree"]):
        done = fresh(*words, code=69)
        assert "no cluster is running here" in done.stderr
        assert "argosy up" in done.stderr
    assert fresh.leftovers() == {}


@pytest.mark.parametrize(
    "words",
    [["absent.py"], ["--", "no-such-program-here"], ["absent.toml"], ["-n", "0", "x.py"], ["."], ["bad.toml"], ["--on", "mars", "--", "true"]],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_is_refused_before_anything_starts(fresh, words):
    (fresh.work / "bad.toml").write_text('[roles.a]\ncommand = ["true"]\nafter = ["b"]\n')
    done = fresh("run", *words, code=64)
    assert done.stderr.startswith("argosy: ")
    assert "fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert fresh.leftovers() == {}


def test_two_runs_at_once_bring_up_one_cluster(fresh):
    clients = [fresh.start("run", "--", "sh", "-c", f"echo {n}") for n in range(3)]
    assert [client.end() for client in clients] == [0, 0, 0], [client.err for client in clients]
    assert [client.out for client in clients] == ["0\n", "1\n", "2\n"]
    assert len(fresh.json("ps", "--all")["runs"]) == 3


def test_stale_sockets_of_a_dead_cluster_are_no_obstacle(fresh, halt):
    pids = fresh.json("up")["pids"]
    run = fresh.detach("--", "sleep", "600")
    (process,) = fresh.wait_running(run)
    for part in ("keeper", "controller", "agent"):
        # The keeper first would be replaced by the others; all at once is a crash of the machine's user session.
        halt(pids[part])
    for part in ("keeper", "controller", "agent"):
        os.kill(pids[part], signal.SIGKILL)
    assert fresh("run", "--", "sh", "-c", "echo again").stdout == "again\n"
    assert not fresh.is_alive(process["pid"])
    assert fresh.json("status")["pids"]["keeper"] != pids["keeper"]


def test_an_unusable_home_is_one_clear_error(fresh):
    fresh.home.write_text("a file")
    done = fresh("run", "--", "true", code=73)
    assert "is not a directory" in done.stderr


def test_a_home_of_another_format_is_refused_and_left_alone(fresh):
    fresh.home.mkdir()
    (fresh.home / "VERSION").write_text("99\n")
    done = fresh("run", "--", "true", code=73)
    assert "99" in done.stderr
    assert (fresh.home / "VERSION").read_text() == "99\n"
    (fresh.home / "VERSION").unlink()


class Impostor:
    """Something that listens where the controller should."""

    def __init__(self, fresh, answer):
        from argosy.control.home import open_cluster

        paths = open_cluster({"ARGOSY_HOME": str(fresh.home)})
        self.path = paths.http_socket
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            connection, _ = self._listener.accept()
            with connection:
                request = connection.recv(1 << 20)
                if request.startswith(b"END"):
                    return
                connection.sendall(self._answer(request))

    def close(self):
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.path)
            last.send(b"END")
        self._thread.join(10)
        self._listener.close()
        os.unlink(self.path)


@pytest.fixture
def impostor(fresh):
    made = []

    def make(answer):
        made.append(Impostor(fresh, answer))

    yield make
    for each in made:
        each.close()


def test_a_cluster_of_another_version_is_named_with_the_fix(fresh, impostor):
    def answer(request):
        if b"/v1/status" in request:
            body = json.dumps({"version": "9.9.9", "pids": {}}).encode()
            return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        body = b'{"error": "the body is wrong: unknown field", "fix": ""}'
        return b"HTTP/1.1 422 No\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    impostor(answer)
    done = fresh("run", "--", "true", code=76)
    assert "the cluster runs Argosy 9.9.9" in done.stderr
    assert "argosy down" in done.stderr
    assert "9.9.9 (this command is" in fresh("status").stdout


def test_a_stranger_on_the_socket_is_named(fresh, impostor):
    impostor(lambda request: b"220 smtp ready\r\n\r\n")
    assert "does not speak HTTP" in fresh("ps", code=76).stderr
