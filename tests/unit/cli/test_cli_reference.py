"""docs/reference/cli.md is what --help says; the exit codes are those of the error classes."""

from pathlib import Path

import pytest

from argosy import errors
from argosy.cli.help import fold, overview, reference, verb_help
from argosy.cli.shapes import PROCESS_FIELDS, RUN_FIELDS, SHAPES
from argosy.cli.verbs import VERBS
from argosy.control.views import ProcessView, RunView

DOCS = Path(__file__).parents[3] / "docs" / "reference"


def test_the_reference_is_made_from_the_table():
    text = (DOCS / "cli.md").read_text()
    assert text == reference(), "run: python -m argosy.cli.help > docs/reference/cli.md"


def test_the_overview_names_every_verb():
    for verb in VERBS:
        assert f"  {verb.name} " in overview()


def test_the_overview_has_two_columns():
    rows = [line for line in overview().splitlines() if line.startswith("  ")]
    starts = [
        row.index(verb.summary)
        for verb in VERBS
        for row in rows
        if row.split("  ")[1] == verb.name and row.endswith(verb.summary)
    ]
    assert len(starts) == len(VERBS)
    assert len(set(starts)) == 1


@pytest.mark.parametrize("width", [40, 80, 132])
def test_help_is_folded_between_words_under_its_column(width):
    for text in (overview(), *map(verb_help, VERBS)):
        folded = fold(text, width)
        assert folded.split() == text.split()
        longest = max(map(len, text.split()))
        assert max(map(len, folded.splitlines())) <= max(width, width // 2 + longest)
        assert fold(text, 0) == fold(text, 1000) == text
    run = next(verb for verb in VERBS if verb.name == "run")
    assert f"\n{'':25}`main`\n" in fold(verb_help(run), 80)


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.ArgosyError)],
)
def test_every_error_class_is_in_the_table_of_exit_codes(kind):
    text = (DOCS / "exit-codes.md").read_text()
    assert f"`{kind.__name__}`" in text
    if kind is not errors.RunFailed:
        row = next(line for line in text.splitlines() if f"`{kind.__name__}`" in line)
        assert row.startswith(f"| {kind.exit_code} ")


def test_exit_codes_that_a_verb_names_in_its_help_are_in_the_table():
    rows = (DOCS / "exit-codes.md").read_text().splitlines()
    codes = {"doctor": "else 1", "status": "3 when there is none"}
    for verb in VERBS:
        if verb.name in codes:
            assert codes[verb.name] in verb.details
            code = next(word for word in codes[verb.name].split() if word.isdecimal())
            row = next(row for row in rows if f"| {code} |" in row)
            assert f"`{verb.name}`" in row


def test_the_shape_of_every_answer_in_json_is_described():
    assert list(SHAPES) == [v.name for v in VERBS if any(o.name == "json" for o in v.options)]
    assert RunView.__struct_fields__ == RUN_FIELDS
    assert ProcessView.__struct_fields__ == PROCESS_FIELDS
