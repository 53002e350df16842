"""A run that is stopped while its ranks are being replaced loses nothing; a size that it cannot have does not touch it."""

import os
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.faults]

PROGRAM = Path(__file__).parents[1] / "multiprocess" / "programs" / "recorded_training.py"
GATE = 6


@pytest.fixture
def begin(shared, tmp_path):
    """A run of three ranks that has made six steps and makes no more."""
    started = []

    def start(name, *words):
        record = tmp_path / name
        record.mkdir()
        (record / "gate").write_text(str(GATE))
        run = shared.detach("-n", 3, "--name", name, "--env", f"RECORD={record}", *words, PROGRAM)
        started.append(run)
        shared.wait_until(
            lambda: sum(f"\n{GATE - 1} " in f.read_text() for f in record.glob("*.steps")) == 3,
            lambda: shared.argosy("logs", run, check=False).stdout,
        )
        return run

    yield start
    for run in started:
        if shared.view(run)["state"] != "ended":
            shared.argosy("kill", run, check=False)


def facts_of(cluster, run, kind):
    return [fact for fact in cluster.facts(run) if fact["kind"] == kind]


def assert_saved(cluster, run, stopped):
    view = cluster.view(run)
    assert (view["outcome"], view["exit_code"]) == ("stopped", 143), view
    assert "nothing was saved" not in view["reason"]
    path = Path(view["directory"]) / "checkpoints" / f"step-{GATE:09d}"
    assert path.is_dir(), cluster.argosy("events", run).stdout
    assert f"; step {GATE} is saved in {path}\n" in stopped.stdout
    assert f"-- --resume {view['directory']}\n" in stopped.stdout
    errors = "".join(p.read_text() for p in Path(view["directory"]).glob("logs/*.err"))
    assert "Traceback" not in errors
    assert "fix:" not in errors


def test_a_stop_right_after_all_ranks_were_killed_saves(shared, begin):
    run = begin("killed")
    before = len(shared.facts(run))
    refused = shared.argosy("scale", run, 9, check=False)
    assert refused.returncode == 64
    assert refused.stderr == (
        "argosy: train cannot have 9 ranks: it has 8 lanes for all its life\n"
        "  fix: use 8 or fewer\n"
    )
    assert len(shared.facts(run)) == before, "the run is untouched"
    for pid in shared.running_pids(run):
        os.kill(pid, signal.SIGKILL)
    assert_saved(shared, run, shared.argosy("stop", run))


def test_a_stop_right_after_the_keeper_was_killed_saves(shared, begin):
    run = begin("orphaned")
    os.kill(shared.pids()["keeper"], signal.SIGKILL)
    assert_saved(shared, run, shared.argosy("stop", run))
    (saver,) = [f for f in facts_of(shared, run, "attempt.planned") if f.get("saving")]
    assert saver["rank"] == 0


def test_a_kill_says_what_it_costs(shared, begin):
    run = begin("hurried")
    assert shared.argosy("kill", run).stdout == f"{run} killed; nothing was saved at its end\n"
    assert shared.view(run)["reason"] == "argosy kill; nothing was saved at its end"
