"""What is no tensor survives JSON, and nothing else gets in."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint import trees
from argosy.errors import CheckpointDamaged, ConfigError

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.complex_numbers(allow_nan=False, allow_infinity=False),
)
KEYS = st.one_of(st.text(max_size=6), st.sampled_from(["$tuple", "$items", "$"]), st.integers())
TREES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=20,
)


def nothing(path, value):
    return None


def fetch(word, name):
    raise AssertionError(name)


@settings(max_examples=40, deadline=None)
@given(TREES)
def test_values_come_back_equal_with_their_types(value):
    data = trees.write({"v": trees.encode(value, nothing)})
    found = trees.decode(trees.read(data, "x")["v"], fetch)
    assert found == value
    assert repr(found) == repr(value)


def test_floats_that_json_lacks_come_back():
    tree = json.loads(
        json.dumps(trees.encode([math.nan, math.inf, -math.inf], nothing), allow_nan=False)
    )
    found = trees.decode(tree, fetch)
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


def test_leaves_are_stored_under_their_path():
    seen = {}

    def store(path, value):
        seen[path] = value
        return {"$bytes": path}

    tree = trees.encode({"a": [b"x", {"b": b"y"}]}, store, "key")
    assert seen == {"key/a/0": b"x", "key/a/1/b": b"y"}
    assert trees.decode(tree, lambda word, name: seen[name]) == {"a": [b"x", {"b": b"y"}]}


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, {object(): 1}])
def test_what_has_no_plain_form_is_refused_with_its_place(value):
    with pytest.raises(ConfigError, match="run/x"):
        trees.encode({"x": value}, nothing, "run")


def test_a_value_without_end_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="nested deeper"):
        trees.encode(endless, nothing, "v")


@pytest.mark.parametrize("data", [b"", b"[1]", b"{", b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}"])
def test_what_is_no_object_is_refused(data):
    with pytest.raises(CheckpointDamaged):
        trees.read(data, "extra.json")


@pytest.mark.parametrize("tree", [{"$new": 1}, {"$float": []}, {"$items": 3}, {"$tensor": 4}])
def test_unknown_words_are_refused(tree):
    with pytest.raises((CheckpointDamaged, ConfigError)):
        trees.decode(tree, fetch)
