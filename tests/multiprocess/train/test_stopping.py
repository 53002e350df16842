"""What `python train.py` says and leaves when it is stopped, resumed, refused, finished, or when a rank never comes to train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = Path(__file__).with_name("stopping_program.py")


def launches(directory, *words):
    """What each launch of the program has said, its exit code last."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ARGOSY_")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = [part.splitlines() for part in done.stderr.split("$ ")[1:]]
    return [[line.replace(f"{directory}/", "") for line in lines[1:]] for lines in parts]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The same of all that are usual, by name; and where."""
    directory = tmp_path_factory.mktemp("stopping")
    return dict(zip(NAMES, launches(directory), strict=True)), directory


NAMES = (
    "refused",
    "vanished",
    "resumed",
    "mistaken",
    "finished",
    "twice",
    "alone",
    "broken",
    "sleepy",
    "hopeless",
)
SAVED = "argosy: step {} is saved in {}/checkpoints/step-{:09d}"


def saves_in(directory):
    return sorted(path.name for path in directory.glob("checkpoints/step-*"))


def test_more_ranks_than_lanes_are_refused_and_leave_no_directory(said):
    lines = said[0]["refused"]
    assert lines[-3:] == [
        "argosy: 5 ranks for 4 lanes",
        "  fix: use at most 4 ranks, or more lanes",
        "code 64",
    ]
    assert not (said[1] / "runs").exists()


def test_ctrl_c_when_all_ranks_have_just_died_saves_what_they_have_trained(said):
    lines = said[0]["vanished"]
    assert "argosy: saving what is committed (Ctrl-C again stops without saving)" in lines
    assert SAVED.format(5, "vanished", 5) in lines
    assert lines[-2].startswith("argosy: stopped; go on: python ")
    assert lines[-2].endswith("stopping_program.py --resume vanished")
    assert lines[-1] == "code 130"


def test_a_resume_says_where_it_goes_on_and_the_end_is_saved(said):
    lines = said[0]["resumed"]
    assert "argosy: goes on from step 5 of vanished" in lines
    assert lines[-2:] == [SAVED.format(8, "vanished", 8), "code 0"]
    assert saves_in(said[1] / "vanished") == ["step-000000005", "step-000000008"]


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(said):
    lines, directory = said[0]["mistaken"], said[1]
    assert lines[0] == "argosy: the run goes on with another case: '' -> 'wider'"
    assert lines[-3].endswith(" was trained with batch_size = 8 (now 16)")
    assert lines[-1] == "code 65"
    record = json.loads((directory / "vanished" / "config.json").read_text())
    assert (record["config"], record["overrides"]) == ({"case": ""}, ["case=vanish", "case="])
    assert len(record["lineage"]) == 1
    assert said[0]["finished"][-1] == "code 0"


def test_a_finished_run_that_is_resumed_says_so(said):
    lines = said[0]["finished"]
    assert "argosy: goes on from step 8 of vanished" in lines
    assert lines[-2].startswith("argosy: the run is finished: 8 of 8 steps")
    assert lines[-1] == "code 0"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("twice", "stopped; nothing was saved at its end"),
        ("alone", "stopped at once; nothing was saved at its end"),
    ],
)
def test_ctrl_c_twice_saves_nothing_more_and_names_the_newest_checkpoint(said, name, how):
    lines, saves = said[0][name], saves_in(said[1] / name)
    assert "argosy: saving what is committed (Ctrl-C again stops without saving)" in lines
    step = int(saves[-1].removeprefix("step-"))
    assert step < 5
    assert lines[-2].startswith(
        f"argosy: {how}; step {step} is saved in {name}/checkpoints/{saves[-1]}; go on: python "
    )
    assert lines[-2].endswith(f"stopping_program.py --resume {name}")
    assert lines[-1] == "code 130"


def test_a_loop_that_is_left_early_is_saved_when_the_program_ends(said):
    assert said[0]["broken"][-2:] == [SAVED.format(5, "broken", 5), "code 0"]


def test_a_rank_that_hangs_before_it_makes_its_trainer_is_replaced(said):
    lines = said[0]["sleepy"]
    assert any("rank 1 has not come to train in " in line for line in lines), lines
    assert lines[-2:] == [SAVED.format(8, "sleepy", 8), "code 0"]
    assert "stopping_program.py" in (said[1] / "sleepy" / "stacks-1.txt").read_text()


def test_a_household_that_gives_up_saves_what_its_ranks_have_trained(said):
    lines, saves = said[0]["hopeless"], saves_in(said[1] / "hopeless")
    assert any("is saved in hopeless/checkpoints" in line for line in lines), lines
    assert lines[-1] == "code 1"
    assert saves[-1] >= "step-000000005"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["flip", "refresh"])
def test_a_stop_while_a_step_commits_saves_it_with_what_the_loop_does_after_it(
    tmp_path, point, rank
):
    stopped, resumed = launches(tmp_path, point, str(rank))
    assert stopped[-1] == "code 130", stopped
    assert saves_in(tmp_path / "stopped")[-2:] == ["step-000000005", "step-000000008"]
    assert "argosy: goes on from step 5 of stopped" in resumed
    assert "made 0 1 2 3 4 5 6 7" in resumed
