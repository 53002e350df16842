"""A run writes down under which name peers have its checkpoints: once, and nobody else's."""

import json
import os
import threading

import pytest

from argosy.checkpoint import Peers
from argosy.checkpoint.peers import notes
from argosy.errors import ConfigError, HomeError


def peers(**more):
    return Peers(**{"hosts": ("a", "b"), "host": "a"} | more)


def test_the_first_name_stays_and_the_newest_settings_are_noted(tmp_path):
    assert notes.noted(tmp_path) is None
    first = notes.note(peers(), tmp_path)
    assert first.run.startswith(f"{tmp_path}#")
    again = notes.note(peers(hosts=("a", "b", "c"), every=5), tmp_path)
    assert (again.run, again.every) == (first.run, 5)
    assert notes.noted(tmp_path) == again
    assert os.listdir(tmp_path) == [notes.NOTE]


def test_a_new_run_in_a_directory_of_the_same_name_is_another(tmp_path):
    first = notes.note(peers(), tmp_path / "run")
    (tmp_path / "run" / notes.NOTE).unlink()
    assert notes.note(peers(), tmp_path / "run").run != first.run


def test_a_name_that_is_told_is_taken(tmp_path):
    notes.note(peers(), tmp_path)
    assert notes.note(peers(run="mine"), tmp_path).run == "mine"
    assert notes.note(peers(), tmp_path).run == "mine"


def test_ranks_that_begin_at_once_have_one_name(tmp_path):
    names, barrier = [], threading.Barrier(8)

    def begin():
        barrier.wait(20)
        names.append(notes.note(peers(), tmp_path).run)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(names) == 8
    assert set(names) == {notes.noted(tmp_path).run}


@pytest.mark.parametrize("text", ["", "[]", '{"hosts": 5}', '{"hosts": ["a"], "host": "a"}'])
def test_a_note_that_makes_no_sense_is_refused_by_its_path(tmp_path, text):
    (tmp_path / notes.NOTE).write_text(text)
    with pytest.raises(ConfigError):
        notes.noted(tmp_path)


def test_a_note_that_a_later_version_has_written_is_read(tmp_path):
    known = {"hosts": ["a", "b"], "host": "a", "run": "mine", "unheard": 1}
    (tmp_path / notes.NOTE).write_text(json.dumps(known))
    assert notes.noted(tmp_path).run == "mine"


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match="cannot be written"):
        notes.note(peers(), tmp_path / "file")
