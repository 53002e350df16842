"""A real gang that is resized, broken on purpose, and rid of a member that hangs; one cluster, one run, one story."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from argosy.errors import ConfigError, NotFoundError

PROGRAM = Path(__file__).parents[1] / "programs" / "steady_member.py"
pytestmark = pytest.mark.multiprocess


def wait_until(condition, what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value


def say(directory, speaker, /, **message):
    draft = directory / f"draft.{speaker}"
    draft.write_text(json.dumps(message))
    draft.rename(directory / f"say.{speaker}")


def await_fact(cluster, run, kind, **wanted):
    def found():
        for fact in reversed(cluster.facts(run)):
            if fact["kind"] == kind and all(fact.get(k) == v for k, v in wanted.items()):
                return fact
        return None

    return wait_until(found, f"{kind} {wanted}")


def await_members(cluster, run, generation, count):
    """Everybody alive has joined the generation, and there are so many."""

    def joined():
        alive = {p["attempt"] for p in cluster.processes(run) if p["pid"]}
        facts = [f for f in cluster.facts(run) if f["kind"] == "attempt.joined"]
        there = {f["attempt"] for f in facts if f["generation"] == generation}
        return len(alive) == count and alive <= there

    wait_until(joined, f"{count} members joined generation {generation}")


def outcome_of(cluster, command):
    def done():
        for fact in cluster.facts():
            if fact["kind"] == "command.done" and fact["command"] == command:
                return fact["outcome"]
        return None

    return wait_until(done, f"outcome of {command}")


def test_a_gang_is_resized_broken_and_mended_while_it_runs(cluster, tmp_path):
    role = {
        "command": [sys.executable, str(PROGRAM), str(tmp_path)],
        "gang": True,
        "count": 2,
        "min": 1,
        "backoff": {"first_seconds": 0.0},
    }
    run = cluster.submit({"train": role})
    await_members(cluster, run, 1, 2)
    first = {p["index"]: p["pid"] for p in cluster.processes(run)}

    command = cluster.post(f"/v1/runs/{run}/scale", {"size": 3})["command"]
    assert outcome_of(cluster, command) == "ok"
    await_members(cluster, run, 2, 3)
    now = {p["index"]: p["pid"] for p in cluster.processes(run)}
    assert {index: now[index] for index in first} == first, "those that were there go on"

    command = cluster.post(f"/v1/runs/{run}/scale", {"size": 2})["command"]
    assert outcome_of(cluster, command) == "ok"
    await_members(cluster, run, 3, 2)
    assert not os.path.exists(f"/proc/{now[2]}"), "the highest rank was killed and reaped"
    with pytest.raises(ConfigError, match="does no work"):
        cluster.post(f"/v1/runs/{run}/scale", {"size": 0})

    # A fault for a step is told; a stop at once makes a rank hang, and its peer says so.
    told = {"fault": "nan", "rank": 1, "step": 1_000_000}
    stop = {"fault": "stop", "rank": 1}
    faults = cluster.post(f"/v1/runs/{run}/faults", {"faults": [told, stop]})["faults"]
    assert [fault["attempt"] for fault in faults] == [f"{run}.train.1.0"] * 2
    say(tmp_path, 0, say="suspect", rank=1, reason="no sign of life")
    kept = await_fact(cluster, run, "attempt.evidence", attempt=f"{run}.train.1.0")
    await_fact(cluster, run, "attempt.exited", attempt=f"{run}.train.1.0", hung=True)
    stacks = json.loads(Path(kept["path"]).read_text())
    assert stacks["suspect"] == f"{run}.train.1.0"
    states = {stack["rank"]: stack["state"][:1] for stack in stacks["stacks"]}
    assert states[1] == "T", "it was seen as it hung, before it was killed"
    await_members(cluster, run, 4, 2)
    assert cluster.processes(run)[0]["pid"] == first[0]

    # The runtime's own parts die; the ranks do not notice.
    before = cluster.pids()
    for part in ("agent", "controller"):
        cluster.post(f"/v1/runs/{run}/faults", {"faults": [{"fault": "kill", "part": part}]})
        wait_until(lambda part=part: cluster.pids().get(part, before[part]) != before[part], part)
    assert cluster.processes(run)[0]["pid"] == first[0]

    # All ranks die at once.
    for process in cluster.processes(run):
        if process["pid"]:
            os.kill(process["pid"], signal.SIGKILL)
    wait_until(
        lambda: (
            cluster.view(run)["roles"][0]["generation"] > 4
            and len([p for p in cluster.processes(run) if p["pid"]]) == 2
        ),
        "both ranks are replaced",
    )
    generation = cluster.view(run)["roles"][0]["generation"]
    await_members(cluster, run, generation, 2)

    say(tmp_path, 1, say="fail", reason="it raises on every rank")
    view = cluster.wait_ended(run)
    assert (view["outcome"], view["reason"]) == ("failed", "rank 1: it raises on every rank")
    assert view["first_cause"].startswith(f"{run}.train.1.")
    with pytest.raises(NotFoundError, match="has failed"):
        cluster.post(f"/v1/runs/{run}/scale", {"size": 3})


LEAVING = """
import os, signal, sys, time
import argosy

if os.environ["ARGOSY_GENERATION"] == "1":
    gang = argosy.join()
    if gang.rank == 1:
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    while not gang.lost():
        time.sleep(0.001)
    os._exit(0)  # its work is done; of generation 2 it has not heard
gang = argosy.join()
if gang.rank == 0:
    sys.exit(0)  # both ends were known before generation 2 was formed
deadline = time.monotonic() + 30
while gang.lost_in(gang.generation) != {0}:
    assert time.monotonic() < deadline, "waited in vain for rank 0"
    time.sleep(0.01)
"""


def test_a_replacement_learns_of_a_member_that_ended_before_it_was_told_of_the_generation(
    cluster, tmp_path
):
    program, gate = tmp_path / "leaving.py", tmp_path / "gate"
    program.write_text(LEAVING)
    role = {
        "command": [sys.executable, str(program), str(gate)],
        "gang": True,
        "count": 2,
        "backoff": {"first_seconds": 0.0},
    }
    run = cluster.submit({"train": role})
    await_members(cluster, run, 1, 2)
    gate.touch()
    assert cluster.wait_ended(run)["outcome"] == "succeeded"
    await_fact(cluster, run, "gang.formed", generation=2, members=[0, 1])
