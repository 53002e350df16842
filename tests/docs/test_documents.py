"""What the documents say is true: links lead somewhere, named files exist, the README's program runs as shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_files_named_in_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:cli|control|protocol|analyze|config|worker|testing)/[\w/.]*)`", text)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "src" / "argosy" / name).exists()] == []


def test_the_tree_in_the_architecture_has_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.name for path in (ROOT / "src" / "argosy").glob("*/__init__.py")} | {
        "keeper",
        "zygote",
    }
    assert {name for name in folders if f"── {name}/" not in text} == set()


def test_every_verb_of_the_readme_is_known():
    text = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"`argosy ([a-z]+)", text))
    assert verbs
    for verb in sorted(verbs):
        done = subprocess.run(
            [sys.executable, "-m", "argosy", verb, "--help"],
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, verb


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


@pytest.mark.multiprocess
def test_the_readme_program_runs_as_shown(tmp_path, home):
    program = re.search(
        r"```python\n(# train\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    (tmp_path / "train.py").write_text(program[1])
    done = subprocess.run(
        [sys.executable, "-m", "argosy", "run", "-n", "4", "train.py"],
        cwd=tmp_path,
        env=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") >= 1
    assert "argosy: starting 4 ranks, generation 1" in done.stderr


@pytest.mark.multiprocess
def test_the_example_spec_runs_as_shown(home):
    done = subprocess.run(
        [sys.executable, "-m", "argosy", "run", "examples/services.toml"],
        cwd=ROOT,
        env=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "[client] the server answers 200" in done.stdout


@pytest.mark.multiprocess
def test_the_demo_heals(home):
    done = subprocess.run(
        [sys.executable, "-m", "argosy", "demo"],
        env=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 2" in done.stdout
    assert "outcome succeeded" in done.stderr
