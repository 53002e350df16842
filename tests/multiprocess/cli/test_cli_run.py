"""`argosy run` for real: output, exit codes, interrupts, and clients that vanish."""

import json
import os
import signal
import sys

import pytest

pytestmark = pytest.mark.multiprocess

SLEEPER = ["--", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    "--",
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def alive(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            return "State:\tZ" not in file.read()
    except OSError:
        return False


def test_the_output_of_one_process_is_its_bytes_on_the_right_stream(argosy):
    client = argosy.start("run", "--", "sh", "-c", r"printf 'a\377b\r'; printf 'x' >&2; printf c")
    assert client.end() == 0
    assert client.out_path.read_bytes() == b"a\xffb\rc"
    assert client.err_path.read_bytes() == b"x"


@pytest.mark.parametrize(("program", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_exit_code_is_the_programs(argosy, program, code):
    argosy("run", "--", "sh", "-c", program, code=code)


def test_a_script_is_forked_warm_and_gets_its_arguments(argosy):
    script = argosy.script("args.py", "import sys\nprint(__name__, sys.argv)\n")
    done = argosy("run", "--preload", "json", "--name", "args", script, "--", "-n", "7")
    assert done.stdout == "__main__ ['args.py', '-n', '7']\n"
    started = [f for f in argosy.facts("args") if f["kind"] == "attempt.started"]
    assert [fact["how"] for fact in started] == ["fork"]


def test_a_module_is_run(argosy):
    done = argosy("run", "-m", "json.tool", "--preload", "json", "--", "--help")
    assert "usage" in done.stdout


def test_ranks_are_folded_and_know_each_other(argosy):
    done = argosy(
        "run",
        "-n",
        "3",
        "--",
        "sh",
        "-c",
        "echo world $WORLD_SIZE; sleep 0.3; echo me $RANK of $LOCAL_WORLD_SIZE",
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "[0-2] world 3"
    assert sorted(lines[1:]) == [f"[{rank}] me {rank} of 3" for rank in range(3)]
    assert "argosy: starting 3 ranks, generation 1" in done.stderr


def test_a_failed_gang_ends_with_the_first_cause_and_marks_the_others(argosy):
    program = "if [ $RANK = 1 ]; then echo 'bad batch' >&2; exit 7; fi; exec sleep 600"
    done = argosy(
        "run", "-n", "3", "--restart", "0", "--name", "culprit", "--", "sh", "-c", program, code=7
    )
    tail = done.stderr[done.stderr.index("failed: ") :]
    assert "rank 1 on" in tail
    assert "exited with code 7" in tail
    assert "| bad batch" in tail
    assert "collateral: ranks 0,2 were stopped by Argosy" in tail
    why = argosy.json("why", "culprit")
    assert why["first_cause"]["cause"]["rank"] == 1
    assert sorted(a["rank"] for a in why["first_cause"]["stopped"]) == [0, 2]
    assert "first cause: rank 1" in argosy("why", "culprit").stdout


def test_a_killed_rank_heals_and_the_watcher_is_told(argosy):
    program = "echo begun $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep 600; exit 0"
    client = argosy.start("run", "-n", "2", "--name", "heals", "--", "sh", "-c", program)
    client.wait_for("begun 0")
    victim = next(p for p in argosy.wait_running("heals", 2) if p["rank"] == 1)
    os.kill(victim["pid"], signal.SIGKILL)
    assert client.end() == 0
    assert "argosy: rank 1 killed by SIGKILL" in client.err
    assert "argosy: generation 2: 2 ranks" in client.err
    assert "[0-1] begun 1" in client.out
    why = argosy("why", "heals").stdout
    assert "1 failure was healed" in why
    assert "rank 1" in why


def test_a_single_process_is_restarted_as_often_as_asked(argosy):
    done = argosy("run", "--restart", "2", "--", "sh", "-c", "echo try; exit 4", code=4)
    assert done.stdout == "try\n" * 3
    assert "main/0 started again (restart 1 of 2, pid" in done.stderr
    assert "restart 2 of 2" in done.stderr


def test_ctrl_c_stops_gracefully_and_says_so(argosy):
    program = "trap 'echo cleaned up; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    client = argosy.start("run", "--", "sh", "-c", program)
    client.wait_for("up")
    client.interrupt()
    assert client.end() != 0
    assert "cleaned up" in client.out
    assert "argosy: stopping the run (Ctrl-C again kills it, and saves nothing)" in client.err


def test_ctrl_c_twice_kills(argosy):
    client = argosy.start("run", "--name", "stubborn", *STUBBORN)
    client.wait_for("up")
    (process,) = argosy.wait_running("stubborn")
    client.interrupt()
    client.wait_for("stopping the run")
    client.interrupt()
    assert client.end() == 137
    assert "argosy: killing the run" in client.err
    assert not alive(process["pid"])


def test_a_client_that_is_killed_leaves_the_run_going(argosy):
    client = argosy.start("run", "--name", "orphan", *SLEEPER)
    client.wait_for("up")
    client.process.kill()
    client.end()
    (process,) = argosy.wait_running("orphan")
    argosy("stop", "orphan")
    assert not alive(process["pid"])


def test_a_tied_run_ends_with_its_client(argosy):
    client = argosy.start("run", "--tied", "--name", "tied", *SLEEPER)
    client.wait_for("up")
    (process,) = argosy.wait_running("tied")
    client.process.kill()
    client.end()
    assert argosy.wait_ended("tied")["outcome"] == "stopped"
    assert not alive(process["pid"])


def test_no_line_is_lost_or_doubled_when_the_controller_is_killed(argosy):
    program = "for i in $(seq 80); do echo line $i; sleep 0.02; done"
    single = argosy.start("run", "--", "sh", "-c", program)
    several = argosy.start("run", "-n", "2", "--", "sh", "-c", program)
    single.wait_for("line 10\n")
    several.wait_for("line 10\n")
    os.kill(argosy.json("status")["pids"]["controller"], signal.SIGKILL)
    assert (single.end(), several.end()) == (0, 0)
    expected = [f"line {i}" for i in range(1, 81)]
    assert single.out.splitlines() == expected
    for rank in "01":
        lines = [line.partition("] ") for line in several.out.splitlines()]
        assert [text for label, _, text in lines if rank in label] == expected


def test_the_program_gets_the_environment_directory_umask_and_limits_of_the_shell(argosy):
    (argosy.work / "below").mkdir()
    inner = f"{sys.executable} -m argosy run --env LEVEL=3 -- sh -c 'echo $LEVEL $COLOUR; pwd; umask; ulimit -n; ulimit -c'"
    done = argosy.start("run", "--", "sh", "-c", "true")
    assert done.end() == 0
    import subprocess

    shell = subprocess.run(
        ["sh", "-c", f"cd below; umask 027; ulimit -n 321; ulimit -c 0; COLOUR=blue {inner}"],
        env={**argosy.environment, "COLOUR": "blue"},
        cwd=argosy.work,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shell.stdout.split() == ["3", "blue", str(argosy.work / "below"), "0027", "321", "0"]


def test_a_secret_may_be_empty(argosy):
    read = "wc -c <&$ARGOSY_SECRET_KEY_FD"
    assert argosy("run", "--secret", "KEY=@/dev/null", "--", "sh", "-c", read).stdout.strip() == "0"


def test_a_secret_comes_by_descriptor_and_is_written_nowhere(argosy):
    (argosy.work / "key").write_text("hunter2")
    run = argosy.json("run", "--detach", "--secret", "KEY=@key", "--name", "secretive", "--", "sh", "-c", "wc -c <&$ARGOSY_SECRET_KEY_FD")["runs"][0]["run"]  # fmt: skip
    view = argosy.wait_ended(run)
    assert view["outcome"] == "succeeded"
    assert argosy("logs", run).stdout == "[0] 7\n"
    assert "hunter2" not in json.dumps(argosy.json("events", run))
    for path in argosy.home.rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes(), path


def test_detach_prints_the_id_and_returns(argosy):
    run = argosy("run", "--detach", *SLEEPER).stdout.strip()
    argosy.wait_running(run)
    assert argosy("stop", run).stdout == f"{run} stopped\n"
    assert argosy.view(run)["outcome"] == "stopped"


def test_a_spec_file_starts_its_roles_in_order(argosy):
    (argosy.work / "job.toml").write_text(
        """
[roles.first]
command = ["sh", "-c", "touch ready; exec sleep 600"]
restart = "permanent"
ready = { file = "ready" }
[roles.second]
command = ["sh", "-c", "ls ready; echo $WHAT"]
after_ready = ["first"]
"""
    )
    done = argosy("run", "job.toml", "--set", "roles.second.env.WHAT=that")
    assert "[second] ready\n[second] that\n" in done.stdout


def test_with_json_stdout_holds_json_alone(argosy):
    done = argosy("run", "--json", "--", "sh", "-c", "echo said; exit 3", code=3)
    view = json.loads(done.stdout)
    assert (view["outcome"], view["exit_code"]) == ("failed", 3)
    assert "said\n" in done.stderr


def test_a_run_from_python_is_the_same(argosy):
    program = (
        "import argosy\n"
        "handle = argosy.submit({'name': 'py', 'roles': {'main': {'command': ['sh', '-c', 'exit 0']}}}, wait=True)\n"
        "print(handle.view()['outcome'])\n"
        "try:\n"
        "    argosy.submit({'roles': {'main': {'command': ['sh', '-c', 'exit 5']}}}, wait=True)\n"
        "except argosy.RunFailed as error:\n"
        "    print(type(error).__name__, error.exit_code)\n"
        "read = ['sh', '-c', 'test $(cat <&$ARGOSY_SECRET_KEY_FD) = deep']\n"
        "spec = argosy.RunSpec(roles={'main': argosy.RoleSpec(command=read, secrets=['KEY'])})\n"
        "print(argosy.submit(spec, wait=True, secrets={'KEY': 'deep'}).view()['outcome'])\n"
        "array = {'name': 'lot', 'array': 3, 'roles': {'main': {'command': ['true']}}}\n"
        "handles = argosy.submit_array(array, wait=True)\n"
        "print(*(handle.name + ' ' + handle.view()['outcome'] for handle in handles))\n"
    )
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=argosy.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, failed, secret, array = done.stdout.splitlines()
    assert (first, failed, secret) == ("succeeded", "RunFailed 5", "succeeded"), done.stderr
    assert array == "lot[0] succeeded lot[1] succeeded lot[2] succeeded"
