"""What a trainer's parts do when the run is about to fail."""

from types import SimpleNamespace

import pytest

from argosy.train.parts import Parts


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_last_save_that_fails_for_lack_of_memory_does_not_hide_the_cause(error):
    def save():
        tried.append(error)
        raise error

    tried = []
    parts = SimpleNamespace(
        committed=SimpleNamespace(ledger={"step": 3}),
        _is_whole=True,
        saver=SimpleNamespace(save=save),
        _tell_saved=None,
    )
    Parts.save_at_once(parts)
    assert tried == [error]
