"""Looking at runs and touching them: every verb against a real cluster."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

# All wait for one file, so that equal lines are said at the same time however busy the machine is.
TALKER = [
    "--",
    "sh",
    "-c",
    "until [ -e go ]; do sleep 0.01; done; echo hello; echo me $RANK; echo warn >&2; exec sleep 600",
]
READ_COMMANDS = [
    ["status"], ["ps"], ["ps", "--all"], ["tree"], ["logs", "talk"], ["events", "talk"],
    ["events", "--all"], ["why", "talk"], ["stacks", "talk"], ["queue"], ["queue", "ls"], ["version"],
]  # fmt: skip


@pytest.fixture(scope="module")
def talk(argosy):
    """A gang of two that has said its lines and lives on."""
    run = argosy.detach("-n", "2", "--name", "talk", *TALKER)
    argosy.wait_running(run, 2)
    (argosy.work / "go").touch()
    argosy.wait_until(
        lambda: argosy("logs", "--no-fold", run).stderr.count("warn") == 2, "its lines"
    )
    return run


@pytest.mark.parametrize("words", READ_COMMANDS, ids=" ".join)
def test_every_read_command_gives_json(argosy, talk, words):
    assert isinstance(json.loads(argosy(*words, "--json").stdout), dict)


def test_ps_shows_each_process(argosy, talk):
    header, *rows = argosy("ps", "talk").stdout.splitlines()
    assert header.split()[:5] == ["RUN", "NAME", "ROLE/INDEX", "RANK", "STATE"]
    assert [row.split()[:5] for row in rows] == [
        [talk, "talk", f"train/{rank}", str(rank), "running"] for rank in range(2)
    ]


def test_runs_are_found_by_id_beginning_and_name(argosy, talk):
    for word in (talk, talk[:-1], "talk"):
        assert argosy.json("ps", word)["runs"][0]["run"] == talk


def test_what_does_not_exist_is_named_with_the_nearest(argosy, talk):
    assert "`talk`" in argosy("ps", "tallk", code=66).stderr
    assert "`train`" in argosy("logs", "talk/trian", code=66).stderr
    assert "it has 0 to 1" in argosy("logs", "talk/train/9", code=66).stderr


def test_tree_shows_parts_and_processes(argosy, talk):
    text = argosy("tree").stdout
    for word in (
        "controller",
        "keeper",
        "agent",
        f"run {talk} talk",
        "rank 0 running",
        "rank 1 running",
    ):
        assert word in text


def test_logs_are_folded_filtered_and_cut(argosy, talk):
    done = argosy("logs", "talk")
    assert "[0-1] hello" in done.stdout
    assert done.stderr == "[0-1] warn\n"
    assert argosy("logs", "talk/train/1").stdout == "[1] hello\n[1] me 1\n"
    assert sorted(argosy("logs", "talk", "--no-fold").stdout.splitlines())[:2] == [
        "[0] hello",
        "[0] me 0",
    ]
    tail = argosy("logs", "talk/train/0", "--tail", "1")
    assert (tail.stdout + tail.stderr).count("\n") == 1
    stamped = argosy("logs", "talk/train/0", "--timestamps").stdout.splitlines()[0]
    assert stamped.split()[1:] == ["[0]", "hello"]
    assert stamped.count(":") == 2


def test_logs_follow_until_the_run_ends(argosy):
    run = argosy.detach("--", "sh", "-c", "for i in 1 2 3 4 5 6; do echo n $i; sleep 0.1; done")
    client = argosy.start("logs", "-f", run)
    assert client.end() == 0
    assert client.out.splitlines() == [f"[0] n {i}" for i in range(1, 7)]
    assert "run succeeded" in argosy("events", "-f", run).stdout.splitlines()[-1]


def test_a_closed_pipe_is_no_error_of_ours(argosy, talk):
    import subprocess

    command = " ".join(argosy.command("events", "--all")) + " | head -n 1"
    done = subprocess.run(
        ["sh", "-c", command], env=argosy.environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.count("\n") == 1
    assert "Error" not in done.stderr


def test_events_are_sentences_in_order(argosy, talk):
    lines = argosy("events", "talk").stdout.splitlines()
    text = "\n".join(lines)
    assert "run 'talk' submitted: train x2" in text
    assert "generation 1 of train formed, members 0-1" in text
    numbers = [int(line.split()[0]) for line in lines]
    assert numbers == sorted(set(numbers))


def test_exec_runs_beside_a_process_with_its_environment(argosy, talk):
    done = argosy("exec", "talk/train/1", "--env", "EXTRA=x", "--", "sh", "-c", "echo $RANK $EXTRA $MASTER_ADDR; pwd; echo e >&2; exit 9", code=9)  # fmt: skip
    assert done.stdout == f"1 x 127.0.0.1\n{argosy.work}\n"
    assert done.stderr == "e\n"
    assert (
        "could not be started" in argosy("exec", "talk", "--", "no-such-program", code=127).stderr
    )
    assert "not executable" in argosy("exec", "talk", "--", "/etc/passwd", code=126).stderr
    assert [p["state"] for p in argosy.processes("talk")] == ["running", "running"]


def test_exec_shows_no_token(argosy, talk):
    environment = argosy("exec", "talk/train/1", "--", "env").stdout
    assert "ARGOSY_RUN=" in environment
    assert "ARGOSY_TOKEN" not in environment


def test_a_signal_reaches_one_process_only(argosy):
    program = "trap 'echo got it' USR1; echo up; while :; do sleep 0.05; done"
    run = argosy.detach("-n", "2", "--", "sh", "-c", program)
    client = argosy.start("logs", "-f", run)
    client.wait_for("[0-1] up")
    argosy("kill", f"{run}/train/1", "--signal", "usr1")
    client.wait_for("[1] got it")
    assert "[0] got it" not in client.out
    argosy("kill", run)
    assert client.end() == 0
    assert f"run {run} stopped" in client.err
    assert argosy.view(run)["outcome"] == "stopped"


def test_an_unknown_signal_is_refused(argosy, talk):
    assert "no signal" in argosy("kill", "talk", "--signal", "SIGFOO", code=64).stderr


def test_stop_ends_the_whole_tree_even_what_left_the_session(argosy, tmp_path):
    pidfile = tmp_path / "pid"
    run = argosy.detach(
        "--", "sh", "-c", f"setsid sh -c 'echo $$ > {pidfile}; exec sleep 600' & exec sleep 600"
    )
    argosy.wait_running(run)
    argosy.wait_until(lambda: pidfile.exists() and pidfile.read_text().strip(), "its child")
    pid = int(pidfile.read_text())
    argosy("stop", run)
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_stacks_group_like_ranks_and_show_the_odd_one_first_even_with_the_gil_held(argosy, halt):
    script = argosy.script(
        "stand.py",
        "import os, time\n"
        "def spin():\n    while True: pass\n"
        "def wait():\n    time.sleep(600)\n"
        "print('up', flush=True)\n"
        "spin() if os.environ['RANK'] == '1' else wait()\n",
    )
    run = argosy.detach("-n", "3", "--preload", "json", script)
    client = argosy.start("logs", "-f", run)
    client.wait_for("[0-2] up")
    groups = [line for line in argosy("stacks", run).stdout.splitlines() if line.startswith("[")]
    assert groups[0].startswith("[1] 1 of 3 in spin")
    assert groups[1].startswith("[0,2] 2 of 3 in wait")
    (pid,) = (p["pid"] for p in argosy.processes(run) if p["rank"] == 0)
    halt(pid)
    stopped = argosy("stacks", f"{run}/train/0").stdout
    assert "wait" in stopped
    assert "stopped by a signal" in stopped
    table = argosy("ps", run).stdout
    assert f"kill -CONT {pid}" in table
    assert [p["state"] for p in argosy.processes(run)] == ["stopped", "running", "running"]
    os.kill(pid, signal.SIGCONT)
    argosy("kill", run)


def test_ps_and_the_queue_say_what_a_run_waits_for(argosy):
    cpus = os.cpu_count()
    first = argosy("queue", "add", "--cpus", cpus, "--", "sleep", "600").stdout.strip()
    argosy.wait_running(first)
    ids = argosy(
        "queue", "add", "--cpus", "1", "--array", "3", "--name", "many", "--", "true"
    ).stdout.split()
    assert len(ids) == 3
    assert "queued: needs 1 CPU" in argosy("ps", ids[0]).stdout
    assert [row.split()[0] for row in argosy("queue").stdout.splitlines()[1:]] == ids
    assert "array of 3 runs" in argosy("logs", "many", code=66).stderr
    argosy("queue", "cancel", ids[2])
    assert argosy.wait_ended(ids[2])["outcome"] in ("cancelled", "stopped")
    argosy("stop", first)
    for run in ids[:2]:
        assert argosy.wait_ended(run)["outcome"] == "succeeded"


def test_more_runs_than_are_remembered_are_cancelled_at_once(argosy):
    cpus = os.cpu_count()
    first = argosy("queue", "add", "--cpus", cpus, "--", "sleep", "600").stdout.strip()
    argosy.wait_running(first)
    argosy("queue", "add", "--cpus", "1", "--array", "1500", "--name", "heap", "--", "true")
    said = argosy("queue", "cancel", "heap").stdout.splitlines()
    assert len(said) == 1500
    assert all(line.endswith(" cancelled") for line in said)
    assert "the queue is empty" in argosy("queue").stdout
    argosy("queue", "add", "--cpus", "1", "--array", "1500", "--name", "heap", "--", "true")
    said = argosy("stop", "--all").stdout.splitlines()
    assert said.count(f"run {first} stopped") == 1
    assert len([line for line in said if line.endswith(" cancelled")]) == 1500


def test_an_array_is_cancelled_by_its_name(argosy):
    cpus = os.cpu_count()
    first = argosy("queue", "add", "--cpus", cpus, "--", "sleep", "600").stdout.strip()
    argosy.wait_running(first)
    ids = argosy(
        "queue", "add", "--cpus", "1", "--array", "2", "--name", "lot", "--", "true"
    ).stdout.split()
    argosy("queue", "cancel", "lot")
    for run in ids:
        assert argosy.wait_ended(run)["outcome"] in ("cancelled", "stopped")
    assert "already" in argosy("queue", "cancel", "lot", code=66).stderr
    argosy("stop", first)


def test_ps_says_what_the_warm_parent_imports_that_a_process_waits_for(argosy):
    imported = argosy.work / "imported"
    argosy.script("idle.py", "")
    argosy.script(
        "blocks.py",
        f"import os, time\nwhile not os.path.exists({str(imported)!r}): time.sleep(0.01)\n",
    )
    where = f"PYTHONPATH={argosy.work}"
    client = argosy.start("run", "--preload", "blocks", "--env", where, "idle.py")
    why = "waits for a warm parent to import blocks"
    argosy.wait_until(lambda: why in argosy("ps").stdout, lambda: argosy("ps").stdout)
    client.wait_for(why)
    imported.touch()
    assert client.end() == 0


def test_long_output_is_shown_whole_and_what_was_dropped_of_it_is_counted(argosy):
    said = "".join(f"{number}\n" for number in range(1, 300_001))
    assert argosy("run", "--", "seq", "1", "300000").stdout == said
    limit = ("--set", "roles.main.log_bytes=100000")
    shown = argosy("run", "--name", "much", *limit, "--", "seq", "1", "300000")
    # The file may lose its head before, while or after it is shown.
    gone = re.findall(r"argosy: ([\d,]+) bytes of output were dropped here", shown.stderr)
    assert len(shown.stdout) + sum(int(text.replace(",", "")) for text in gone) == len(said)
    assert shown.stdout == "" or said.endswith(shown.stdout[-1000:])
    lines = argosy.json("logs", "much")["lines"]
    assert lines[0]["dropped"] > 1_000_000
    assert lines[0]["dropped"] + sum(len(line["text"]) + 1 for line in lines) == len(said)
    first, *rest = argosy("logs", "much").stdout.splitlines()
    assert "bytes of output were dropped here" in first
    assert rest[-1].endswith(" 300000")


def test_a_service_lives_without_its_client(argosy):
    run = argosy("run", "--service", "--name", "svc", "--", sys.executable, "-c", "import time; time.sleep(600)").stdout.strip()  # fmt: skip
    argosy.wait_running(run)
    assert "alive" in argosy("down", code=69).stderr
    argosy("stop", run)


def test_a_service_is_started_again_after_a_failure_and_after_a_kill(argosy):
    program = "[ -e was-here ] && exec sleep 600; touch was-here; exit 3"
    run = argosy("run", "--service", "--", "sh", "-c", program).stdout.strip()

    def running_again(number):
        return [p for p in argosy.processes(run) if p["number"] == number and p["pid"]]

    (process,) = argosy.wait_until(lambda: running_again(1), "the second start")
    os.kill(process["pid"], signal.SIGKILL)
    argosy.wait_until(lambda: running_again(2), "the third start")
    assert "restart 1" in argosy("events", run).stdout
    argosy("stop", run)
    assert argosy.wait_ended(run)["outcome"] == "stopped"
