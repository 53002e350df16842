"""Spec files: every mistake is one error with its path in the file and a fix."""

import pytest

from argosy.config.files import load_spec, make_spec
from argosy.config.overrides import apply_overrides, parse_value
from argosy.errors import ConfigError

GOOD = """
name = "pipeline"
strategy = "rest_for_one"

[roles.web]
command = ["python3", "-m", "http.server"]
ports = { http = 0 }
ready = { port = "http", timeout_seconds = 5 }

[roles.train]
script = "train.py"
count = 4
gang = true
after_ready = ["web"]
"""


def write(tmp_path, text, name="job.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def refusal(tmp_path, text, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_spec(write(tmp_path, text), overrides)
    return caught.value


def test_a_file_becomes_a_spec(tmp_path):
    spec = load_spec(write(tmp_path, GOOD))
    assert spec.name == "pipeline"
    assert list(spec.roles) == ["web", "train"]
    assert spec.roles["web"].ready.port == "http"
    assert spec.roles["train"].count == 4


def test_a_run_without_a_name_is_named_after_its_file(tmp_path):
    spec = load_spec(write(tmp_path, '[roles.a]\ncommand = ["true"]', "my job.v2.toml"))
    assert spec.name == "my-job-v2"


def test_overrides_win_and_are_typed(tmp_path):
    overrides = [
        "roles.train.count=8",
        "roles.web.env.LEVEL=high",
        "roles.web.nice = 5",
        "name=two",
    ]
    spec = load_spec(write(tmp_path, GOOD), overrides)
    assert spec.roles["train"].count == 8
    assert spec.roles["web"].env == {"LEVEL": "high"}
    assert spec.roles["web"].nice == 5
    assert spec.name == "two"


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ('[roles.a]\ncomand = ["x"]', "unknown key `roles.a.comand`", "`command`"),
        ('nmae = "x"\n[roles.a]\ncommand=["x"]', "unknown key `nmae`", "`name`"),
        (
            '[roles.a]\ncommand = ["x"]\nready = { prot = "x" }',
            "unknown key `roles.a.ready.prot`",
            "`port`",
        ),
        (
            '[roles.a]\ncommand = ["x"]\n[roles.a.budget]\nusr = 1',
            "unknown key `roles.a.budget.usr`",
            "`user`",
        ),
        ('[roles.a]\ncommand = "x"', "at `roles.a.command`", "list"),
        (
            '[roles.a]\ncommand = ["x"]\ncount = "4"',
            "Expected `int`, got `str` at `roles.a.count`",
            "type",
        ),
        (
            '[roles.a]\ncommand = ["x"]\nrestart = "allways"',
            "at `roles.a.restart`",
            "permanent, transient, temporary",
        ),
        ('name = "x"', "there is no role", "[roles.main]"),
        ("roles = 3", "Expected `object`", "type"),
        ("[roles.a\n", "not valid TOML", "line"),
    ],
)
def test_a_mistake_names_its_place_and_the_mend(tmp_path, text, what, fix):
    error = refusal(tmp_path, text)
    assert what in error.what
    assert fix in error.fix


def test_an_override_with_an_unknown_key_names_the_nearest(tmp_path):
    error = refusal(tmp_path, GOOD, ["roles.train.cuont=3"])
    assert "`roles.train.cuont`" in error.what
    assert "`count`" in error.fix


@pytest.mark.parametrize(
    ("document", "fix"),
    [
        ('[roles.a]\ncmd = ["x"]', "`command`"),
        ('[roles.a]\ncommand = ["x"]\nreplicas = 3', "`count`"),
        ('[roles.a]\ncommand = ["x"]\ndepends_on = ["b"]', "`after`"),
        ('[roles.a]\ncommand = ["x"]\ngrace = 3', "`grace_seconds`"),
        ('[roles.a]\ncommand = ["x"]\n[roles.a.budget]\nuers = 3', "`user`"),
        ('count = 3\n[roles.a]\ncommand = ["x"]', "belongs to a role"),
        ('[roles.a]\ncommand = ["x"]\npriority = 3', "belongs to the run"),
        ('[train]\ncommand = ["x"]', "[roles.train]"),
        ('[role.a]\ncommand = ["x"]', "`roles`"),
    ],
)
def test_an_unknown_key_is_answered_with_what_was_meant(tmp_path, document, fix):
    assert fix in refusal(tmp_path, document).fix


def test_an_override_below_a_value_is_refused(tmp_path):
    error = refusal(tmp_path, GOOD, ["name.first=x"])
    assert "`name` is 'pipeline', not a table" in error.what


@pytest.mark.parametrize("text", ["count", "=4", "a..b=1", ""])
def test_an_override_that_is_no_assignment_is_refused(tmp_path, text):
    assert "is not key=value" in refusal(tmp_path, GOOD, [text]).what


def test_unreadable_files_are_refused_each_in_its_way(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_spec(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_spec(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"name = '\xff\xfe'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_spec(tmp_path / "binary.toml")


def test_applying_overrides_leaves_the_document_alone():
    document = {"roles": {"a": {"count": 1}}}
    changed = apply_overrides(document, ["roles.a.count=2"])
    assert (document["roles"]["a"]["count"], changed["roles"]["a"]["count"]) == (1, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("0.5", 0.5),
        ("true", True),
        ('["a"]', ["a"]),
        ("plain", "plain"),
        ("1\nx = 2", "1\nx = 2"),
        ("", ""),
    ],
)
def test_values_are_toml_or_text(text, value):
    assert parse_value(text) == value


def test_a_python_user_gets_the_same_errors():
    with pytest.raises(ConfigError, match=r"unknown key `roles\.a\.cmd`"):
        make_spec({"roles": {"a": {"cmd": ["x"]}}})
