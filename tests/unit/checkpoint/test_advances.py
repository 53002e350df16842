"""What a save tells of itself while it goes on."""

import pytest
import torch

from argosy.checkpoint import Checkpointer, Writing
from argosy.checkpoint.events import Advance
from argosy.checkpoint.writer import pacing
from argosy.protocol.advances import describe_advance, describe_fact

BLOCK = 8 << 20


def test_a_save_tells_the_bytes_that_it_has_begun_and_how_many_there_will_be(tmp_path, monkeypatch):
    monkeypatch.setattr(pacing, "_NEWS_SECONDS", 0.0)
    told = []
    with Checkpointer(tmp_path, writing=Writing(threads=1)) as checkpointer:
        checkpointer.reports.watcher = told.append
        checkpointer.save(3, {"x": torch.zeros(3 * BLOCK // 4)})
    assert all(isinstance(each, Advance) for each in told)
    assert {(each.step, each.what) for each in told} == {(3, "written")}
    (total,) = {each.total_bytes for each in told}
    begun = [each.num_bytes for each in told]
    assert begun == sorted(set(begun)), "only more is told"
    assert 2 * BLOCK <= begun[-1] < total


@pytest.mark.parametrize(
    ("numbers", "what"),
    [
        ((1 << 20, 3 << 20, "written"), "saves step 8: 1.0 of 3.0 MiB written"),
        ((1 << 20, 0, "uploaded"), "saves step 8: 1.0 MiB uploaded"),
        ((1 << 29, 3 << 30, "written"), "saves step 8: 0.5 of 3.0 GiB written"),
    ],
)
def test_an_advance_is_described_with_its_share_if_that_is_known(numbers, what):
    assert describe_advance(8, *numbers) == what


def test_a_fact_of_which_defaults_were_left_out_is_described():
    assert describe_fact({"step": 8, "num_bytes": 0}) == "saves step 8: 0.0 MiB written"
