"""Training through every fault of the list: the same bits, the same loss in every step, nothing done twice; or the cause, once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from argosy.control import hostchecks

pytestmark = [pytest.mark.multiprocess, pytest.mark.faults]

PROGRAM = Path(__file__).parents[1] / "multiprocess" / "programs" / "recorded_training.py"
STEPS = 40
OPEN = 1 << 20
LIMIT_BYTES = 1 << 30


class Training:
    """A run of the program on the cluster, and what its processes have written down."""

    def __init__(self, cluster, record, *, ranks=4, gate=OPEN, program=PROGRAM, options=()):
        self.cluster, self.record = cluster, record
        self.allow(gate)
        self.run = cluster.detach(
            "-n",
            ranks,
            "--min",
            "1",
            "--env",
            f"RECORD={record}",
            *options,
            str(program),
        )

    def allow(self, step):
        """Open the gate up to this step."""
        beside = self.record / "gate.new"
        beside.write_text(str(step))
        beside.rename(self.record / "gate")

    def wait_for_gate(self, step, ranks=None):
        """Until some rank has come to this step; with `ranks`, until that many of one generation have."""
        self.cluster.wait_until(
            lambda: sum(s >= step - 1 for s in map(last_step, self.files())) >= (ranks or 1),
            lambda: f"{ranks or 1} ranks at the gate of step {step}: {self.story()}",
        )

    def pids(self):
        return self.cluster.running_pids(self.run)

    def kill(self, *ranks, number=signal.SIGKILL):
        # One that is about to be replaced has no process: 0 would be the tests' own group.
        found = self.cluster.wait_until(
            lambda: pids if all(map((pids := self.pids_by_rank()).get, ranks)) else None,
            lambda: f"processes of ranks {ranks}: {self.story()}",
        )
        for rank in ranks:
            os.kill(found[rank], number)
        return [found[rank] for rank in ranks]

    def pids_by_rank(self):
        return {p["index"]: p["pid"] for p in self.cluster.processes(self.run)}

    def fault(self, *words):
        self.cluster.argosy("fault", self.run, *words)

    def files(self):
        return list(self.record.glob("*.steps"))

    def num_made(self, pids):
        """How many of these processes have made their trainer."""
        return sum((self.record / f"{pid}.steps").exists() for pid in pids)

    def worlds(self):
        """World sizes that have committed a step."""
        lines = [line for path in self.files() for line in whole_lines(path)]
        return {int(line.split()[2]) for line in lines if line[0] != "d"}

    def has_been(self, world_size, seconds):
        """Whether so many ranks have committed a step, or do within this time."""
        deadline = time.monotonic() + seconds
        while world_size not in self.worlds():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def wait_end(self):
        self.cluster.wait_until(
            lambda: self.cluster.view(self.run)["state"] == "ended",
            lambda: f"the end of the run: {self.story()}",
        )
        return self.cluster.view(self.run)

    def story(self):
        steps = {path.stem: last_step(path) for path in self.files()}
        return f"{steps}\n{self.cluster.argosy('why', self.run, check=False).stdout}"

    def assert_undisturbed(self, reference, *, perhaps_unseen=()):
        """Ended well, with the bits of a run that nobody touched; no process went back, no step has two losses.

        A step whose only rank was killed after the commit may have been written down by nobody.
        """
        view = self.wait_end()
        assert view["outcome"] == "succeeded", self.story()
        digests, losses = read(self.record)
        expected_digests, expected = reference
        unseen = expected.keys() - losses.keys()
        assert digests == expected_digests
        assert unseen <= set(perhaps_unseen)
        for step, values in losses.items():
            assert values == expected[step], f"loss of step {step}"
        for path in self.files():
            steps = [int(line.split()[0]) for line in whole_lines(path) if line[0] != "d"]
            assert steps == sorted(set(steps)), f"{path.name} did a step twice"


def whole_lines(path):
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def last_step(path):
    steps = [line.split()[0] for line in whole_lines(path) if line[0] != "d"]
    return int(steps[-1]) if steps else -1


def read(record):
    """(digests, losses by step) that the processes have written down."""
    digests, losses = set(), {}
    for line in (line for path in record.glob("*.steps") for line in whole_lines(path)):
        first, second, *_ = line.split()
        if first == "digest":
            digests.add(second)
        else:
            losses.setdefault(int(first), set()).add(second)
    return digests, losses


def facts_of(training, kind):
    return [fact for fact in training.cluster.facts(training.run) if fact["kind"] == kind]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One rank, without a cluster."""
    record = tmp_path_factory.mktemp("reference")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "-n", "1"],
        env={**os.environ, "RECORD": str(record)},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=record,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = read(record)
    assert len(found[0]) == 1
    assert sorted(found[1]) == list(range(STEPS))
    return found


@pytest.fixture
def train(shared, tmp_path):
    """Start a run on the file's cluster; it is ended afterwards, whatever happened."""
    started = []

    def start(**given):
        started.append(Training(shared, tmp_path, **given))
        return started[-1]

    yield start
    for training in started:
        if shared.view(training.run)["state"] != "ended":
            shared.argosy("stop", training.run, "--hard", check=False)


def test_a_rank_may_die_at_any_point_of_a_step(train, reference):
    training = train(gate=3)
    training.wait_for_gate(3, ranks=4)
    points = ("lane", "publish", "vote", "update", "flip", "refresh")
    steps = {point: 5 + 5 * place for place, point in enumerate(points)}
    for place, point in enumerate(points):
        rank = (place + 1) % 4
        training.fault("--kill", f"rank={rank}", "--at-step", steps[point], "--point", point)
    training.allow(OPEN)
    training.assert_undisturbed(reference, perhaps_unseen=(steps["refresh"],))
    ends = [fact for fact in facts_of(training, "attempt.exited") if fact.get("signal") == 9]
    assert len(ends) == len(points), "each of the faults has happened"


def test_a_rank_may_be_slow_raise_compute_nonsense_or_hang(train, reference):
    training = train(gate=3)
    training.wait_for_gate(3, ranks=4)
    training.fault("--slow", "rank=2", "--at-step", "6", "--seconds", "0.3")
    training.fault("--nan", "rank=1", "--at-step", "10")
    training.fault("--raise", "rank=3", "--at-step", "16", "--point", "vote")
    training.fault("--raise", "rank=0", "--at-step", "22", "--point", "lane")
    training.fault("--stop", "rank=1", "--at-step", "30", "--point", "update")
    training.allow(OPEN)
    training.assert_undisturbed(reference)
    exits = facts_of(training, "attempt.exited")
    assert sum(fact.get("code") == 1 for fact in exits) == 2, "two exceptions"
    assert sum(fact.get("signal") == 9 for fact in exits) == 1, "one hang, ended by the runtime"
    notes = [fact["text"] for fact in facts_of(training, "note") if fact["level"] == "warning"]
    assert sum(text.startswith("step 10: loss or gradient was not finite") for text in notes) == 1


def test_several_ranks_and_every_part_of_the_runtime_may_be_killed(train, reference, shared):
    training = train(gate=8)
    training.wait_for_gate(2)
    training.kill(1, 3)
    training.allow(12)
    training.wait_for_gate(12)
    training.kill(0, 1, 2, 3)
    for place, part in enumerate(("zygote", "controller", "agent", "keeper")):
        gate = 16 + 4 * place
        training.allow(gate)
        training.wait_for_gate(gate)
        training.fault("--kill", part)
        shared.wait_until(
            lambda: {"controller", "agent", "keeper"} <= shared.pids().keys(), f"a new {part}"
        )
    training.allow(OPEN)
    training.assert_undisturbed(reference)


def test_a_gang_is_made_smaller_and_larger_while_it_trains(train, reference, shared):
    training = train(gate=4)
    training.wait_for_gate(4)
    for ranks, first in ((2, 4), (3, 14), (8, 24)):
        shared.argosy("scale", training.run, ranks)
        shared.wait_until(
            lambda ranks=ranks: training.num_made(training.pids()) == ranks,
            lambda: f"trainers on all ranks: {training.story()}",
        )
        # A rank that joins is not waited for: one step after the other is allowed until it has.
        for step in range(first, first + 10):
            training.allow(step + 1)
            training.wait_for_gate(step + 1)
            if training.has_been(ranks, seconds=1.0):
                break
    training.allow(OPEN)
    training.assert_undisturbed(reference)
    assert training.worlds() == {2, 3, 4, 8}


def test_a_stopped_run_goes_on_at_another_world_size_unless_its_source_has_changed(
    shared, tmp_path, reference
):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.read_text())
    first, second = tmp_path / "first", tmp_path / "second"
    for record in (first, second):
        record.mkdir()
    training = Training(shared, first, gate=20, ranks=4, program=program)
    training.wait_for_gate(20)
    shared.argosy("stop", training.run)
    assert training.wait_end()["outcome"] == "stopped"
    directory = shared.view(training.run)["directory"]
    (save,) = Path(directory).glob("checkpoints/step-*")
    assert json.loads((save / "MANIFEST.json").read_text())["step"] == 20

    program.write_text(PROGRAM.read_text() + "# another ending\n")
    words = ["run", "-n", "2", "--env", f"RECORD={second}", program, "--", "--resume", directory]
    refused = shared.argosy(*words, check=False)
    assert refused.returncode == 64
    assert "argosy: train.py has changed since the run began\n" in refused.stderr
    assert "refused what it was given" in refused.stderr
    assert "outcome:" not in refused.stderr
    assert "--allow-source" in refused.stderr
    assert not list(second.glob("*.steps"))

    shared.argosy(*words, "--allow-source")
    digests, losses = read(second)
    assert digests == reference[0]
    assert losses == {step: reference[1][step] for step in range(20, STEPS)}


def test_an_exception_that_repeats_ends_the_run_with_its_cause_once(shared, tmp_path):
    words = ["-n", "3", "--name", "spoilt", "--env", f"RECORD={tmp_path}", "--set", "raises_at=7"]
    done = shared.argosy("run", *words, PROGRAM, check=False)
    assert done.returncode == 1, done.stderr
    cause = "step 7, lane 5 raised on two ranks: ValueError: lane 5 is spoilt"
    assert done.stderr.count(cause) == 1, done.stderr
    digests, losses = read(tmp_path)
    assert (digests, sorted(losses)) == (set(), list(range(7)))
    starts = [fact for fact in shared.facts("spoilt") if fact["kind"] == "attempt.started"]
    assert len(starts) <= 5, "two ranks at most were started again"
    (save,) = Path(shared.view("spoilt")["directory"]).glob("checkpoints/step-*")
    assert save.name == "step-000000007", "what was committed is not lost"


def sets(**values):
    """Words that change the program's config, or the spec."""
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def test_a_rank_that_the_kernel_kills_for_lack_of_memory_costs_nothing(train, reference, shared):
    found = hostchecks.check_memory_limits()
    if found.state != "ok":
        pytest.skip(found.detail)
    limit = {"roles.train.memory_bytes": LIMIT_BYTES}
    # The more a kernel has to do for its memory, the longer is the lane of one who takes all of it.
    training = train(gate=20, options=sets(eats_at=12, hang_seconds=60, **limit))
    training.wait_for_gate(20)
    shared.wait_until(
        lambda: training.num_made(training.pids()) == 4,
        lambda: f"a replacement: {training.story()}",
    )
    training.allow(OPEN)
    training.assert_undisturbed(reference)
    bad = [fact for fact in facts_of(training, "attempt.exited") if fact.get("code") != 0]
    assert [(fact["signal"], fact["is_oom"]) for fact in bad] == [(signal.SIGKILL, True)]
    assert "was killed for lack of memory" in shared.argosy("why", training.run).stdout
    assert "ran out of memory" in shared.argosy("events", training.run).stdout


def test_memory_that_one_rank_is_refused_costs_nothing(train, reference):
    training = train(options=sets(starves_at=12))
    training.assert_undisturbed(reference)
    bad = [fact for fact in facts_of(training, "attempt.exited") if fact.get("code") != 0]
    assert [(fact["code"], "MemoryError" in fact["error"]) for fact in bad] == [(1, True)]


def test_memory_that_every_rank_is_refused_ends_the_run_with_its_cause_once(shared, tmp_path):
    words = ["-n", "3", "--name", "starved", "--env", f"RECORD={tmp_path}"]
    words += sets(starves_at=7, starves_again="true")
    done = shared.argosy("run", *words, PROGRAM, check=False)
    assert done.returncode == 1, done.stderr
    cause = "step 7, lane 5 raised on two ranks: MemoryError"
    assert done.stderr.count(cause) == 1, done.stderr
    assert f"{cause}:" not in done.stderr
    assert sorted(read(tmp_path)[1]) == list(range(7))
    (save,) = Path(shared.view("starved")["directory"]).glob("checkpoints/step-*")
    assert save.name == "step-000000007", "what was committed is not lost"
