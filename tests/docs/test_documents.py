"""What the documents say is true: links lead somewhere, named files exist, commands are known, the README's program runs as shown."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from argosy.cli.app import find_verb
from argosy.cli.arguments import parse

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_the_project_that_are_named_exist(document):
    folders = "benchmarks|examples|scripts|src|tests"
    named = re.findall(rf"`((?:{folders})/[\w/-]+\.\w+)`", document.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_files_named_in_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = "cli|control|protocol|analyze|config|worker|testing|train|data|models|move"
    named = re.findall(rf"`((?:{folders})/[\w/.]*)`", text)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "src" / "argosy" / name).exists()] == []


def test_the_tree_in_the_architecture_has_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.name for path in (ROOT / "src" / "argosy").glob("*/__init__.py")} | {
        "keeper",
        "zygote",
    }
    assert {name for name in folders if f"── {name}/" not in text} == set()


def test_the_layers_in_contributing_are_those_that_are_held():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    source = ROOT / "src" / "argosy"
    held = []
    for layer in contracts[0]["layers"]:
        names = [name.strip("() ") for name in layer.split("|")]
        there = [name for name in names if any(source.glob(f"{name}*"))]
        held += [" | ".join(there)] if there else []
    text = (ROOT / "CONTRIBUTING.md").read_text()
    shown = re.findall(r"^    ([a-z| ]+)$", text, re.MULTILINE)
    assert shown == held
    torchless = re.search(r"- (.*) never reach torch", text)[1]
    modules = contracts[1]["source_modules"]
    assert {f"argosy.{name}" for name in re.findall(r"`(\w+)`", torchless)} == set(modules)


def test_every_verb_of_the_readme_is_known():
    text = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"`argosy ([a-z]+)", text))
    assert verbs
    for verb in sorted(verbs):
        done = subprocess.run(
            [sys.executable, "-m", "argosy", verb, "--help"],
            capture_output=True,
            check=False,
            timeout=250,
        )
        assert done.returncode == 0, verb


@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if "argosy " in path.read_text() and path.name != "cli.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_in_blocks_have_known_verbs_and_options(document):
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", document.read_text(), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    for line in lines:
        if line.startswith("argosy ") and "..." not in line and "|" not in line:
            verb, words = find_verb(shlex.split(line, comments=True)[1:])
            parse(verb, words)


@pytest.fixture
def home(tmp_path):
    environment = {
        **os.environ,
        "ARGOSY_HOME": str(tmp_path / "home"),
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    yield environment
    subprocess.run(
        [sys.executable, "-m", "argosy", "down", "--force"], env=environment, check=True, timeout=60
    )


ARGOSY = [sys.executable, "-m", "argosy"]


def run_quietly(command, home, directory, timeout=250):
    return subprocess.run(
        command,
        cwd=directory,
        env=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def test_the_readme_shows_the_example():
    program = re.search(
        r"```python\n(# train\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert program[1] == (ROOT / "examples" / "train.py").read_text()


@pytest.mark.multiprocess
def test_the_readme_program_gives_the_same_state_with_a_killed_rank_and_on_other_ranks(
    tmp_path, home
):
    (tmp_path / "train.py").write_text((ROOT / "examples" / "train.py").read_text())
    small = ["--set", "depth=1", "--set", "steps=90"]
    killed = subprocess.Popen(
        [*ARGOSY, "run", "train.py", "-n", "4", *small],
        cwd=tmp_path,
        env=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # As soon as its ranks can be told, long before they have come to that step.
    fault = [*ARGOSY, "fault", "train", "--kill", "rank=2", "--at-step", "80"]
    deadline = time.monotonic() + 60
    while run_quietly(fault, home, tmp_path).returncode:
        assert time.monotonic() < deadline
    output, errors = killed.communicate(timeout=250)
    assert killed.returncode == 0, errors
    assert "argosy: starting 4 ranks, generation 1" in errors
    assert "argosy: rank 2 killed by SIGKILL" in errors
    assert "argosy: generation 2: 4 ranks" in errors
    other = run_quietly([sys.executable, "train.py", "-n", "3", *small], home, tmp_path)
    assert other.returncode == 0, other.stderr
    states = re.findall(r"state ([0-9a-f]{64})", output + other.stdout)
    assert len(states) == 2
    assert states[0] == states[1]
    looks = re.search(r"## Look\n\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    for line in looks.splitlines():
        words = [word for word in shlex.split(line, comments=True)[1:] if word != "-f"]
        if words[0] != "stacks":  # of a run that has ended there are none
            assert run_quietly([*ARGOSY, *words], home, tmp_path).returncode == 0, line


@pytest.mark.multiprocess
def test_the_example_spec_runs_as_shown(home):
    done = subprocess.run(
        [sys.executable, "-m", "argosy", "run", "examples/services.toml"],
        cwd=ROOT,
        env=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "[client] the server answers 200" in done.stdout


@pytest.mark.multiprocess
def test_the_demo_shows_equal_bits_after_a_kill_and_leaves_no_cluster(home, tmp_path):
    done = run_quietly([*ARGOSY, "demo", "--quick", "--json"], home, tmp_path, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert all(found["checks"].values())
    assert found["digest"] == found["proof"]["digest"] != ""
    assert found["proof"]["ranks"] != found["ranks"]
    assert f"kill -9 {found['killed_pid']}" in done.stderr
    assert run_quietly([*ARGOSY, "status"], home, tmp_path).returncode == 3


@pytest.mark.multiprocess
def test_the_demo_leaves_nothing_behind_when_it_is_interrupted(home, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    demo = subprocess.Popen(
        [*ARGOSY, "demo", "--quick"],
        env={**home, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    for line in demo.stdout:
        if "step" in line:
            break
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=250)
    assert demo.returncode == 130
    assert list(scratch.glob("argosy*")) == []
    assert run_quietly([*ARGOSY, "status"], home, tmp_path).returncode == 3
