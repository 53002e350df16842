"""The evidence beside a first cause: its last lines as a person would have seen them."""

import io
import json
from types import SimpleNamespace

import pytest

from argosy.analyze.attempts import Attempt, error_lines
from argosy.cli import why as explaining
from argosy.cli.app import find_verb
from argosy.cli.arguments import parse
from argosy.cli.evidence import is_same_error, log_tail, readable_lines, show_evidence
from argosy.cli.paint import Paint
from argosy.cli.why import explain, explain_failure


@pytest.fixture
def attempt():
    return Attempt({"attempt": "a", "role": "train", "index": 1, "number": 0, "rank": 1})


def write(tmp_path, name, text):
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / name).write_text(text)


def test_the_last_lines_come_from_stderr_without_torchs_rank(tmp_path, attempt):
    write(tmp_path, "train.1.0.out", "step 1\n")
    write(tmp_path, "train.1.0.err", "[rank1]: KeyError: 'x'\n")
    path, lines = log_tail(str(tmp_path), attempt)
    assert path.endswith("train.1.0.err")
    assert lines == ["KeyError: 'x'"]


def test_a_silent_stderr_gives_way_to_stdout(tmp_path, attempt):
    write(tmp_path, "train.1.0.out", "step 1\nstep 2\n")
    write(tmp_path, "train.1.0.err", "\n")
    assert log_tail(str(tmp_path), attempt)[1] == ["step 1", "step 2"]


def test_only_the_end_of_a_long_log_is_read(tmp_path, attempt):
    write(tmp_path, "train.1.0.err", "x" * 100_000 + "\n" + "last\n" * 100)
    assert log_tail(str(tmp_path), attempt)[1] == ["last"] * 12


def test_a_missing_log_is_no_error(tmp_path, attempt):
    assert log_tail(str(tmp_path), attempt) == ("", [])


def test_overwritten_and_coloured_text_is_shown_as_it_was_seen():
    assert readable_lines("\x1b[31mred\x1b[0m\n10%\r50%\r100%\r\n\nbell\x07\tx") == [
        "red",
        "100%",
        "bell\tx",
    ]


@pytest.mark.parametrize(
    ("exit_fact", "outcome", "is_told"),
    [({"lost": True}, "failed", True), ({"lost": True}, "", False), ({"code": 1}, "failed", False)],
)
def test_a_run_that_was_lost_for_good_says_how_the_next_one_is_not(
    tmp_path, attempt, exit_fact, outcome, is_told
):
    attempt.exit = exit_fact
    view = {"directory": str(tmp_path), "outcome": outcome}
    shown = "\n".join(show_evidence(view, attempt, Paint(io.StringIO())))
    assert ("--restart N" in shown) == is_told


def ended(code, *lines):
    attempt = Attempt({"attempt": "a", "role": "train", "index": 1, "number": 0, "rank": 1})
    attempt.exit = {"code": code, "error": "\n".join(lines)}
    return attempt


def test_errors_are_the_same_when_they_end_in_the_same_words():
    one = ended(1, "at pid 7", "KeyError: 'x'")
    assert is_same_error(one, ended(1, "at pid 8", "KeyError: 'x'"))
    assert not is_same_error(one, ended(1, "KeyError: 'y'"))
    assert not is_same_error(one, ended(2, "KeyError: 'x'"))
    assert not is_same_error(ended(1), ended(1))


def test_a_crash_is_shown_from_its_beginning_without_the_frames_that_started_the_program(
    tmp_path, attempt
):
    frames = "".join(f'  File "/work/train.py", line {n} in f\n' for n in range(3))
    below = '  File "/x/argosy/control/zygote/rank.py", line 5 in become\n' * 20
    dump = f"Fatal Python error: Segmentation fault\n\n{frames}{below}\nExtension modules: a, b\n"
    write(tmp_path, "train.1.0.err", "before\n" + dump)
    lines = log_tail(str(tmp_path), attempt)[1]
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert lines[1:] == frames.splitlines()


def test_the_first_line_of_a_syntax_error_is_not_said_twice(tmp_path, attempt):
    write(tmp_path, "train.1.0.err", '  File "a.py", line 1\n    def f(:\nSyntaxError: x\n')
    error = error_lines({"error": '  File "a.py", line 1\n    def f(:\nSyntaxError: x\n'})
    assert error == log_tail(str(tmp_path), attempt)[1]


def test_a_refusal_is_not_told_again_at_the_end():
    stop = {"kind": "run.stop_requested", "reason": "rank 0: unknown key", "failed": True}

    class Events:
        def get(self, path):
            return {"events": [{"seq": 1, "at": 1.0, "fact": {**stop, "code": 64}}]}

    view = {"run": "r1", "outcome": "failed", "exit_code": 64, "reason": "rank 0: unknown key"}
    text = explain_failure(Events(), view)
    assert "its program refused what it was given (exit code 64)" in text
    assert "unknown key" not in text


def test_a_program_that_has_trained_and_gives_up_has_not_refused_its_input():
    stop = {"kind": "run.stop_requested", "reason": "rank 0: step 9", "failed": True, "code": 65}
    saved = {"kind": "run.saved", "attempt": "r1.train.0.0", "step": 9, "path": "/c/step-9"}

    class Events:
        def get(self, path):
            facts = [(1, saved), (2, stop)]
            return {"events": [{"seq": seq, "at": 1.0, "fact": fact} for seq, fact in facts]}

    view = {"run": "r1", "outcome": "failed", "exit_code": 65, "reason": "rank 0: step 9"}
    assert "its program gave it up (exit code 65)" in explain_failure(Events(), view)


class Story:
    """Events of a role of one process that fails again and again, and the view of its run."""

    def __init__(self, tmp_path, *errors):
        self.events = []
        for number, error in enumerate(errors):
            attempt, at = f"r1.main.0.{number}", 10.0 * (number + 1)
            planned = {"role": "main", "index": 0, "number": number, "host": "h"}
            self.add(at, "attempt.planned", attempt=attempt, **planned)
            self.add(at, "attempt.started", attempt=attempt, pid=100 + number, how="fork")
            self.add(at + 5, "attempt.exited", attempt=attempt, code=1, error=error, at=at + 5)
        self.view = {"run": "r1", "name": "job", "state": "running", "outcome": "", "reason": ""}
        self.view |= {"waiting": "", "exit_code": None, "directory": str(tmp_path)}
        self.view["roles"] = [{"role": "main", "processes": [{"state": "running"}]}]

    def add(self, at, kind, /, **fields):
        fact = {"kind": kind, "run": "r1", **fields}
        self.events.append({"seq": len(self.events) + 1, "at": at, "fact": fact})

    def start_again(self, number):
        attempt, place = f"r1.main.0.{number}", {"role": "main", "index": 0, "host": "h"}
        self.add(50.0, "attempt.planned", attempt=attempt, number=number, **place)
        self.add(50.0, "attempt.started", attempt=attempt, pid=9, how="fork")

    def json(self, monkeypatch, capsys):
        """What `argosy why --json` prints."""
        controller = SimpleNamespace(
            run=lambda word: self.view, get=lambda path: {"events": self.events}
        )
        monkeypatch.setattr(explaining, "connect", lambda: controller)
        verb, rest = find_verb(["why", "r1", "--json"])
        assert explaining.why(parse(verb, rest)) == 0
        return json.loads(capsys.readouterr().out)

    def end(self, outcome, cause=""):
        self.add(99.0, "run.ended", outcome=outcome, exit_code=1, first_cause=cause)
        self.view |= {"state": "ended", "outcome": outcome, "exit_code": 1}

    def titles(self):
        """The lines that are not indented, without times."""
        lines = explain(self.view, self.events, Paint(io.StringIO()))
        return [line.partition(":")[0].partition(" at ")[0] for line in lines if line[:1].strip()]

    def text(self):
        return "\n".join(explain(self.view, self.events, Paint(io.StringIO())))


def test_failures_are_told_in_order_of_time_and_the_cause_of_the_end_is_marked(tmp_path):
    story = Story(tmp_path, "KeyError: 'x'", "OSError: disk", "ValueError: the last")
    story.end("failed", "r1.main.0.2")
    assert story.titles()[1:4] == ["earlier,", "earlier,", "first cause"]
    text = story.text()
    places = [text.index(words) for words in ("KeyError: 'x'", "OSError: disk", "the last")]
    assert places == sorted(places)


def test_a_failure_that_repeats_itself_has_its_first_time_as_the_first_cause(
    tmp_path, monkeypatch, capsys
):
    story = Story(tmp_path, "OSError: disk", "KeyError: 'x'", "KeyError: 'x'", "KeyError: 'x'")
    story.end("failed", "r1.main.0.3")
    assert story.titles()[1:5] == ["earlier,", "first cause", "after that,", "after that,"]
    told = story.json(monkeypatch, capsys)
    assert told["first_cause"]["cause"]["attempt"] == "r1.main.0.1"
    times = [incident["cause"]["at"] for incident in told["incidents"]]
    assert times == sorted(times)


def test_kills_have_nothing_to_do_with_each_other(tmp_path):
    story = Story(tmp_path, "", "")
    for event in story.events:
        if event["fact"]["kind"] == "attempt.exited":
            event["fact"] |= {"code": None, "signal": 9}
    story.end("failed", "r1.main.0.1")
    assert story.titles()[1:3] == ["earlier,", "first cause"]


def test_the_cause_of_the_present_state_is_told_after_what_was_earlier(tmp_path):
    story = Story(tmp_path, "KeyError: 'x'", "ValueError: the last")
    story.start_again(2)
    assert story.titles()[1:3] == ["healed", "healed"]
    story.view["roles"][0]["processes"][0]["state"] = "waiting"
    story.view["waiting"] = "main/0 backoff: restarts in 3.0 s"
    assert story.titles()[1:3] == ["earlier,", "first cause"]
    assert story.text().index("the last") > story.text().index("KeyError")
    assert "restarts in 3.0 s" in story.text().splitlines()[0]


def test_an_error_that_was_shown_is_not_shown_again(tmp_path):
    story = Story(tmp_path, "KeyError: 'x'", "KeyError: 'x'", "KeyError: 'x'")
    story.end("failed", "r1.main.0.2")
    assert story.text().count("KeyError: 'x'") == 1
    assert story.text().count("the same as above") == 2


def test_what_a_run_that_succeeded_got_over_is_called_healed(tmp_path):
    story = Story(tmp_path, "KeyError: 'x'")
    story.end("succeeded")
    assert story.titles()[1] == "healed"


def test_what_was_not_started_again_is_not_called_healed(tmp_path):
    story = Story(tmp_path, "KeyError: 'x'")
    story.add(40.0, "run.stop_requested", hard=True, reason="argosy kill")
    story.end("stopped")
    assert story.titles()[1] == "not mended,"
    mended = Story(tmp_path, "KeyError: 'x'")
    mended.start_again(1)
    mended.add(60.0, "run.stop_requested", hard=True, reason="argosy kill")
    mended.end("stopped")
    assert mended.titles()[1] == "healed"


def test_a_process_that_only_saves_mends_nothing(tmp_path):
    story = Story(tmp_path, "KeyError: 'x'")
    story.add(40.0, "run.stop_requested", reason="argosy stop")
    story.add(41.0, "gang.formed", role="main", generation=2, members=[0], reason="to save")
    story.start_again(1)
    story.end("stopped")
    assert story.titles()[1] == "not mended,"


def test_programs_are_told_the_same_first_cause_as_people(tmp_path, monkeypatch, capsys):
    story = Story(tmp_path, "KeyError: 'x'")
    story.view["roles"][0]["processes"][0]["state"] = "waiting"
    assert story.titles()[1] == "first cause"
    assert story.json(monkeypatch, capsys)["first_cause"]["cause"]["attempt"] == "r1.main.0.0"
    story.start_again(1)
    story.view["roles"][0]["processes"][0]["state"] = "running"
    assert story.json(monkeypatch, capsys)["first_cause"] is None
