import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.errors import ConfigError
from argosy.worker.commandline import help_text, read_options
from argosy.worker.launch import launch
from argosy.worker.settings import (
    build_config,
    describe_fields,
    digest,
    flatten,
    parse_keys,
    to_plain,
)


@dataclass
class Optimizer:
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Config:
    depth: int = 8
    rate: float = 0.5
    name: str = "x"
    corpus: Path = Path("code.bin")
    stop_at: int | None = None
    is_tied: bool = True
    mode: Literal["exact", "fast"] = "exact"
    layers: list[int] = field(default_factory=lambda: [1, 2])
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=0.1))
    hook: object = None

    def __post_init__(self):
        if self.depth > 100:
            raise ValueError(f"depth = {self.depth} is too deep")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("depth=4", "depth", 4),
        ("depth = 4", "depth", 4),
        ("rate=3", "rate", 3.0),
        ("rate=.5", "rate", 0.5),
        ("rate=1e-3", "rate", 1e-3),
        ("name=4", "name", "4"),
        ("name=a=b", "name", "a=b"),
        ('name="quoted"', "name", "quoted"),
        ("name=None", "name", "None"),
        ("corpus=/data/x.bin", "corpus", Path("/data/x.bin")),
        ("stop_at=7", "stop_at", 7),
        ("stop_at=none", "stop_at", None),
        ("is_tied=false", "is_tied", False),
        ("is_tied=False", "is_tied", False),
        ("mode=fast", "mode", "fast"),
        ("layers=[3, 4, 5]", "layers", [3, 4, 5]),
    ],
)
def test_a_value_becomes_what_the_field_says(text, key, value):
    found = getattr(build_config(Config, [text]), key)
    assert found == value
    assert type(found) is type(value)


def test_nested_fields_keep_their_siblings_and_the_last_word_counts():
    made = build_config(
        Config, ["optimizer.betas=[0.8, 0.9]", "depth=2", "depth=3", "optimizer.betas=[0.7, 0.9]"]
    )
    assert made == Config(depth=3, optimizer=Optimizer(0.1, (0.7, 0.9)))


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("deph=4", "unknown key `deph`", "`depth`"),
        ("optimizer.lerning_rate=1", "unknown key `optimizer.lerning_rate`", "`learning_rate`"),
        ("depth=four", "--set depth=four: expected `int`, got `str`", "type int"),
        ("depth=1.5", "expected `int`, got `float`", "type int"),
        ("depth=true", "expected `int`, got `bool`", "type int"),
        ("mode=slow", "--set mode=slow: invalid enum value", "exact"),
        ("depth", "'depth' is not key=value", "--set depth=4"),
        ("depth.x=1", "`depth` has no fields: it is of type int", "--set depth=VALUE"),
        ("optimizer=adam", "`optimizer` is a group", "optimizer.learning_rate=VALUE"),
        ("depth=101", "refused by Config: depth = 101 is too deep", "change"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest(text, what, fix):
    with pytest.raises(ConfigError) as caught:
        build_config(Config, [text])
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_field_without_a_default_must_be_given():
    @dataclass
    class Strict:
        path: str

    with pytest.raises(ConfigError, match="`path` has no default") as caught:
        build_config(Strict, [])
    assert caught.value.fix == "--set path=VALUE"
    assert build_config(Strict, ["path=x"]).path == "x"


def test_a_config_that_is_no_dataclass_is_refused():
    with pytest.raises(ConfigError, match="is a dataclass, not"):
        build_config(dict, [])


def test_equal_configs_have_equal_digests_and_plain_forms_are_json():
    plain = to_plain(Config())
    assert json.loads(json.dumps(plain)) == plain
    assert digest(plain) == digest(dict(reversed(plain.items())))
    assert digest(plain) != digest(to_plain(Config(depth=9)))
    assert flatten(plain)["optimizer.learning_rate"] == 0.1
    assert parse_keys(["a.b = 3", "c=x.y=z"]) == ["a.b", "c"]


def test_help_lists_every_field_with_type_and_default():
    rows = describe_fields(Config)
    assert rows[0] == ("depth", "int", "8")
    assert ("optimizer.learning_rate", "float", "0.0003") in rows
    assert "optimizer.learning_rate" in help_text(Config)
    assert "--resume" in help_text(None)


@given(st.integers(), st.floats(allow_nan=False), st.text())
def test_any_number_and_text_is_read_back(depth, rate, name):
    quoted = json.dumps(name)
    made = build_config(Config, [f"stop_at={depth}", f"rate={rate!r}", f"name={quoted}"])
    assert (made.stop_at, made.rate) == (depth, rate)
    assert made.name in (name, quoted)


def test_options_are_read_in_every_spelling():
    words = ["-n", "4", "--threads=2", "--seed", "7", "--set", "a=1", "--set=b=2", "--name", "x"]
    found = read_options(words, {"ARGOSY_SET": '["c=3"]'})
    assert (found.ranks, found.threads, found.seed, found.name) == (4, 2, 7, "x")
    assert found.overrides == ["c=3", "a=1", "b=2"]
    assert read_options(["-n4"], {}).ranks == 4
    assert read_options(["--help"], {}).is_help


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--trheads", "2"], "unknown argument '--trheads'", "`--threads`"),
        (["depth=4"], "unknown argument 'depth=4'", "--set"),
        (["-n"], "-n needs a value", "--help"),
        (["-n", "0"], "-n 0 is not a whole number of at least 1", "-n 2"),
        (["-n", "two"], "-n two", "-n 2"),
        (["--seed", "-1"], "--seed -1", "--seed 1"),
        (["--directory="], "--directory is empty", "leave it out"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, what, fix):
    with pytest.raises(ConfigError) as caught:
        read_options(words, {})
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--depth", "4"], "did you mean --set depth=4?"),
        (["--depth=4"], "did you mean --set depth=4?"),
        (["--name", "x", "--stop-at", "7"], "did you mean --set stop_at=7?"),
        (["--optimizer.learning_rate", "0.1"], "did you mean --set optimizer.learning_rate=0.1?"),
        (["--corpus", "my file"], "did you mean --set 'corpus=my file'?"),
        (["--is-tied"], "did you mean --set is_tied=VALUE?"),
        (["--is-tied", "--seed", "1"], "did you mean --set is_tied=VALUE?"),
        (["--epochs", "4"], "see --help"),
    ],
)
def test_a_key_of_the_config_that_is_given_as_an_option_is_recognised(words, fix):
    with pytest.raises(ConfigError, match="unknown argument") as caught:
        read_options(words, {}, Config)
    assert caught.value.fix == fix


def test_a_spoilt_variable_of_the_run_is_named():
    with pytest.raises(ConfigError, match="ARGOSY_SET is not a JSON list"):
        read_options([], {"ARGOSY_SET": "{"})


def test_launch_tells_how_a_key_of_its_config_is_set(capsys):
    with pytest.raises(SystemExit) as caught:
        launch(lambda run, config: None, Config, ["--depth", "4"])
    assert caught.value.code == 64
    assert "did you mean --set depth=4?" in capsys.readouterr().err
