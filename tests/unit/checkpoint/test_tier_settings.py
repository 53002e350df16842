"""What is said about object stores and peers is checked when it is said."""

import pytest

from argosy.checkpoint.peers.settings import Peers
from argosy.checkpoint.tiers.settings import Objects
from argosy.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every", 0),
        ("every_seconds", -1.0),
        ("bytes_per_second", -1.0),
        ("deadline_seconds", 0.0),
        ("files_at_once", 0),
    ],
)
def test_numbers_for_an_object_store_that_mean_nothing_are_named(name, value):
    with pytest.raises(ConfigError, match=name):
        Objects("file:///far", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group", 1),
        ("every", 0),
        ("keep", 0),
        ("every_seconds", -1.0),
        ("bytes_per_second", -1.0),
        ("memory_bytes", -1),
        ("linger_seconds", -1.0),
        ("deadline_seconds", 0.0),
        ("patience_seconds", 0.0),
    ],
)
def test_numbers_for_peers_that_mean_nothing_are_named(name, value):
    with pytest.raises(ConfigError, match=name):
        Peers(hosts=("a", "b"), host="a", **{name: value})
