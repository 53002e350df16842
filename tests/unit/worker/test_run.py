import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from argosy.errors import ConfigError
from argosy.worker import gang, records
from argosy.worker.journal import Journal
from argosy.worker.run import Run
from argosy.worker.states import MOST_BYTES, State


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(gang, "_joined", None)
    monkeypatch.setenv("RANK", "0")
    return Run(name="test", directory=tmp_path)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_measurements_are_written_in_full_and_shown_in_columns(run, tmp_path, capsys):
    run.log(loss=1 / 3, step=9)
    run.step = 10
    run.log(loss=math.nan, tokens=1_234_567, note="a")
    run.log(loss=12345.6)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines[0]["loss"] == 1 / 3
    assert [line["step"] for line in lines] == [9, 10, 10]
    assert (lines[1]["loss"], lines[1]["tokens"], lines[1]["note"]) == ("nan", 1234567, "a")
    assert capsys.readouterr().out.splitlines() == [
        "step 9  loss 0.33333",
        "step 10  loss     nan  tokens 1,234,567  note a",
        "step 10  loss  12,346",
    ]


def test_other_ranks_measure_in_silence(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    run.log(loss=1.0)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_lowest_living_rank_writes(run, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("ARGOSY_GENERATION", "1")
    member = gang.Gang(None)
    monkeypatch.setattr(gang, "_joined", member)
    for step, lost in enumerate([(), (0,), (0, 1)]):
        for rank in lost:
            end = {"type": "peer", "rank": rank, "generation": 1, "code": None, "signal": 9}
            member._hear(end)
        run.log(step=step, x=1)
    # Nobody had written the first two: whoever takes over remembers them.
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_taking_over_leaves_no_gap_and_no_line_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer, other = Journal(path), Journal(path)
    for step in range(10):
        if step < 6:
            writer.note({"x": step}, step=step, is_writer=True)
        other.note({"x": step}, step=step, is_writer=step >= 8)
    assert [line["step"] for line in read_lines(path)] == list(range(10))
    late = Journal(path)
    late.note({"x": 9}, step=9, is_writer=True)
    late.note({"x": 10}, step=10, is_writer=True)
    assert [line["step"] for line in read_lines(path)] == list(range(11))


def test_a_line_that_was_cut_is_ended_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3}\n{"step": 4, "lo')
    Journal(path).note({"x": 1}, step=5, is_writer=True)
    assert path.read_text().splitlines()[1:2] == ['{"step": 4, "lo']
    assert json.loads(path.read_text().splitlines()[2])["step"] == 5


def test_once_is_once_per_place_step_and_pass(run):
    done = []
    for step in (None, 1, 1, 2):
        run.step = step
        for number in range(2):
            run.once(lambda step=step, number=number: done.append((step, number)))
    assert done == [(None, 0), (None, 1), (1, 0), (1, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    run.once(lambda: done.append("named"), key="upload")
    assert not run.once(lambda: done.append("named"), key="upload")
    assert done.count("named") == 1


def test_another_process_finds_what_was_done(run, tmp_path):
    def work(process):
        for step in range(3):
            process.step = step
            process.once(lambda step=step: done.append(step))

    done = []
    work(run)
    work(Run(name="test", directory=tmp_path))
    assert done == [0, 1, 2]


def test_a_death_in_the_middle_is_made_good_by_one_who_waits(run, tmp_path):
    begun, done = tmp_path / "begun", tmp_path / "done"

    def die():
        begun.touch()
        time.sleep(600)

    pid = os.fork()
    if pid == 0:
        run.once(die, key="work")
        os._exit(0)
    deadline = time.monotonic() + 20
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    waiter = threading.Thread(target=lambda: run.once(done.touch, key="work"))
    waiter.start()
    assert not done.exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    waiter.join(20)
    assert done.exists()


def test_a_function_that_fails_was_not_done(run):
    with pytest.raises(ZeroDivisionError):
        run.once(lambda: 1 / 0, key="work")
    assert run.once(lambda: None, key="work")


def test_state_is_the_same_bytes_for_the_same_values():
    one, other = State(), State()
    one["b"], one["a"] = [1, 2.5, None], {"x": "y"}
    other["a"], other["b"] = {"x": "y"}, [1, 2.5, None]
    assert one.snapshot() == other.snapshot()
    restored = State()
    restored["old"] = 1
    restored.restore(one.snapshot())
    assert dict(restored) == dict(one)
    assert len(restored) == 2
    del restored["a"]
    restored.restore(b"")
    assert dict(restored) == {}
    with pytest.raises(ConfigError, match="no JSON object"):
        restored.restore(b"[]")


def test_state_refuses_what_it_cannot_give_back():
    state = State()
    with pytest.raises(ConfigError, match=r"cannot hold best: .* not JSON serializable"):
        state["best"] = object()
    with pytest.raises(ConfigError, match="a name is text"):
        state[3] = 1
    state["long"] = "x" * MOST_BYTES
    with pytest.raises(ConfigError, match="more than 65536"):
        state.snapshot()


def record(**config):
    return {
        "config": config,
        "digest": str(sorted(config.items())),
        "overrides": [],
        "seed": 0,
        "threads": 1,
    }


def test_a_directory_is_never_made_over_an_old_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = records.make_directory("x", ""), records.make_directory("x", "")
    assert first != second
    assert first.parent == tmp_path / "runs"
    records.write_first(first, record(depth=1))
    with pytest.raises(ConfigError, match="holds a run already") as caught:
        records.make_directory("x", str(first))
    assert "--resume" in caught.value.fix
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        records.make_directory("x", str(tmp_path / "file"))


def test_all_processes_of_a_run_must_have_the_same_config(tmp_path):
    records.write_first(tmp_path, record(depth=1))
    records.write_first(tmp_path, record(depth=1))
    with pytest.raises(ConfigError, match="another config than its run began with: depth"):
        records.write_first(tmp_path, record(depth=2))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"config": {}}'])
def test_only_the_directory_of_a_run_can_be_gone_on_with(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"no config\.json in it|cannot be read"):
        records.read_record(tmp_path)


@pytest.mark.parametrize("inner", ["logs", "checkpoints", "checkpoints/step-000000010"])
def test_the_run_of_a_directory_inside_it_is_named(tmp_path, inner):
    records.write_first(tmp_path, record(depth=1))
    (tmp_path / inner).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no config\.json in it") as caught:
        records.read_record(tmp_path / inner)
    assert caught.value.fix == f"name the run's own directory: --resume {tmp_path}"


def test_a_key_that_the_program_lacks_is_not_advised_to_be_set():
    with pytest.raises(ConfigError, match="depth = 1, and the program has no depth now") as caught:
        records.check_consent(record(depth=1), record(rate=0.5), [])
    assert "--set" not in caught.value.fix


def test_a_resume_may_differ_in_what_was_named_alone():
    before, after = record(depth=1, rate=0.5), record(depth=2, rate=0.5)
    with pytest.raises(ConfigError, match="began with depth = 1, the program now says 2") as caught:
        records.check_consent(before, after, [])
    assert "--set depth=1 or --set depth=2" in caught.value.fix
    assert records.check_consent(before, after, ["depth=2"]) == ["depth: 1 -> 2"]
    assert records.check_consent(before, {**before, "seed": 3}, []) == ["seed: 0 -> 3"]


def test_a_resume_with_changed_source_needs_consent():
    before = {**record(depth=1), "source": {"train.py": "a", "model.py": "b", "gone.py": "c"}}
    after = {**record(depth=1), "source": {"train.py": "a", "model.py": "d", "new.py": "e"}}
    with pytest.raises(ConfigError, match=r"^model\.py has changed since the run began") as caught:
        records.check_consent(before, after, [])
    assert "--allow-source" in caught.value.fix
    assert records.check_consent(before, after, [], {"source"}) == ["source: model.py"]
    assert records.check_consent(record(depth=1), after, []) == [], "older records have none"


def test_a_resume_with_another_script_needs_consent_and_with_a_renamed_one_does_not():
    before = {**record(depth=1), "script": "train.py", "source": {"train.py": "a", "model.py": "b"}}
    after = {**record(depth=1), "script": "wide.py", "source": {"wide.py": "c", "model.py": "b"}}
    with pytest.raises(
        ConfigError, match=r"began with train\.py, and wide\.py is another"
    ) as caught:
        records.check_consent(before, after, [])
    assert "--allow-source" in caught.value.fix
    assert records.check_consent(before, after, [], {"source"}) == ["source: train.py -> wide.py"]
    renamed = {**after, "source": {"wide.py": "a", "model.py": "b"}}
    assert records.check_consent(before, renamed, []) == []
    assert records.check_consent(before, record(depth=1), []) == [], "in a notebook"


def test_the_source_of_a_program_is_its_script_and_what_lies_beside_it(tmp_path):
    (tmp_path / "train.py").write_text(
        "import helper, json\nfrom argosy.worker import sources\nprint(json.dumps(sources.digest_sources()))"
    )
    (tmp_path / "helper.py").write_text("")
    command = [sys.executable, tmp_path / "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(json.loads(done.stdout)) == ["helper.py", "train.py"]


def test_measurements_that_cannot_be_written_do_not_stop_the_program(tmp_path, capsys):
    journal = Journal(tmp_path / "absent" / "metrics.jsonl")
    for step in range(3):
        journal.note({"x": 1}, step=step, is_writer=True)
    assert capsys.readouterr().err.count("measurements are not written") == 1
    (tmp_path / "absent").mkdir()
    journal.note({"x": 1}, step=3, is_writer=True)
    assert [line["step"] for line in read_lines(journal.path)] == [3]


def test_rank_and_size_are_known_without_joining_and_follow_the_gang(run, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (run.rank, run.world_size) == (2, 3)
    assert gang.joined() is None
    member = gang.Gang(None)
    monkeypatch.setattr(gang, "_joined", member)
    member.rank, member.world_size = 1, 2
    assert (run.rank, run.world_size) == (1, 2)


def test_a_directory_in_which_nothing_happened_is_removed_and_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("failed", "unused", "used")
    failed, _, used = made = [records.make_directory(name, "") for name in names]
    for directory in made:
        (directory / "config.json").write_text("{}")
    (used / "metrics.jsonl").write_text("")
    (failed / "errors.txt").write_text("of an attempt before")
    for directory in made:
        records.discard_unused(directory)
    assert sorted((tmp_path / "runs").iterdir()) == [failed, used]
    assert (failed / "errors.txt").exists()
    given = records.make_directory("given", "deep/er")
    records.discard_unused(given)
    assert (tmp_path / "deep").is_dir()
    assert not given.exists()


def test_the_newest_save_of_a_run_is_found_whoever_has_made_it(tmp_path):
    for name in ("step-000000060", "step-000000072", ".staging-000000080-1", "pins"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    newest = tmp_path / "checkpoints" / "step-000000072"
    assert records.find_newest_save(tmp_path) == (72, newest)


def test_a_run_without_a_save_has_no_newest_one(tmp_path):
    assert records.find_newest_save(tmp_path) is None
    (tmp_path / "checkpoints").write_text("not a directory")
    assert records.find_newest_save(tmp_path) is None


def test_steps_that_are_made_again_stand_once_among_the_measurements(run, tmp_path, capsys):
    run.log(parameters=12)
    for step in range(8):
        run.step = step
        run.log(loss=step / 10)
        run.log(step=1000 + step, epoch_loss=step)
    run.go_back(5)
    for step in range(5, 10):
        run.step = step
        run.log(loss=step / 10)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines[0]["parameters"] == 12
    assert [line["step"] for line in lines if "loss" in line] == list(range(10))
    assert [line["step"] for line in lines if "epoch_loss" in line] == list(range(1000, 1005))
    superseded = read_lines(tmp_path / "metrics.superseded.jsonl")
    assert [line["step"] for line in superseded] == [5, 1005, 6, 1006, 7, 1007]
    assert "trainer_step" not in capsys.readouterr().out


def test_measurements_that_no_trainer_has_dated_are_never_taken_back(run, tmp_path):
    run.log(step=500, accuracy=0.1)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    run.go_back(0, is_alone=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "metrics.superseded.jsonl").exists()


def test_going_back_keeps_what_is_not_of_a_step_and_moves_a_line_that_was_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"note": "a"}\n{"step": 3, "lo')
    Journal(path).go_back(2, is_writer=True)
    assert path.read_text() == '{"step": 1}\n{"note": "a"}\n'
    superseded = path.with_name("metrics.superseded.jsonl")
    assert superseded.read_text() == '{"step": 2}\n{"step": 3, "lo\n'


def test_one_who_takes_over_remembers_nothing_of_steps_that_were_undone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    other = Journal(path)
    for step in range(4):
        other.note({"x": "undone"}, step=step, is_writer=False)
    other.go_back(1, is_writer=False)
    other.note({"x": "again"}, step=1, is_writer=False)
    other.note({"x": "again"}, step=2, is_writer=True)
    lines = [(line["step"], line["x"]) for line in read_lines(path)]
    assert lines == [(0, "undone"), (1, "again"), (2, "again")]


@pytest.mark.parametrize("has_moved", [False, True])
def test_one_who_takes_over_moves_lines_of_undone_steps_if_the_writer_has_died_before_it_did(
    tmp_path, has_moved
):
    path = tmp_path / "metrics.jsonl"
    writer, other = Journal(path), Journal(path)
    for step in range(6):
        writer.note({"x": "undone"}, step=step, is_writer=True)
        other.note({"x": "undone"}, step=step, is_writer=False)
    other.go_back(2, is_writer=False)
    if has_moved:
        writer.go_back(2, is_writer=True)
        writer.note({"x": "again"}, step=2, is_writer=True)
    other.note({"x": "again"}, step=2, is_writer=False)
    other.note({"x": "again"}, step=3, is_writer=True)
    expected = [(0, "undone"), (1, "undone"), (2, "again"), (3, "again")]
    assert [(line["step"], line["x"]) for line in read_lines(path)] == expected
    superseded = read_lines(path.with_name("metrics.superseded.jsonl"))
    assert [line["step"] for line in superseded] == [2, 3, 4, 5]


def test_one_who_came_after_steps_were_undone_moves_lines_that_are_further_than_it_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = Journal(path)
    for step in range(6):
        writer.note({"x": "undone"}, step=step, is_writer=True)
    newcomer = Journal(path)
    for step in (2, 3):
        newcomer.note({"x": "again"}, step=step, is_writer=True)
    assert [line["step"] for line in read_lines(path)] == [0, 1, 2, 3]


def test_one_who_takes_over_writes_all_that_was_said_of_a_step(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.note({"a": 1}, step=3, is_writer=False)
    journal.note({"b": 2}, step=3, is_writer=True)
    assert [sorted(line) for line in read_lines(journal.path)] == [
        ["a", "step", "time"],
        ["b", "step", "time"],
    ]
