"""The line that goes on with a saved run starts the same thing again, or is not said."""

import shlex
import sys

import msgspec
import pytest

from argosy.analyze.resuming import how_to_go_on, resume_command
from argosy.cli.app import find_verb
from argosy.cli.arguments import parse
from argosy.cli.program import read_program
from argosy.config.spec import RoleSpec, RunSpec


def submitted(**roles):
    """The fact as it comes from the controller: fields that have their default are not in it."""
    spec = RunSpec(roles={name: msgspec.convert(role, RoleSpec) for name, role in roles.items()})
    return {"kind": "run.submitted", "spec": msgspec.to_builtins(spec)}


@pytest.fixture
def typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").write_text("import argosy")
    (tmp_path / "python").symlink_to(sys.executable)

    def roles_of(line):
        verb, rest = find_verb(shlex.split(line)[1:])
        return read_program(parse(verb, rest)).spec["roles"]

    return roles_of


@pytest.mark.parametrize(
    ("line", "resumed"),
    [
        ("argosy run train.py", "argosy run train.py -- --resume /r"),
        ("argosy run -n 1 train.py", "argosy run -n 1 train.py -- --resume /r"),
        ("argosy run -n 2 -- python train.py --lr 3", "argosy run -n 2 -- python train.py --lr 3 --resume /r"),
        ("argosy run -n 2 -- python train.py --resume=/old", "argosy run -n 2 -- python train.py --resume /r"),
        ("argosy run -n 4 --threads 2 --min 3 --spares 1 train.py -- --resume /old 'a b'",
         "argosy run -n 4 --threads 2 --min 3 --spares 1 train.py -- 'a b' --resume /r"),
        ("argosy run -n 2 --restart 0 --no-warm -m json.tool", "argosy run -n 2 --restart 0 --no-warm -m json.tool -- --resume /r"),
        ("argosy run --restart 7 --preload json,re --cpus 0.5 --memory 1G train.py",
         f"argosy run --cpus 0.5 --memory {1 << 30} --restart 7 --preload json,re train.py -- --resume /r"),
        ("argosy run --set lr=3 train.py", "argosy run train.py -- --resume /r"),
    ],
)  # fmt: skip
def test_a_typed_run_is_gone_on_with_by_the_same_line(typed, line, resumed):
    roles = typed(line)
    assert resume_command(submitted(**roles), next(iter(roles)), "/r") == resumed
    (name,) = again = typed(resumed)
    for role in (roles[name], again[name]):
        for key in ("arguments", "command", "env"):
            role.pop(key, None)
    assert again == roles


@pytest.mark.parametrize(
    "roles",
    [
        {"train": {"script": "a.py"}, "web": {"command": ["web"]}},
        {"train": {"script": "a.py", "ports": {"http": 0}}},
        {"train": {"script": "a.py", "env": {"LEVEL": "3"}}},
        {"train": {"script": "a.py", "secrets": ["TOKEN"]}},
        {"train": {"command": ["sh", "-c", "python a.py"]}},
        {"train": {"command": ["bash", "-lc", "python a.py"]}},
    ],
)
def test_what_only_a_spec_can_say_is_said_in_words(roles):
    assert resume_command(submitted(**roles), "train", "/r") is None
    words = how_to_go_on(submitted(**roles), "train", "/r")
    assert "--resume /r among the arguments of train" in words
    assert "argosy run" not in words


def test_a_member_of_an_array_is_gone_on_with_in_words():
    fact = {**submitted(train={"script": "a.py"}), "array_index": 3}
    assert resume_command(fact, "train", "/r") is None


def test_a_submission_that_is_not_known_is_no_command():
    assert resume_command({}, "train", "/r") is None


def test_a_gang_that_was_resized_is_gone_on_with_at_its_size(typed):
    fact = submitted(**typed("argosy run train.py -n 4"))
    assert resume_command(fact, "train", "/r", size=6) == "argosy run -n 6 train.py -- --resume /r"
    assert "-n 6 " in how_to_go_on(fact, "train", "/r", size=6)
