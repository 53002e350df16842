"""The tree keeps its shape: layers are import-linter's; this checks what it cannot see."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "argosy"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 600
BANNED_NAMES = re.compile(r"/(utils?|common|helpers?|misc|core|v2)(/|\.py$)")


def test_no_file_is_longer_than_the_limit():
    long = {
        str(f.relative_to(ROOT)): n
        for f in FILES
        if (n := len(f.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_no_folder_or_file_has_a_name_that_explains_nothing():
    assert [str(f) for f in FILES if BANNED_NAMES.search(str(f.relative_to(ROOT)))] == []


def test_every_module_says_what_it_is():
    first_statement = re.compile(r'(#.*\n|\s)*r?"""\s*[^\s"]')
    assert [
        str(f.relative_to(ROOT)) for f in FILES if not first_statement.match(f.read_text())
    ] == []


def test_nothing_imports_pickle():
    pattern = re.compile(r"^\s*(import|from) (pickle|cloudpickle|dill)\b", re.MULTILINE)
    assert [str(f) for f in FILES if pattern.search(f.read_text())] == []


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "argosy",
        "argosy.cli.app",
        "argosy.control.controller",
        "argosy.control.agent",
        "argosy.control.coordinator",
        "argosy.worker.gang",
        "argosy.checkpoint.writer.__main__",
    ],
)
def test_importing_does_not_load_torch(module):
    assert not {m for m in modules_after(f"import {module}") if m.split(".")[0] == "torch"}


def test_the_keeper_is_standard_library_alone():
    loaded = {m.split(".")[0] for m in modules_after("import argosy.control.keeper.__main__")}
    assert {"msgspec", "psutil", "starlette", "uvicorn", "numpy", "rich", "torch"} & loaded == set()


def test_the_run_path_of_the_command_line_stays_light():
    heavy = {"asyncio", "rich", "http.client", "msgspec", "starlette", "uvicorn", "torch"}
    assert heavy & modules_after("import argosy.cli.app, argosy.cli.run") == set()
