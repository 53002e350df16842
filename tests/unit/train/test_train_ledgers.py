from hypothesis import given
from hypothesis import strategies as st

from argosy.train import ledgers
from argosy.train.guards import Guard, batch_of_step

indices = st.lists(st.integers(0, 60), max_size=20)


@given(indices, st.integers(1, 80))
def test_steps_read_every_batch_that_is_not_left_out_once_and_in_order(omitted, steps):
    found = [batch_of_step(step, omitted) for step in range(steps)]
    expected = [index for index in range(steps + len(omitted)) if index not in omitted][:steps]
    assert found == expected


@given(indices, st.integers(0, 60))
def test_leaving_out_a_batch_changes_no_step_before_it(omitted, more):
    for step in range(60):
        before = batch_of_step(step, omitted)
        if before < more:
            assert batch_of_step(step, [*omitted, more]) == before


def test_a_step_forgets_the_edits_before_it_and_remembers_its_loss():
    guard = Guard(spike=8.0, window=8)
    old = {"step": 4, "turn": 6, "edits": 2, "losses": [1.0] * 8, "state": "old"}
    outcome = {"verdict": "go", "loss": 2.0}
    new = ledgers.after_step(old, 4, {"state": "new"}, outcome, guard)
    assert new == {"step": 5, "turn": 7, "losses": [1.0] * 7 + [2.0], "state": "new"}


def test_a_skipped_step_is_counted_and_its_loss_is_not():
    new = ledgers.after_step({"step": 4}, 4, {}, {"verdict": "skip", "loss": 9.0}, Guard(spike=8.0))
    assert new == {"step": 5, "turn": 1, "skipped": [4]}
    assert ledgers.skips_within(new, 5, 8) == 1
    assert ledgers.skips_within(new, 12, 8) == 0


def test_a_rewind_goes_back_to_the_snapshot_and_forgets_neither_skips_nor_batches_left_out():
    snapshot = {"step": 3, "turn": 3, "omitted": [1], "state": "then", "losses": [1.0]}
    old = {"step": 7, "turn": 7, "omitted": [1, 9], "skipped": [2], "state": "now", "edits": 1}
    assert ledgers.after_rewind(old, snapshot, 7, 8) == {
        "step": 3,
        "turn": 8,
        "omitted": [1, 8, 9],
        "skipped": [2, 7],
        "rewinds": 1,
        "state": "then",
        "losses": [1.0],
    }
