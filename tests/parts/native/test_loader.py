"""The loader and the build: what is found, what is said when it is not there, and that an installation never needs a compiler."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.native import loader

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "src" / "argosy" / "native"
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.fixture(autouse=True)
def looked_at_again():
    loader.forget()
    yield
    loader.forget()


def test_the_object_is_opened_and_says_its_path():
    found = loader.state()
    assert loader.library() is not None, found
    assert found.path == loader.path() != loader.WITHOUT
    assert found.mend == ""
    assert loader.describe() == f"{found.path} ({loader.file().name})"


def test_the_switch_turns_native_code_off(monkeypatch):
    monkeypatch.setenv(loader.SWITCH, "0")
    assert loader.library() is None
    assert loader.quick() is None
    assert loader.state() == (
        "torch operations",
        "turned off by ARGOSY_NATIVE=0",
        "unset ARGOSY_NATIVE",
    )


def test_an_object_that_is_not_there_is_said_with_its_mend(monkeypatch, tmp_path):
    monkeypatch.setattr(loader, "_HERE", tmp_path)
    assert loader.library() is None
    assert loader.state().detail == "no native kernels were built"
    assert "C compiler" in loader.state().mend
    assert loader.describe().endswith(f"fix: {loader.REBUILD}")


def test_a_file_that_is_no_object_is_said_and_not_used(monkeypatch, tmp_path):
    (tmp_path / loader.file().name).write_bytes(b"not an object")
    monkeypatch.setattr(loader, "_HERE", tmp_path)
    assert loader.library() is None
    assert "cannot be used" in loader.state().detail
    assert "make setup" in loader.state().mend
    assert "install a C compiler" not in loader.state().mend


def test_an_object_of_another_interface_is_not_used(monkeypatch):
    monkeypatch.setattr(loader, "ABI", loader.ABI + 1)
    assert loader.library() is None
    assert f"interface {loader.ABI - 1}, this version needs {loader.ABI}" in loader.state().detail


def test_an_object_that_lacks_a_function_is_not_used(monkeypatch):
    functions = loader._FUNCTIONS | {"ag_of_tomorrow": (None, ())}
    monkeypatch.setattr(loader, "_FUNCTIONS", functions)
    assert loader.library() is None
    assert "ag_of_tomorrow" in loader.state().detail


def test_python_declares_what_the_header_declares():
    header = re.sub(r"/\*.*?\*/", "", (NATIVE / "kernels.h").read_text(), flags=re.DOTALL)
    assert int(re.search(r"#define ARGOSY_ABI (\d+)", header)[1]) == loader.ABI
    declared = {
        name: len([p for p in parameters.split(",") if p.strip() != "void"])
        for name, parameters in re.findall(r"\b(ag_\w+)\(([^)]*)\);", header)
    }
    assert declared == {name: len(kinds) for name, (_, kinds) in loader._FUNCTIONS.items()}
    statuses = re.findall(r"\bAG_(\w+) = (\d+)", header[: header.index("enum ag_dtype")])
    assert {name: int(number) for name, number in statuses} == {
        name: getattr(loader, name) for name, _ in statuses
    }
    assert ctypes.sizeof(loader.CPeers) == 24


def test_a_path_that_cannot_run_here_is_refused():
    native = loader.library()
    before = loader.path()
    assert native.ag_force_path(b"quantum") == loader.BAD
    assert loader.path() == before
    assert native.ag_force_path(b"baseline") == loader.OK
    assert loader.path() == "baseline"
    assert native.ag_force_path(None) == loader.OK
    assert loader.path() == before


def test_kernels_refuse_arguments_that_make_no_sense():
    native = loader.library()
    two = (ctypes.c_void_p * 2)(1, 1)
    assert native.ag_reduce(1, two, 0, 1, 0, 0, 1.0) == loader.BAD
    assert native.ag_reduce(1, two, 2, -1, 0, 0, 1.0) == loader.BAD
    assert native.ag_reduce(None, two, 2, 1, 0, 0, 1.0) == loader.BAD
    assert native.ag_reduce(1, two, 2, 1, 99, 0, 1.0) == loader.BAD
    assert native.ag_reduce(1, two, 2, 1, 0, 99, 1.0) == loader.BAD
    assert native.ag_reduce(1, two, 2, 1, 7, 1, 1.0) == loader.BAD
    program = (ctypes.c_int32 * 3)(0, 2, -1)
    assert native.ag_reduce_tree(1, two, 2, program, 3, 1, 0) == loader.BAD
    assert native.ag_reduce_tree(1, two, 2, program, 3, 1, 1) == loader.BAD
    assert native.ag_changed(1, 1, 1, 3, None, 0) == -1
    assert native.ag_wait(2, 0, 0, None, 0) == loader.BAD


@pytest.mark.skipif(COMPILER is None, reason="no C compiler here")
def test_the_sources_compile_without_a_warning(tmp_path):
    command = [COMPILER, "-std=c11", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    sources = sorted(NATIVE.glob("*.c"))
    assert len(sources) >= 6
    done = subprocess.run(
        [*command, "-fPIC", "-c", *map(str, sources)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_build_promises_the_same_bits_everywhere():
    text = (ROOT / "setup.py").read_text()
    flags = re.search(r"COMPILE = \[(.*?)\]", text, re.DOTALL)[1]
    assert '"-ffp-contract=off"' in flags
    assert '"-ffast-math"' not in flags
    assert "march" not in flags


def test_without_a_compiler_the_package_is_built_and_torch_operations_take_over(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(tmp_path / "lib")]
    environment = os.environ | {"CC": "/bin/false", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(build, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "lib").rglob("*.so")) == []
    assert (tmp_path / "lib" / "argosy" / "native" / "kernels.h").is_file()
    question = (
        "import json\nfrom argosy.native import loader\n"
        "print(json.dumps([loader.__file__, *loader.state()]))"
    )
    told = subprocess.run(
        [sys.executable, "-c", question],
        env=environment | {"PYTHONPATH": str(tmp_path / "lib")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    where, path, detail, mend = json.loads(told.stdout)
    assert Path(where).is_relative_to(tmp_path)
    assert (path, detail) == ("torch operations", "no native kernels were built")
    assert mend == loader.REBUILD
