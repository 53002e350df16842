"""From typed words to a spec: what is wrong is refused before anything starts."""

import json
import os
import sys

import pytest

from argosy.cli.app import find_verb
from argosy.cli.arguments import parse
from argosy.cli.program import read_program
from argosy.config.spec import RoleSpec
from argosy.control.submission import describe_shell, warm_parent
from argosy.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    return tmp_path


def program(*words):
    verb, rest = find_verb(["run", *words])
    return read_program(parse(verb, rest))


def refusal(*words):
    with pytest.raises(ConfigError) as caught:
        program(*words)
    return caught.value


def test_a_script_alone_is_one_process_that_is_not_restarted():
    spec = program("train.py", "--", "--steps", "3").spec
    assert spec == {
        "name": "train",
        "roles": {"main": {"script": "train.py", "arguments": ["--steps", "3"]}},
    }


def test_ranks_make_a_gang_with_three_restarts_like_torchruns():
    role = program("train.py", "-n", "4").spec["roles"]["train"]
    assert (role["gang"], role["count"], role["restart"], role["budget"]["user"]) == (
        True,
        4,
        "transient",
        3,
    )


def test_restarts_that_were_asked_for_are_made_whatever_the_program_says():
    asked = program("train.py", "-n", "2", "--restart", "5").spec["roles"]["train"]["budget"]
    assert (asked["user"], asked["same_error"]) == (5, 0)
    assert "same_error" not in program("train.py", "-n", "2").spec["roles"]["train"]["budget"]


def test_a_service_says_nothing_of_restarts_unless_it_was_told_to():
    for words in (["train.py"], ["train.py", "-n", "2"]):
        (role,) = program(*words, "--service").spec["roles"].values()
        assert "restart" not in role
    role = program("train.py", "--service", "--restart", "2").spec["roles"]["main"]
    assert (role["restart"], role["budget"]["user"]) == ("transient", 2)


def test_no_restarts_means_none_of_any_kind():
    role = program("train.py", "-n", "2", "--restart", "0").spec["roles"]["train"]
    assert role["restart"] == "temporary"
    assert set(role["budget"].values()) == {0}


def test_every_spec_made_here_is_a_valid_one():
    from argosy.config.checks import check_spec
    from argosy.config.files import make_spec

    for words in (
        ["train.py"],
        ["-n", "4", "--spares", "1", "--min", "2", "--threads", "1", "train.py"],
        ["-m", "json.tool", "--no-warm"],
        ["--tty", "--", "sh", "-c", "true"],
        [
            "train.py",
            "--restart",
            "2",
            "--cpus",
            "0.5",
            "--memory",
            "1G",
            "--queued",
            "--priority",
            "-3",
        ],
    ):
        check_spec(make_spec(program(*words).spec))


def test_a_module_and_a_command_are_taken():
    assert program("-m", "json.tool", "--", "-h").spec["roles"]["main"]["module"] == "json.tool"
    assert program("--", "sh", "-c", "true").spec["roles"]["main"] == {
        "command": ["sh", "-c", "true"]
    }


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["tain.py"], "does not exist", "train.py"),
        (["."], "is a directory", "-m"),
        (["--", ""], "the command has an empty name", "name the program"),
        (["--", "no-such-program-here"], "no command 'no-such-program-here' on PATH", "full path"),
        (["--", "./train.py"], "not executable", "chmod +x"),
        (["--", "train.py"], "no command 'train.py' on PATH", "./train.py"),
        (["-m", "no_such_module_here"], "no module 'no_such_module_here'", "environment"),
        (["-m", "json", "train.py"], "both -m json and train.py", "-- train.py"),
        ([], "nothing to run", "SCRIPT"),
        (["train.py", "--spares", "1"], "for gangs", "-n"),
        (["train.py", "-n", "2", "--min", "3"], "--min 3 is more than -n 2", "--min 2"),
        (["train.py", "-n", "2", "--tty"], "one process", "-n 1"),
        (["train.py", "--on", "slurm"], "--on slurm comes with a later release", "local"),
        (["train.py", "--tied", "--detach"], "--tied contradicts", "leave one"),
        (["train.py", "--env", "=3"], "is not K=V", "LEVEL=3"),
        (["train.py", "--secret", "KEY=hunter2"], "must not stand on the command line", "KEY=@FILE"),
        (["train.py", "--secret", "NO_SUCH_VARIABLE"], "no variable NO_SUCH_VARIABLE", "export"),
        (["train.py", "--secret", "KEY=@absent"], "absent cannot be read", "path"),
        (["--preload", "torch", "--", "sh"], "for Python scripts", "leave"),
        (["absent.toml"], "does not exist", "path"),
        (["train.py", "--set", "roles.main.cuont=3"], "`roles.main.cuont`", "`count`"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_a_fix(words, what, fix):
    error = refusal(*words)
    assert what in error.what
    assert fix in error.fix


def test_a_secret_that_was_refused_is_not_shown():
    error = refusal("train.py", "--secret", "KEY=hunter2")
    assert "hunter2" not in error.what + error.fix


def test_a_shell_script_is_pointed_to_the_command_form(folder):
    (folder / "go").write_text("#!/bin/sh\necho\n")
    assert "argosy run -- ./go" in refusal("go").fix


@pytest.mark.parametrize(
    ("name", "content", "mode", "fix"),
    [
        ("x.bin", b"\x7fELF\x02\x01", 0o755, "as a command: argosy run -- ./x.bin"),
        ("x.bin", b"\x00\x01data", 0o644, "chmod +x x.bin; argosy run -- ./x.bin"),
        ("notes.txt", b"remember = 1\n", 0o644, "argosy run -- ./notes.txt"),
        ("go.sh", b"#!/bin/sh\n", 0o755, "argosy run -- ./go.sh"),
        ("tool", b"#!/usr/bin/perl\n", 0o755, "argosy run -- ./tool"),
        ("prose", b"these are no statements\n", 0o644, "argosy run -- ./prose"),
        ("job.yaml", b"roles:\n", 0o644, "a spec is a TOML file"),
    ],
)
def test_what_is_no_python_is_not_started_as_such(folder, name, content, mode, fix):
    (folder / name).write_bytes(content)
    (folder / name).chmod(mode)
    assert fix in refusal(name).fix


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train", b"print(1)\n"),
        ("train.run", b"#!/usr/bin/env python3\nprint(1)\n"),
        ("a.py", b"\x00"),
    ],
)
def test_python_is_known_by_its_name_first_line_or_text(folder, name, content):
    (folder / name).write_bytes(content)
    assert program(name).spec["roles"]["main"]["script"] == name


def test_secrets_and_variables_never_enter_the_spec(folder, monkeypatch):
    (folder / "key").write_text("hunter2\n")
    monkeypatch.setenv("TOKEN", "hunter3")
    made = program(
        "train.py", "--secret", "KEY=@key", "--secret", "TOKEN", "--env", "LEVEL=hunter4"
    )
    assert made.secrets == {"KEY": "hunter2\n", "TOKEN": "hunter3"}
    assert made.spec["roles"]["main"]["secrets"] == ["KEY", "TOKEN"]
    assert made.env == {"LEVEL": "hunter4"}
    assert "hunter" not in str(made.spec)


def test_a_file_takes_run_options_and_refuses_role_options(folder):
    (folder / "job.toml").write_text('[roles.a]\ncommand = ["sh"]\n')
    made = program("job.toml", "--name", "other", "--set", "roles.a.count=3", "--service")
    assert (made.spec["name"], made.spec["service"]) == ("other", True)
    assert made.spec["roles"]["a"]["count"] == 3
    error = refusal("job.toml", "-n", "3")
    assert "-n is for scripts" in error.what


def test_a_file_whose_secret_is_not_given_is_refused(folder):
    (folder / "job.toml").write_text('[roles.a]\ncommand = ["sh"]\nsecrets = ["KEY"]\n')
    assert "wants the secret KEY" in refusal("job.toml").what


def test_a_file_with_a_missing_script_or_directory_is_refused(folder):
    (folder / "job.toml").write_text('[roles.a]\nscript = "absent.py"\n')
    assert "absent.py does not exist" in refusal("job.toml").what
    (folder / "job.toml").write_text('[roles.a]\ncommand = ["sh"]\ncwd = "nowhere"\n')
    assert "nowhere does not exist" in refusal("job.toml").what


def warmed(*words):
    return warm_parent(describe_shell(program(*words).spec))


def test_the_warm_parent_of_a_script_is_known_before_the_cluster_is(monkeypatch):
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    monkeypatch.setenv("UNRELATED", "x")
    found = warmed("train.py")
    assert found["preload"] == RoleSpec(script="train.py").preload
    assert found["preload"][:2] == ["torch", "torch.distributed"]
    assert found["env"]["OMP_PROC_BIND"] == "false"
    assert "UNRELATED" not in found["env"]
    assert warmed("--preload", "json,re", "train.py")["preload"] == ["json", "re"]
    assert warmed("--no-warm", "train.py") is None
    assert warmed("--", "sh") is None


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--", "sh", "-c", "true"], "sh"),
        (["--", sys.executable, "-u", "train.py", "--lr", "1"], "train"),
        (["--", sys.executable, "-m", "json.tool"], "json-tool"),
        (["--", sys.executable, "-c", "1"], os.path.basename(sys.executable)),
    ],
)
def test_a_command_of_python_is_named_after_what_it_runs(words, name):
    assert program(*words).spec["name"] == name


def test_an_interpreter_gets_its_full_path_and_a_missing_one_is_refused(folder):
    (folder / "mypython").symlink_to(sys.executable)
    made = program("train.py", "--set", "roles.main.python=./mypython")
    assert made.spec["roles"]["main"]["python"] == str(folder / "mypython")
    assert "'/nope/python'" in refusal("train.py", "--set", "roles.main.python=/nope/python").what


def test_a_misspelt_role_in_an_override_is_named(folder):
    (folder / "job.toml").write_text('[roles.train]\ncommand = ["sh"]\n')
    error = refusal("job.toml", "--set", "roles.trian.count=3")
    assert "no role 'trian'" in error.what
    assert "`train`" in error.fix


def test_settings_of_a_script_go_to_the_script_and_those_of_a_role_to_the_spec(folder):
    (folder / "train.py").write_text("import argosy as ar\n")
    words = ["--set", "depth=4", "--set", "roles.main.nice=3", "--set", "name=a, b"]
    for made in (program("train.py", *words), program("-m", "json", *words)):
        role = made.spec["roles"]["main"]
        assert json.loads(role["env"]["ARGOSY_SET"]) == ["depth=4", "name=a, b"]
        assert role["nice"] == 3
    assert "'depth' is not key=value" in refusal("train.py", "--set", "depth").what


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("import torch, os\nfrom torch import nn\nprint(1)\n", True),
        ("def f():\n    import json\n", True),
        ("import argosy as ar\nar.launch(1)\n", False),
        ("import torch\nimport mine\n", False),
        ("from .mine import main\n", False),
        ("import torch\nimport json\n__import__('mine')\n", False),
        ("import os\nprint(os.environ['ARGOSY_SET'])\n", False),
        ("import sys, torch\nsys.path.append('x')\n", False),
        ("def f(:\n", False),
    ],
)
def test_settings_of_a_script_that_certainly_has_no_config_are_refused(folder, text, is_refused):
    (folder / "train.py").write_text(text)
    if is_refused:
        error = refusal("train.py", "-n", "2", "--set", "steps=3")
        assert "--set steps=3: train.py has no config" in error.what
        assert "train.py -- --steps 3" in error.fix
        assert program("train.py", "--set", "roles.main.nice=3").spec["roles"]["main"]["nice"] == 3
    else:
        env = program("train.py", "--set", "steps=3").spec["roles"]["main"]["env"]
        assert json.loads(env["ARGOSY_SET"]) == ["steps=3"]


def test_a_module_beside_a_script_may_bring_its_config(folder):
    (folder / "train.py").write_text("import datasets\n")
    (folder / "datasets.py").write_text("import argosy\n")
    assert "env" in program("train.py", "--set", "steps=3").spec["roles"]["main"]


def test_a_command_has_no_settings_of_its_own():
    assert "unknown key `depth`" in refusal("--set", "depth=4", "--", "sh").what


def test_json_and_a_terminal_are_refused_wherever_the_terminal_is_asked_for(folder):
    (folder / "tty.toml").write_text('[roles.main]\ncommand = ["echo"]\ntty = true\n')
    (folder / "web.toml").write_text(
        'service = true\n[roles.main]\ncommand = ["echo"]\ntty = true\n'
    )
    setting = ("--set", "roles.main.tty=true")
    for words in (["--tty", "--", "echo"], ["tty.toml"], [*setting, "--", "echo"]):
        error = refusal("--json", *words)
        assert "--json prints JSON there" in error.what
        assert "add --detach" in error.fix
        assert program(*words).spec["roles"]["main"]["tty"]
        assert program("--json", "--detach", *words).spec["roles"]["main"]["tty"]
    assert "roles.main.tty shows" in refusal("--json", "tty.toml").what
    assert program("--json", "web.toml").spec["service"], "nobody follows it"


def test_a_script_is_a_file_that_the_ranks_can_read_too(folder):
    os.mkfifo(folder / "pipe.py")
    with open("train.py", "rb") as file:
        for script in ("pipe.py", "/dev/stdin", f"/dev/fd/{file.fileno()}"):
            error = refusal(script)
            assert "is no file that others can read" in error.what
            assert error.fix == "write the script to a file"
    (folder / "spec.toml").write_text('[roles.main]\nscript = "pipe.py"\n')
    assert "pipe.py is no file" in refusal("spec.toml").what
