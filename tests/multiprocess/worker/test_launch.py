"""One program, started by plain python in every way, and by `argosy run`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = Path(__file__).with_name("launched_program.py")


@pytest.fixture
def start(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ARGOSY_")}

    def run_to_the_end(*words, **variables):
        return subprocess.run(
            [sys.executable, *words],
            env={**environment, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    return run_to_the_end


def facts_in(directory):
    return [path.read_text() for path in sorted(directory.glob("facts-*"))]


def logged(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


@pytest.mark.parametrize("thread", [False, True], ids=["forked", "started by exec"])
def test_ranks_get_config_seed_and_threads_and_one_of_them_speaks(start, tmp_path, thread):
    words = ["-n", "2", "--set", "depth=3", "--set", "optimizer.learning_rate=1e-3", "--seed", "5"]
    done = start(PROGRAM, *words, "--directory", "here", **({"THREAD": "1"} if thread else {}))
    assert done.returncode == 0, done.stderr
    assert ("this process has 2 threads, so its ranks" in done.stderr) == thread
    lines = ["once", "step 0  loss 0.5", "step 1  loss 0.33333"]
    assert sorted(done.stdout.splitlines()) == lines
    one, other = facts_in(tmp_path / "here")
    assert one == other
    assert one.startswith("[3, 0.001, 1, 5]")
    assert logged(tmp_path / "here") == [(0, 0.5), (1, 1 / 3)]
    record = json.loads((tmp_path / "here" / "config.json").read_text())
    assert record["config"] == {
        "depth": 3,
        "betas": [0.9, 0.95],
        "optimizer": {"learning_rate": 0.001},
    }
    assert (record["seed"], record["threads"], record["name"]) == (5, 1, "launched_program")


def test_one_rank_runs_in_the_process_itself_and_a_run_goes_on_as_it_began(start, tmp_path):
    driver = (
        "import os, sys; sys.path.insert(0, os.environ['FOLDER'])\n"
        "from launched_program import Config, launch, main\n"
        "def begin(*words): launch(main, Config, argv=words)\n"
        "begin('-n', '1', '--set', 'depth=2', '--seed', '3', '--directory', 'first')\n"
        "assert open('first/pid-0').read() == str(os.getpid())\n"
        "begin('-n', '1', '--resume', 'first', '--set', 'optimizer.learning_rate=0.5')\n"
        "for words in (['--directory', 'first'], ['--resume', 'nothing'], ['--set', 'deph=1']):\n"
        "    try: begin('-n', '1', *words)\n"
        "    except SystemExit as error: print('refused with', error.code)\n"
        "begin('-n', '1', '--set', 'depth=13')\n"
    )
    done = start("-c", driver, FOLDER=str(PROGRAM.parent))
    assert done.returncode == 13
    assert done.stdout.count("refused with 64") == 3
    assert facts_in(tmp_path / "first")[0].startswith("[2, 0.5, 1, 3]")
    assert str(tmp_path / "first") in facts_in(tmp_path / "first")[0]
    assert "goes on with another optimizer.learning_rate: 0.1 -> 0.5" in done.stderr
    assert "argosy: first holds a run already\n  fix: go on with it: --resume first" in done.stderr
    assert "argosy: unknown key `deph`\n  fix: did you mean `depth`?\n" in done.stderr
    assert "Traceback" not in done.stderr
    record = json.loads((tmp_path / "first" / "config.json").read_text())
    assert record["overrides"] == ["depth=2", "optimizer.learning_rate=0.5"]
    assert record["lineage"][0]["changes"] == ["optimizer.learning_rate: 0.1 -> 0.5"]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_in_a_cluster_settings_reach_the_script_and_wrong_ones_end_it(start, tmp_path):
    home = {"ARGOSY_HOME": str(tmp_path / "home"), "RES_OPTIONS": "timeout:1 attempts:1"}
    try:
        words = ["run", "-n", "2", str(PROGRAM), "--set", "depth=4"]
        done = start("-m", "argosy", *words, "--set", "optimizer.learning_rate=0.25", **home)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("once") == 1
        (directory,) = (tmp_path / "home").glob("clusters/*/runs/*")
        one, other = facts_in(directory)
        assert one == other
        assert one.startswith("[4, 0.25, 1, 0]")
        assert logged(directory) == [(0, 0.5), (1, 1 / 3)]
        record = json.loads((directory / "config.json").read_text())
        assert record["overrides"] == ["depth=4", "optimizer.learning_rate=0.25"]
        wrong = start("-m", "argosy", "run", "-n", "2", str(PROGRAM), "--set", "deph=4", **home)
        assert wrong.returncode != 0
        assert "unknown key `deph`" in wrong.stdout + wrong.stderr
        directories = set((tmp_path / "home").glob("clusters/*/runs/*")) - {directory}
        assert [facts_in(other) for other in directories] == [[]]
    finally:
        start("-m", "argosy", "down", "--force", **home)
