"""Households of three real ranks: arenas, deaths, generations, stops, and that nothing is left behind."""

import fcntl
import os
import pty
import random
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = Path(__file__).with_name("household_program.py")
TRAINING = Path(__file__).parents[1] / "programs" / "saving_training.py"
SECONDS = 60.0


@pytest.fixture
def start(tmp_path):
    """Start a household; it is ended afterwards, and its temporary directory must be empty."""
    started = []
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ARGOSY_")}

    def begin(case, stderr=subprocess.PIPE):
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), case, str(tmp_path)],
            env={**environment, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    assert os.listdir(temporary) == []


@pytest.fixture
def run(start):
    def run_to_the_end(case):
        process = start(case)
        output, errors = process.communicate(timeout=SECONDS)
        return process.returncode, output, errors

    return run_to_the_end


def wait_until(is_so, what):
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(directory):
    found = sorted(directory.glob("pid-*"))
    return [int(path.read_text()) for path in found if path.read_text()]


def test_ranks_share_arenas_by_name(run):
    code, output, errors = run("share")
    assert (code, errors) == (0, "")
    assert sorted(output.splitlines()) == [f"rank {rank} of 3 in 1" for rank in range(3)]


def test_a_killed_rank_is_told_and_replaced_while_the_others_go_on(run):
    code, output, errors = run("reform")
    assert code == 0, errors
    assert sorted(output.splitlines()) == [f"rank {rank} in 2" for rank in range(3)]
    which = "restart 1 of 100 after failures of the host"
    assert errors == f"argosy: rank 1 was killed by signal 9; it is started again ({which})\n"


def test_deaths_close_together_are_healed_one_after_the_other(run):
    code, output, errors = run("quick_deaths")
    assert code == 0, errors
    assert sorted(output.splitlines()) == [f"rank {rank} done" for rank in range(3)]


def test_nothing_is_left_when_the_parent_is_killed(start, tmp_path):
    process = start("sleep")
    wait_until(lambda: len(pids_in(tmp_path)) == 3, "three ranks")
    pids = pids_in(tmp_path)
    process.kill()
    wait_until(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


def test_asked_once_the_ranks_save_and_leave(start, tmp_path):
    process = start("save")
    wait_until(lambda: len(pids_in(tmp_path)) == 3, "three ranks")
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 130
    assert [path.read_text() for path in tmp_path.glob("saved-*")] == ["saved"] * 3


@pytest.fixture
def unread():
    """The writing end of a pipe whose reader has gone, as a `tee` that died of the same Ctrl-C."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def test_asked_with_nobody_reading_what_is_said_they_save_all_the_same(start, tmp_path, unread):
    process = start("save", unread)
    wait_until(lambda: len(pids_in(tmp_path)) == 3, "three ranks")
    process.send_signal(signal.SIGHUP)
    assert process.wait(SECONDS) == 129
    assert [path.read_text() for path in tmp_path.glob("saved-*")] == ["saved"] * 3


@pytest.fixture
def terminal():
    """An interactive shell, and the descriptor behind its terminal."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    behind, before = pty.openpty()
    shell = subprocess.Popen(
        [bash, "--norc", "--noprofile", "-i"],
        env={k: v for k, v in os.environ.items() if not k.startswith("ARGOSY_")},
        stdin=before,
        stdout=before,
        stderr=before,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(before)
    yield shell, behind
    shell.kill()
    shell.wait()


def test_when_the_terminal_is_closed_the_ranks_save_and_leave(terminal, tmp_path):
    shell, behind = terminal
    command = shlex.join([sys.executable, str(PROGRAM), "save_slowly", str(tmp_path)])
    try:
        os.write(behind, f"{command}\n".encode())
        wait_until(lambda: len(pids_in(tmp_path)) == 3, "three ranks")
        os.close(behind)  # the shell signals its job, and the kernel does when the shell ends
        shell.wait(SECONDS)
        wait_until(lambda: not processes_named(str(tmp_path)), "the end of the household")
    finally:
        for pid in processes_named(str(tmp_path)):
            os.kill(int(pid), signal.SIGKILL)
    assert [path.read_text() for path in tmp_path.glob("saved-*")] == ["saved"] * 3


def test_when_the_terminal_of_a_lone_rank_is_closed_it_saves_and_leaves(terminal, tmp_path):
    shell, behind = terminal
    words = [sys.executable, str(TRAINING), "-n", "1", "--directory", str(tmp_path / "run")]
    settings = "STEPS=1000000 EVERY=1000000 PAUSE=0.01 TALK=1"
    try:
        os.write(behind, f"cd {tmp_path}; {settings} {shlex.join(words)}\n".encode())
        heard = b""
        while b"step 5 is done" not in heard:
            heard += os.read(behind, 65536)
        os.close(behind)
        shell.wait(SECONDS)
        wait_until(lambda: not processes_named(str(tmp_path)), "the end of the rank")
    finally:
        for pid in processes_named(str(tmp_path)):
            os.kill(int(pid), signal.SIGKILL)
    (save,) = tmp_path.rglob("step-*/MANIFEST.json")
    assert int(save.parent.name.removeprefix("step-")) >= 6


def test_a_restart_that_nobody_reads_of_happens_all_the_same(start, unread):
    process = start("reform", unread)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert sorted(output.splitlines()) == [f"rank {rank} in 2" for rank in range(3)]


def test_asked_twice_they_are_killed(start, tmp_path):
    process = start("stubborn")
    wait_until(lambda: len(pids_in(tmp_path)) == 3, "three ranks")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: len(list(tmp_path.glob("saved-*"))) == 3, "SIGTERM in all ranks")
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 143
    assert not any(map(is_alive, pids_in(tmp_path)))


def test_a_rank_that_is_asked_to_stop_in_the_moment_of_its_fork_does():
    program = (
        "import os, signal, time\n"
        "from argosy.worker import births\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: None)\n"
        "for _ in range(50):\n"
        "    pid = births.fork({}, lambda: time.sleep(600), lambda: None)\n"
        "    os.kill(pid, signal.SIGTERM)\n"
        "    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=SECONDS)


def test_an_exception_that_comes_back_ends_it_with_one_traceback(run):
    code, output, errors = run("broken")
    assert (code, output) == (1, "")
    assert errors.count("Traceback") == 1
    assert 'raise ValueError("boom")' in errors
    assert "household.py" not in errors
    assert "births.py" not in errors
    assert "twice in the same way" in errors.splitlines()[-1]


def test_an_exception_that_does_not_come_back_costs_a_restart(run):
    code, _, errors = run("broken_once")
    assert code == 0
    error = "rank 1 exited with code 1: ValueError: boom"
    which = "restart 1 of 3); its traceback is in errors.txt"
    assert errors == f"argosy: {error}; it is started again ({which}\n"


def test_a_suspect_is_killed_after_stacks_were_taken(run, tmp_path):
    code, _, errors = run("hang")
    assert code == 0, errors
    assert errors.count("rank 2 hangs: no sign of it; it is killed") == 1
    stacks = (tmp_path / "stacks-1.txt").read_text()
    assert stacks.startswith("rank 2 hangs: no sign of it\n")
    assert "household_program.py" in stacks


def test_neither_a_full_disk_nor_a_replacement_that_cannot_be_forked_ends_the_household(run):
    code, _, errors = run("lacking")
    assert code == 0, errors
    assert "the stacks of the ranks cannot be written: No such file or directory" in errors
    assert errors.count("rank 2 cannot be forked: Resource temporarily unavailable") == 1


def test_what_cannot_succeed_ends_with_its_reason(run):
    code, _, errors = run("hopeless")
    assert code == 1
    assert errors == "argosy: the run cannot succeed: the loss is not finite\n"


def test_a_program_that_cannot_re_form_is_started_again_whole(run):
    code, output, errors = run("plain")
    assert code == 0, errors
    assert sorted(output.splitlines()) == [f"rank {rank} in 2" for rank in range(3)]


def test_refused_input_is_said_once_in_two_lines(run):
    code, output, errors = run("refusing")
    assert (code, output) == (64, "")
    assert errors == (
        "argosy: batch_size = 100 is not divisible by lanes = 8\n  fix: use 96 or 104\n"
    )


def test_what_a_rank_left_running_ends_with_it(run, tmp_path):
    code, _, errors = run("leaving_children")
    assert (code, errors) == (0, "")
    children = pids_in(tmp_path)
    assert len(children) == 3
    wait_until(lambda: not any(map(is_alive, children)), f"the end of {children}")


def test_a_parent_killed_while_it_starts_leaves_nobody(start, tmp_path):
    chance = random.Random(7)
    for _ in range(4):
        process = start("sleep")
        wait_until(lambda pid=process.pid: children_of(pid), "the first rank")
        time.sleep(chance.random() * 0.01)  # an instant at random, not a wait
        process.kill()
        process.wait()
    wait_until(lambda: not processes_named(str(tmp_path)), "the end of all ranks")


def children_of(pid):
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def processes_named(text):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(entry.name):
            try:
                if text in entry.joinpath("cmdline").read_text(errors="replace"):
                    found.append(entry.name)
            except OSError:
                continue
    return found
