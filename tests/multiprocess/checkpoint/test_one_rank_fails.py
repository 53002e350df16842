"""What one of several ranks refuses, cannot do or does not live to do ends the wait of the others at once, and the next save or load works."""

import os
import re
import signal
from functools import partial

import pytest
import torch

from argosy.checkpoint import Checkpointer, commits, groups
from argosy.checkpoint.background import Background
from argosy.checkpoint.commits import Store
from argosy.errors import ArgosyError, HomeError

pytestmark = pytest.mark.multiprocess

WAYS = pytest.mark.parametrize("is_beside", [False, True], ids=["waiting", "beside training"])


def joined(path):
    """Waits that are not ended by anything would take longer than a test may."""
    return Checkpointer(path, group=groups.of_process(seconds=600))


def said_by(work):
    try:
        work()
    except ArgosyError as error:
        return f"{type(error).__name__}: {error.what}"
    return "done"


def save(checkpointer, step, is_beside, state=None, **more):
    model = torch.nn.Linear(4, 4)
    state = state or {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    if is_beside:
        return said_by(lambda: checkpointer.save(step, state, wait=False, **more).wait())
    return said_by(lambda: checkpointer.save(step, state, **more))


def results_of(found):
    return [one.get("result", one) for one in found]


@WAYS
def test_a_rank_that_refuses_its_first_save_and_does_not_come_again_is_heard(
    ranks, tmp_path, is_beside
):
    def body(rank):
        metrics = {"loss": "low" if rank else 1.0}
        return save(joined(tmp_path / "store"), 1, is_beside, metrics=metrics)

    first, second = results_of(ranks(2, body))
    assert second.startswith("ConfigError: the metric `loss`")
    assert first.startswith("PartnerRefused: rank 1 has failed: the metric")


@WAYS
def test_a_rank_that_cannot_open_the_store_ends_the_save_of_all(ranks, tmp_path, is_beside):
    def body(rank):
        checkpointer, opened = joined(tmp_path / "store"), Store.__init__

        def fails(*_, **__):
            raise HomeError("no such disk", fix="mount it")

        if rank == 1:
            Store.__init__ = fails
        said = [save(checkpointer, 1, is_beside)]
        Store.__init__ = opened
        return [*said, save(checkpointer, 2, is_beside)]

    first, second = results_of(ranks(2, body))
    assert second == ["HomeError: no such disk", "done"]
    assert first == ["PartnerRefused: rank 1 has failed: no such disk", "done"]


@WAYS
def test_a_rank_that_dies_before_it_has_said_anything_of_a_save_is_not_waited_for(
    ranks, tmp_path, is_beside
):
    def body(rank):
        checkpointer = joined(tmp_path / "store")
        said = [save(checkpointer, 1, is_beside)]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return [*said, save(checkpointer, 2, is_beside)]

    first, second = results_of(ranks(2, body))
    assert second == {"status": 9}
    assert first == ["done", "PartnerLost: rank 1 has ended before it had done its part"]
    assert not [name for name in os.listdir(tmp_path / "store") if name.startswith(".staging")]


def test_a_rank_that_dies_before_a_load_is_not_waited_for(ranks, tmp_path):
    def body(rank):
        checkpointer = joined(tmp_path / "store")
        said = [save(checkpointer, 1, False)]
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return [*said, said_by(lambda: checkpointer.load({"model": torch.nn.Linear(4, 4)}))]

    first, second = results_of(ranks(2, body))
    assert first == {"status": 9}
    assert second == ["done", "PartnerLost: rank 0 has ended before it had done its part"]


@WAYS
def test_ranks_that_save_different_steps_are_told_so(ranks, tmp_path, is_beside):
    def body(rank):
        checkpointer = joined(tmp_path / "store")
        return [save(checkpointer, 5 + rank, is_beside), save(checkpointer, 7, is_beside)]

    first, second = results_of(ranks(2, body))
    assert second == ["OtherStep: rank 1 saves step 6, rank 0 step 5", "done"]
    assert first == [
        "PartnerRefused: rank 1 has failed: rank 1 saves step 6, rank 0 step 5",
        "done",
    ]
    left = [name for name in os.listdir(tmp_path / "store") if re.match(r"step|\.staging", name)]
    assert left == ["step-000000007"]


def test_ranks_that_load_different_steps_are_told_so(ranks, tmp_path):
    def body(rank):
        checkpointer = joined(tmp_path / "store")
        said = [save(checkpointer, step, False) for step in (1, 2)]
        state = {"model": torch.nn.Linear(4, 4)}
        steps = (1 + rank, 2 if rank else None, 2)
        return said + [said_by(partial(checkpointer.load, state, step)) for step in steps]

    for one in results_of(ranks(2, body)):
        assert one[2] == "OtherStep: rank 1 loads step 2, rank 0 step 1"
        assert one[3] == "OtherStep: rank 1 loads step 2, rank 0 the newest step"
        assert one[4] == "done"


def test_a_directory_that_is_taken_away_before_a_rank_has_opened_it_is_a_partner_s_failure(
    ranks, tmp_path
):
    def body(rank):
        checkpointer, stage = joined(tmp_path / "store"), Store.stage

        def taken_away(store, step, nonce=None):
            raise FileNotFoundError(2, "No such file or directory", ".staging")

        if rank == 1:
            Store.stage = taken_away
        said = [save(checkpointer, 1, False, {"x": object()} if rank == 0 else {"x": 1})]
        Store.stage = stage
        return [*said, save(checkpointer, 2, False)]

    first, second = results_of(ranks(2, body))
    assert first[0].startswith("ConfigError: x is a object")
    assert re.match(r"Partner(Failed|Refused): ", second[0])
    assert first[1] == second[1] == "done"


def test_a_rank_that_dies_with_its_snapshot_is_raised_by_who_is_left(ranks, tmp_path):
    def body(rank):
        checkpointer = joined(tmp_path / "store")
        if rank == 1:
            Background._hand_over = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        handle = checkpointer.save(1, {"x": torch.ones(3)}, wait=False)
        handle.settle()
        return said_by(checkpointer.close)

    first, second = results_of(ranks(2, body))
    assert second == {"status": 9}
    assert first == "PartnerLost: rank 1 has ended before it had done its part"


def test_a_failure_of_one_rank_costs_the_save_that_it_is_raised_by_and_no_more(ranks, tmp_path):
    def body(rank):
        checkpointer, hand_over = joined(tmp_path / "store"), Background._hand_over

        def fails(*_):
            raise HomeError("the disk is gone", fix="mount it")

        said = []
        for step in range(1, 7):
            if rank == 1:
                Background._hand_over = fails if step == 2 else hand_over
            try:
                handle = checkpointer.save(step, {"x": torch.ones(3)}, wait=False)
            except ArgosyError as error:
                said.append(f"raised {type(error).__name__}")
                continue
            handle.settle()
            said.append(handle.stage if handle.error is None else type(handle.error).__name__)
        return said

    first, second = results_of(ranks(2, body))
    assert second == ["durable", "HomeError", "raised HomeError", "durable", "durable", "durable"]
    assert first[:2] == ["durable", "PartnerFailed"]
    assert first[2] in ("PartnerRefused", "raised PartnerRefused")
    assert first[3:] == ["durable"] * 3


def test_a_rank_s_own_lock_that_somebody_else_has_is_told_to_the_others(ranks, tmp_path):
    def body(rank):
        checkpointer = joined(tmp_path / "store")
        if rank == 0:
            other = commits.Store(tmp_path / "store")
            other.lock("other")
        said = [save(checkpointer, 1, True)]
        if rank == 0:
            other.close()
        return [*said, save(checkpointer, 2, True)]

    first, second = results_of(ranks(2, body))
    assert "is being saved into by" in first[0]
    assert "is being saved into by" in second[0]
    assert first[1] == second[1] == "done"
