"""What the demo claims is checked: each claim fails when its fact is missing. And its screen fits."""

import io
import signal
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from argosy.cli.demochecks import Kill, Plan, check_disturbed, check_undisturbed
from argosy.cli.demoscreen import Screen, _fold
from argosy.cli.watchedrun import Member, WatchedRun

STEPS = 10


def a_run(**changes):
    """A run as it should be: rank 1 killed in step 4, replaced in generation 2."""
    run = WatchedRun.__new__(WatchedRun)
    run.outcome, run.generation = "succeeded", 2
    run.steps = [
        {"step": s, "loss": 5.0 - s / 4, "tokens": 8, "seconds": 0.1, "time": 100.0 + s}
        for s in range(STEPS)
    ]
    killed = Member(1, 1, pid=11, signal=int(signal.SIGKILL))
    run.members = {"a": Member(0, 1, pid=10), "b": killed, "c": Member(1, 2, pid=12)}
    result = {"steps": STEPS, "sample": "x", "digest": "d"} | changes.pop("result", {})
    run.result = lambda: result
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def a_plan():
    return Plan(ranks=2, lanes=8, steps=STEPS, corpus=Path("x"))


def a_kill(**changes):
    given = {"pid": 11, "step": 4, "at": 104.5, "median_seconds": 0.1}
    return Kill(**{**given, "commit_seconds": 0.2, "is_replaced": True, **changes})


def failing(run, kill):
    return [name for name, is_true in check_disturbed(run, kill, a_plan()).items() if not is_true]


def test_a_run_as_it_should_be_passes():
    assert failing(a_run(), a_kill()) == []


@pytest.mark.parametrize(
    ("run", "kill", "claim"),
    [
        (a_run(outcome="failed"), a_kill(), "the disturbed run succeeded"),
        (a_run(generation=3), a_kill(), "a replacement joined in generation 2"),
        (a_run(), a_kill(is_replaced=False), "a replacement joined in generation 2"),
        (a_run(), a_kill(pid=99), "exactly one rank died, by the kill"),
        (a_run(members={}), a_kill(), "exactly one rank died, by the kill"),
        (a_run(), a_kill(commit_seconds=None), "a step was committed after the kill"),
        (a_run(result={"steps": 9}), a_kill(), "every step was done, and done once"),
        (a_run(steps=a_run().steps[1:]), a_kill(), "every step was done, and done once"),
        (a_run(steps=a_run().steps[::-1]), a_kill(), "the loss fell"),
        (a_run(result={"sample": ""}), a_kill(), "a sample was generated"),
    ],
)
def test_every_claim_of_the_demo_can_fail(run, kill, claim):
    assert claim in failing(run, kill)


def test_a_demo_without_a_kill_claims_nothing_about_recovery():
    assert len(failing(a_run(), None)) == 3


def test_the_undisturbed_run_must_have_been_undisturbed():
    assert not check_undisturbed(a_run(), a_plan())["it was undisturbed"]
    quiet = a_run(generation=1, members={"a": Member(0, 1, pid=10)})
    assert all(check_undisturbed(quiet, a_plan()).values())


def test_long_lines_fold_at_spaces_and_lose_nothing():
    text = "    def f(a):  # " + "word " * 12 + "x" * 50
    for width in (16, 20, 33, 72):
        pieces = [piece.plain for piece in _fold(Text(text), width, 4)]
        assert max(map(len, pieces)) <= width
        assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("width", [24, 44, 80, 104])
def test_nothing_on_the_screen_is_wider_than_the_terminal(width):
    screen = Screen()
    out = io.StringIO()
    screen._console = Console(
        file=out, force_terminal=True, width=width, color_system=None, _environ={"TERM": "xterm"}
    )
    screen.section("proof")
    screen.command("argosy run demo_training.py -n 2", "rank 1, in step 17")
    screen.item("recovery", "0.28 s beyond a step, from the kill to the next commit")
    screen.compare({"2 ranks, one killed": "a" * 64, "3 ranks, undisturbed": "b" * 64}, "")
    for done in (0, 10):
        screen.show(done, 10, [("step 7/40", ""), ("loss 2.812", ""), ("2 of 2 ranks", "")])
    plain = Text.from_ansi(out.getvalue()).plain
    assert max(map(len, plain.splitlines())) <= width
    screen.clear()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_of_a_longer_text_are_folded_each_for_itself(is_terminal):
    screen = Screen()
    out = io.StringIO()
    screen._console = Console(
        file=out,
        force_terminal=is_terminal,
        width=80,
        color_system=None,
        _environ={"TERM": "xterm"},
    )
    screen.say("run r1 stopped after 48s\n  step 135 is saved\n\nhealed: rank 1 was killed")
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines == [
        "        run r1 stopped after 48s",
        "          step 135 is saved",
        "",
        "        healed: rank 1 was killed",
    ]


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys):
    screen = Screen()
    for done in range(101):
        screen.show(done, 100, [(f"step {done}", "")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines] == [f"step {s}" for s in (0, 20, 40, 60, 80, 100)]


def test_measurements_that_were_taken_back_are_read_anew(tmp_path):
    path, run = tmp_path / "metrics.jsonl", WatchedRun.__new__(WatchedRun)
    run.directory, run.steps, run._unread, run._position = tmp_path, [], b"", 0
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    run.read_steps()
    path.write_text('{"step": 0}\n{"step": 1}\n')
    run.read_steps()
    assert [step["step"] for step in run.steps] == [0, 1]
