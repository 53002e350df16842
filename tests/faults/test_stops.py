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


GRACE = 8
SLOW = """
[roles.train]
script = "{program}"
count = 2
gang = true
grace_seconds = {grace}
env = {{ RECORD = "{record}" }}
"""


def test_a_last_save_that_takes_longer_than_the_grace_is_not_killed_while_it_goes_on(
    shared, tmp_path
):
    record, spec = tmp_path / "record", tmp_path / "slow.toml"
    record.mkdir()
    program = PROGRAM.with_name("slow_training.py")
    spec.write_text(SLOW.format(program=program, grace=GRACE, record=record))
    run = shared.detach(spec)
    shared.wait_until(
        lambda: len(list(record.iterdir())) == 2,
        lambda: shared.argosy("logs", run, check=False).stdout,
    )
    stopped = shared.argosy("stop", run)
    events = shared.json("events", run)["events"]
    told = {e["fact"]["kind"]: e["at"] for e in events}
    assert told["run.saved"] - told["run.stop_requested"] > GRACE, "the grace was long enough"
    (saved,) = facts_of(shared, run, "run.saved")
    ends = {f["attempt"]: f.get("signal") for f in facts_of(shared, run, "attempt.exited")}
    assert ends[saved["attempt"]] == signal.SIGTERM, "it has left by itself"
    assert not [f for f in facts_of(shared, run, "attempt.planned") if f.get("saving")]
    advances = facts_of(shared, run, "attempt.saving")
    assert advances[-1]["total_bytes"] > advances[-1]["num_bytes"] > advances[0]["num_bytes"] >= 0
    view = shared.view(run)
    path = Path(view["directory"]) / "checkpoints"
    assert "nothing was saved" not in view["reason"]
    assert f" is saved in {path}/step-" in stopped.stdout
    assert "whole" in shared.argosy("checkpoint", "verify", path).stdout
