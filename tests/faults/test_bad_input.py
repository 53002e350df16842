"""What people and strangers can get wrong: one clear error with a fix, or the run goes on; the cluster is as it was."""

import contextlib
import errno
import json
import os
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.faults]

BAD_SPECS = {
    "no roles": ("[roles]\n", "roles is empty", "name at least one role"),
    "nothing at all": ("", "there is no role in it", "[roles.main]"),
    "not toml": ("[roles.a\n", "", ""),
    "misspelt key": ('[roles.a]\ncomand = ["true"]\n', "`roles.a.comand`", "`command`"),
    "wrong type": ('[roles.a]\ncommand = "true"\n', "got `str` at `roles.a.command`", "a list"),
    "negative count": ('[roles.a]\ncommand = ["true"]\ncount = -1\n', "count = -1", "1 or more"),
    "huge count": (
        '[roles.a]\ncommand = ["true"]\ncount = 1000000000\n',
        "1000000000 processes",
        "at most",
    ),
    "negative grace": (
        '[roles.a]\ncommand = ["true"]\ngrace_seconds = -5\n',
        "grace_seconds",
        "",
    ),
    "cycle": (
        '[roles.a]\ncommand = ["true"]\nafter = ["b"]\n[roles.b]\ncommand = ["true"]\nafter = ["a"]\n',
        "a -> b -> a",
        "take one of them out",
    ),
    "no such command": ('[roles.a]\ncommand = ["no-such"]\n', "no command 'no-such'", "full path"),
    "no such command of a probe": (
        '[roles.a]\ncommand = ["true"]\nready = {command = ["no-such"]}\n',
        "no command 'no-such'",
        "full path",
    ),
    "no such script": ('[roles.a]\nscript = "no.py"\n', "no.py does not exist", "check the path"),
    "no such directory": (
        '[roles.a]\ncommand = ["true"]\ncwd = "absent"\n',
        "absent does not exist",
        "mkdir",
    ),
    "endless grace": ('[roles.a]\ncommand = ["true"]\ngrace_seconds = inf\n', "= inf", "finite"),
    "a name too long for files": (f'[roles.{"r" * 300}]\ncommand = ["true"]\n', "no name", "1 to"),
    "a CPU that is not there": (
        '[roles.a]\ncommand = ["true"]\ncpus = [9999]\n',
        "roles.a.cpus names CPU 9999",
        "use some of 0",
    ),
    "two roles of one name": (
        '[roles.a-b]\ncommand = ["true"]\nports = {x = 0}\n[roles.a_b]\ncommand = ["true"]\nports = {x = 0}\n',
        "both published as ARGOSY_PORT_A_B_0_X",
        "rename",
    ),
    "port out of range": ('[roles.a]\ncommand = ["true"]\nports = {web = 70000}\n', "70000", ""),
}


def assert_refused(done, code, *words):
    """Two lines for a person, and the exit code of the error's class."""
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.endswith("…")]
    assert lines[0].startswith("argosy: "), done.stderr
    assert any(line.startswith("  fix: ") for line in lines[1:]), done.stderr
    assert "Traceback" not in done.stderr
    assert "bug of ours" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("name", BAD_SPECS)
def test_a_wrong_spec_is_refused_and_starts_nothing(shared, tmp_path, name):
    text, *words = BAD_SPECS[name]
    (tmp_path / "spec.toml").write_text(text)
    before = shared.json("ps", "--all")
    done = shared.argosy("run", "spec.toml", check=False, cwd=tmp_path)
    assert_refused(done, 64, *words)
    assert shared.json("ps", "--all") == before


def test_what_cannot_be_executed_ends_with_the_shells_codes(shared, tmp_path):
    plain, text, dangling = tmp_path / "plain", tmp_path / "text", tmp_path / "dangling"
    plain.write_text("not executable")
    text.write_text("neither a program nor a script")
    dangling.write_text("#!/no/such/interpreter\n")
    text.chmod(0o755)
    dangling.chmod(0o755)
    assert_refused(shared.argosy("run", "--", plain, check=False), 64, "chmod +x")
    for program, code, why in ((text, 126, "no #! line"), (dangling, 127, "interpreter")):
        done = shared.argosy("run", "--", program, check=False)
        assert done.returncode == code
        assert why in done.stderr


def test_a_port_in_use_fails_the_run_and_names_port_and_fix(shared, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        spec = tmp_path / "spec.toml"
        spec.write_text(f'[roles.a]\ncommand = ["true"]\nports = {{web = {port}}}\n')
        done = shared.argosy("run", spec, check=False)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert "fix: " in done.stderr
    assert shared.argosy("run", spec).returncode == 0


def test_a_deleted_working_directory_is_one_clear_error(shared, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir {gone}; exec {sys.executable} -m argosy run -- true"
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=gone, env=shared.environment, capture_output=True, text=True
    )
    assert_refused(done, 64, "does not exist any more")


def test_spaces_and_letters_of_any_language_in_paths_and_arguments(shared, tmp_path):
    folder = tmp_path / "sp ace ü 船"
    folder.mkdir()
    (folder / "scr ipt ß.py").write_text("import os, sys\nprint(os.getcwd(), sys.argv)\n")
    words = ["run", "--no-warm", "scr ipt ß.py", "--", "a b", "日本", ""]
    done = shared.argosy(*words, cwd=folder)
    assert done.stdout == f"{folder} {['scr ipt ß.py', 'a b', '日本', '']}\n"


def test_a_huge_environment_and_many_arguments_arrive(shared):
    big = {f"BIG{n}": "x" * 100_000 for n in range(11)}
    words = [f"argument-{n}" for n in range(10_000)]
    script = 'echo $# ${#BIG10} "$10000"'
    done = shared.argosy("run", "-n", "2", "--", "sh", "-c", script, "sh", *words, env=big)
    assert done.stdout == "[0-1] 10000 100000 argument-00000\n"


def test_what_is_too_large_is_refused_with_the_limit(shared, tmp_path):
    spec, secret = tmp_path / "big.toml", tmp_path / "secret"
    spec.write_text('[roles.a]\ncommand = ["true"]\n#' + "x" * (5 << 20))
    assert_refused(shared.argosy("run", spec, check=False), 64, "larger than 4 MiB")
    secret.write_text("s" * (20 << 20))
    done = shared.argosy("run", "--secret", f"KEY=@{secret}", "--", "true", check=False)
    assert_refused(done, 64, "16")
    assert shared.argosy("run", "--", "echo", "well").stdout == "well\n"


def test_a_client_of_another_version_is_told_and_nothing_else_changes(shared):
    run = shared.detach("--", "sleep", "600")
    pids = shared.wait_running(run, 1)
    program = (
        "import sys, argosy\n"
        "argosy.__version__ = '9.9.9'\n"
        "import argosy.cli.run as verb\n"
        "old = verb.describe_shell\n"
        "verb.describe_shell = lambda *a, **k: old(*a, **k) | {'from_the_future': 1}\n"
        "from argosy.cli.app import main\n"
        "sys.exit(main(['run', '--', 'true']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=shared.environment, capture_output=True, text=True
    )
    assert_refused(done, 76, "9.9.9", "argosy down", "from_the_future")
    assert shared.running_pids(run) == pids
    shared.argosy("stop", run)


def test_a_second_controller_or_agent_is_refused_while_the_first_serves(shared, tmp_path):
    before, paths = shared.pids(), where(shared)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "second.sock"))
    listener.listen()
    options = ["--directory", paths["directory"], "--runtime", paths["runtime"]]
    extra = {"controller": ["--control-fd", str(listener.fileno())], "agent": []}
    seconds = {
        part: subprocess.Popen(
            [sys.executable, "-m", f"argosy.control.{part}", *options, *more],
            env=shared.environment,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[listener.fileno()],
        )
        for part, more in extra.items()
    }
    for part, second in seconds.items():
        _, errors = second.communicate(timeout=30)
        assert second.returncode == 69, errors
        assert f"another {part} (pid {before[part]})" in errors
        assert "ARGOSY_HOME" in errors
    listener.close()
    assert shared.pids() == before


def where(cluster):
    (directory,) = (cluster.home / "clusters").iterdir()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    found = f"{runtime}/argosy-{directory.name}" if runtime else ""
    if not os.path.exists(f"{found}/keeper.sock"):
        found = f"/tmp/argosy-{os.getuid()}-{directory.name}"
    port = json.loads((directory / "http.json").read_text())["port"]
    return {"directory": str(directory), "runtime": found, "port": port}


GARBAGE = {
    "noise": bytes(range(256)) * 64,
    "half a header": b"\0\0",
    "half a frame": struct.pack(">I", 1000) + b'{"type":"hel',
    "oversized": struct.pack(">I", 0xFFFFFFFF) + b"x" * 4096,
    "empty frame": struct.pack(">I", 0),
    "deep": struct.pack(">I", 100_000) + b"[" * 100_000,
    "not an object": struct.pack(">I", 4) + b"1234",
    "unknown type": struct.pack(">I", 15) + b'{"type":"what"}',
    "endless header": b"GET /v1/status HTTP/1.1\r\nx: " + b"a" * 200_000,
    "lying length": b"POST /v1/runs HTTP/1.1\r\nhost: argosy\r\ncontent-length: 99999999999\r\n\r\n",
    "half a body": b"POST /v1/runs HTTP/1.1\r\nhost: argosy\r\ncontent-length: 100\r\n\r\n{",
}


def knock(paths, name):
    if name == "tcp":
        return socket.create_connection(("127.0.0.1", paths["port"]), timeout=10)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(10)
    stranger.connect(f"{paths['runtime']}/{name}")
    return stranger


@pytest.mark.parametrize("name", ["keeper.sock", "control.sock", "http.sock", "tcp"])
def test_strangers_on_a_socket_disturb_neither_the_cluster_nor_a_run(shared, name):
    run = shared.detach("--", "sleep", "600")
    pids, parts, paths = shared.wait_running(run, 1), shared.pids(), where(shared)
    strangers = []
    try:
        for data in GARBAGE.values():
            for should_stay in (False, True):
                stranger = knock(paths, name)
                try:
                    stranger.sendall(data)
                    if not should_stay:
                        stranger.shutdown(socket.SHUT_WR)
                        while stranger.recv(65536):
                            pass
                except OSError as error:
                    # Refused before everything was said, which is fine; anything else is not.
                    if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                        raise
                strangers.append(stranger)
        assert shared.argosy("run", "--", "echo", "well").stdout == "well\n"
        assert shared.running_pids(run) == pids
        assert shared.pids() == parts
        shared.argosy("stop", run)
    finally:
        for stranger in strangers:
            stranger.close()


def change_format(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma user_version = 77")


def damage(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"x" * (len(whole) - 4096))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(change_format, ["version 77", "this Argosy reads"]), (damage, ["malformed", "mv "])],
    ids=["another format", "damaged"],
)
def test_an_event_log_that_cannot_be_read_is_named_by_every_command(cluster, spoil, words):
    cluster.argosy("run", "--", "true")
    cluster.argosy("down")
    (log,) = (cluster.home / "clusters").glob("*/events.sqlite")
    spoil(log)
    for verb in (["up"], ["ps"], ["run", "--", "true"], ["down"]):
        assert_refused(cluster.argosy(*verb, check=False), 73, str(log), *words)
    log.rename(f"{log}.broken")
    cluster.wait_until(
        lambda: cluster.argosy("run", "--", "echo", "well", check=False).stdout == "well\n",
        "it starts with an empty log",
    )
    cluster.argosy("down")
    spoil(log)
    cluster.argosy("up", check=False)
    cluster.argosy("down", "--force")


def test_stop_and_down_may_be_said_again(cluster):
    run = cluster.detach("--", "sleep", "600")
    cluster.argosy("stop", run)
    again = cluster.argosy("stop", run)
    assert f"run {run} has already stopped" in again.stdout
    assert f"run {run} has already stopped" in cluster.argosy("kill", run).stdout
    assert cluster.argosy("down").stdout == "cluster stopped\n"
    assert cluster.argosy("down").stdout == "no cluster was running\n"


def test_two_cold_runs_at_once_share_one_cluster_and_both_end_well(cluster):
    clients = [cluster.start("run", "--", "echo", word) for word in ("one", "two")]
    assert [c.communicate(timeout=60)[0] for c in clients] == ["one\n", "two\n"]
    assert [c.returncode for c in clients] == [0, 0]
    assert len(cluster.json("ps", "--all")["runs"]) == 2
    assert len(list((cluster.home / "clusters").iterdir())) == 1


def test_ctrl_c_at_any_moment_of_a_cold_start_leaves_no_run(cluster):
    for delay in (0.01, 0.1, 0.3, 0.5):
        client = cluster.start("run", "--", "sleep", "600")
        cluster.wait_until(cluster.home.exists, "the command has begun")
        for wait in (delay, 0.02):
            try:
                client.wait(wait)  # not for a condition: the moment of the signal is the test
            except subprocess.TimeoutExpired:
                client.send_signal(2)
        output, errors = client.communicate(timeout=60)
        assert client.returncode in (130, 137, 143, -2), (output, errors)
        assert "Traceback" not in errors
        deadline = time.monotonic() + 20
        while "no run is alive" not in (seen := alive(cluster)):
            assert time.monotonic() < deadline, (delay, seen, errors)
        cluster.argosy("down", "--force")
        shutil.rmtree(cluster.home)


def alive(cluster):
    done = cluster.argosy("ps", check=False)
    return "no run is alive" if "no cluster is running" in done.stderr else done.stdout
