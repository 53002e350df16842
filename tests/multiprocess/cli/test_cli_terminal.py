"""On a terminal: colours, progress, raw mode, detaching and attaching again."""

import pytest

pytestmark = pytest.mark.multiprocess

DETACH = "\x1d"


@pytest.fixture
def terminal(argosy):
    made = []

    def start(*arguments, **options):
        made.append(argosy.terminal(*arguments, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_debugger_works_with_a_terminal(argosy, terminal):
    script = argosy.script("stop_here.py", "x = 41\nbreakpoint()\nprint('after', x)\n")
    screen = terminal("run", "--tty", "--preload", "pdb", script)
    screen.wait_for("(Pdb)")
    screen.type("p x + 1\r")
    screen.wait_for("42")
    screen.type("c\r")
    screen.wait_for("after 41")
    assert screen.end() == 0


def test_one_can_detach_and_attach_again(argosy, terminal):
    screen = terminal("run", "--tty", "--name", "shell", "--", "sh", "-c", "stty size; read a; echo got $a; exit 7", rows=33, columns=77)  # fmt: skip
    screen.wait_for("attached; Ctrl-] detaches")
    argosy.wait_running("shell")
    screen.type(DETACH)
    screen.wait_for("detached; again with")
    assert screen.end() == 0
    again = terminal("attach", "shell")
    again.wait_for("attached")
    again.type("one two\r")
    again.wait_for("got one two")
    again.wait_for("exited with code 7")
    assert again.end() == 7


def test_ctrl_c_reaches_the_process_not_the_command(argosy, terminal):
    program = "trap 'echo interrupted; exit 5' INT; echo up; while :; do sleep 0.05; done"
    screen = terminal("run", "--tty", "--", "sh", "-c", program)
    screen.wait_for("up")
    screen.type("\x03")
    screen.wait_for("interrupted")
    assert screen.end() == 5


def test_the_window_size_follows(argosy, terminal):
    program = "trap 'stty size' WINCH; echo up; while :; do sleep 0.05; done"
    screen = terminal("run", "--tty", "--name", "window", "--", "sh", "-c", program)
    screen.wait_for("up")
    screen.resize(11, 66)
    screen.wait_for("11 66")
    argosy("kill", "window")
    screen.end()


def test_attach_without_a_terminal_follows_the_output(argosy, terminal):
    run = argosy.detach("--", "sh", "-c", "echo up; exec sleep 600")
    screen = terminal("attach", run)
    screen.wait_for("started without --tty")
    screen.wait_for("up")
    screen.type("\x03")
    assert screen.end() == 130
    assert [p["state"] for p in argosy.processes(run)] == ["running"]
    argosy("stop", run)


def test_an_exec_can_have_a_terminal(argosy, terminal):
    run = argosy.detach("--", "sleep", "600")
    argosy.wait_running(run)
    screen = terminal(
        "exec", "--tty", run, "--", "sh", "-c", "tty && read a && echo got $a; exit 4"
    )
    screen.wait_for("/dev/pts/")
    screen.type("x\r")
    screen.wait_for("got x")
    assert screen.end() == 4
    argosy("stop", run)


def test_ranks_have_colours_on_a_terminal_and_progress_is_shown(argosy, terminal):
    program = "trap '' TERM; echo up; while :; do sleep 0.05; done"
    screen = terminal("run", "-n", "2", "--", "sh", "-c", program)
    screen.wait_for("\x1b[1m[0-1]\x1b[0m up")
    screen.type("\x03")
    screen.wait_for("stopping the run")
    screen.wait_for("stopping, 2 processes left")
    screen.type("\x03")
    screen.wait_for("killing the run")
    assert screen.end() == 137
