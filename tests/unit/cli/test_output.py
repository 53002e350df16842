"""What a person sees of several processes, and the bytes of one."""

import os

import pytest

from argosy.cli.output import LabelledOutput, RawOutput, choose_output
from argosy.cli.paint import Paint, duration, render_table, size


def view(**counts):
    return {
        "directory": "",
        "roles": [
            {"role": role, "count": count, "processes": []} for role, count in counts.items()
        ],
    }


def line(rank, text, *, role="train", stream="out", at=1.0, partial=False):
    return {
        "at": at, "role": role, "index": rank, "rank": rank, "number": 0,
        "stream": stream, "text": text, "partial": partial,
    }  # fmt: skip


def shown(capsys, output, lines):
    for entry in lines:
        output.line(entry)
    output.finish()
    return capsys.readouterr()


def test_equal_lines_are_shown_once_with_a_rank_set(capsys):
    output = LabelledOutput(view(train=4), is_live=False)
    found = shown(capsys, output, [*(line(r, "hello") for r in range(4)), line(2, "odd")])
    assert found.out == "[0-3] hello\n[2] odd\n"


def test_stderr_stays_stderr(capsys):
    found = shown(
        capsys, LabelledOutput(view(train=2), is_live=False), [line(0, "x", stream="err")]
    )
    assert (found.out, found.err) == ("", "[0] x\n")


def test_folding_can_be_turned_off(capsys):
    output = LabelledOutput(view(train=2), is_live=False, should_fold=False)
    assert shown(capsys, output, [line(0, "x"), line(1, "x")]).out == "[0] x\n[1] x\n"


def test_the_rank_that_torch_puts_before_a_traceback_is_not_said_twice(capsys):
    lines = [line(r, f"[rank{r}]: RuntimeError: x", stream="err") for r in range(2)]
    assert shown(capsys, LabelledOutput(view(train=2), is_live=False), lines).err == (
        "[0-1] RuntimeError: x\n"
    )


def test_roles_are_named_when_there_are_several(capsys):
    output = LabelledOutput(view(train=2, web=1), is_live=False)
    lines = [line(0, "x"), line(1, "x"), line(0, "up", role="web") | {"rank": None}]
    assert shown(capsys, output, lines).out == "[train/0-1] x\n[web] up\n"


def test_pieces_of_a_line_are_put_together(capsys):
    output = LabelledOutput(view(train=2), is_live=False)
    pieces = [line(0, "one ", partial=True), line(0, "two"), line(1, "cut", partial=True)]
    assert shown(capsys, output, pieces).out == "[0] one two\n[1] cut\n"


def test_a_single_process_is_shown_raw_and_each_byte_once(tmp_path, capfdbinary):
    logs = tmp_path / "logs"
    logs.mkdir()
    output = choose_output({**view(main=1), "directory": str(tmp_path)})
    assert isinstance(output, RawOutput)
    out = logs / "main.0.0.out"
    output.note_file("main", 0, 0)
    assert not output.has_news()
    out.write_bytes(b"\xff\x00 50%\r")
    assert output.has_news()
    output.flush(0.0)
    assert not output.has_news()
    with out.open("ab") as file:
        file.write(b"100%\r\n")
    (logs / "main.0.0.err").write_bytes(b"warning")
    output.flush(0.0)
    output.finish()
    found = capfdbinary.readouterr()
    assert (found.out, found.err) == (b"\xff\x00 50%\r100%\r\n", b"warning")


def test_the_output_of_a_restarted_process_follows(tmp_path, capfdbinary):
    logs = tmp_path / "logs"
    logs.mkdir()
    output = RawOutput(str(tmp_path))
    for number in range(2):
        output.note_file("main", 0, number)
        (logs / f"main.0.{number}.out").write_bytes(b"start %d\n" % number)
    output.finish()
    assert capfdbinary.readouterr().out == b"start 0\nstart 1\n"


def test_a_process_with_a_spare_is_shown_beside_it(tmp_path, capfdbinary):
    logs = tmp_path / "logs"
    logs.mkdir()
    output = RawOutput(str(tmp_path))
    output.note_file("train", 0, 0)
    output.note_file("train", 1, 0)
    (logs / "train.0.0.out").write_bytes(b"first\n")
    output.note_file("train", 0, 1)
    (logs / "train.1.0.out").write_bytes(b"spare\n")
    output.finish()
    assert capfdbinary.readouterr().out == b"first\nspare\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4s"), (12, "12s"), (200, "3m20s"), (7500, "2h05m"), (90000, "1d1h"), (-1, "0s")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_sizes_have_units():
    assert [size(n) for n in (10, 5 << 20, 3 << 30)] == ["10 B", "5 MiB", "3.0 GiB"]


def test_a_table_is_plain_text_without_a_terminal():
    with open(os.devnull, "w") as nowhere:
        text = render_table(["A", "WHY"], [["1", "x" * 300], ["22", ""]], Paint(nowhere))
    assert text.splitlines() == ["A   WHY", "1   " + "x" * 300, "22"]


def test_a_bar_that_redraws_itself_keeps_its_label(capsys):
    lines = [line(rank, "\r 10%\r 50%\r100%\r", stream="err") for rank in range(2)]
    found = shown(capsys, LabelledOutput(view(train=2), is_live=False), lines)
    assert found.err == "[0-1] 100%\n"


def test_text_without_a_lines_end_is_shown_when_the_files_are_looked_at(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    output = RawOutput(str(tmp_path))
    output.note_file("main", 0, 0)
    (tmp_path / "logs" / "main.0.0.err").write_bytes(b"\r 10%")
    output.flush(0.0)
    assert capfd.readouterr().err == "\r 10%"


def test_what_was_dropped_is_said_in_its_place(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "main.0.0.out"
    with path.open("wb") as file:
        file.seek(1 << 20)
        file.write(b"last\n")
    one = RawOutput(str(tmp_path))
    one.note_file("main", 0, 0)
    one.finish()
    found = capfd.readouterr()
    assert found.out == "last\n", "no zeros of the hole"
    assert found.err.startswith("argosy: 1,048,576 bytes of output were dropped here")
    several = LabelledOutput(view(train=2), is_live=False)
    lines = [line(0, "cut", partial=True), line(0, "next") | {"dropped": 7000}]
    first, gap, then = shown(capfd, several, lines).out.splitlines()
    assert (first, then) == ("[0] cut", "[0] next")
    assert gap.startswith("[0] … 7,000 bytes of output were dropped here")


def test_stdout_is_left_to_json(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "main.0.0.out").write_text("from one\n")
    one = choose_output({**view(main=1), "directory": str(tmp_path)}, is_json=True)
    one.note_file("main", 0, 0)
    one.finish()
    several = choose_output(view(train=2), is_json=True)
    several.line(line(0, "from several"))
    several.finish()
    found = capfd.readouterr()
    assert found.out == ""
    assert found.err == "from one\n[0] from several\n"


def test_a_last_line_without_an_end_gets_one_on_a_terminal_only(tmp_path, capfd, monkeypatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "main.0.0.out").write_text("no end")
    for is_terminal in (False, True):
        monkeypatch.setattr(os, "isatty", lambda descriptor, answer=is_terminal: answer)
        output = RawOutput(str(tmp_path))
        output.note_file("main", 0, 0)
        output.finish()
        found = capfd.readouterr()
        assert (found.out, found.err) == ("no end", "\n" if is_terminal else "")
