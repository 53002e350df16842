"""What becomes of a trainer's saves stands among the events of its run; one that fails is a warning there, and training goes on."""

import pytest

from argosy.checkpoint.listings import Listing

pytestmark = pytest.mark.multiprocess

TRAINS = """
import torch
import argosy as ar


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        return {"x": torch.full((4,), float(place))}


def loss(model, batch):
    return model(batch.x).sum(), batch.x.shape[0]


def main(run):
    trainer = run.trainer(
        model=torch.nn.Linear(4, 1),
        data=Rows(),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
        batch_size=8,
        lanes=2,
        checkpoints=ar.Checkpoints(every=2, keep=ar.checkpoint.Keep(last=9)),
    )
    for step in trainer.steps(7):
        trainer.parts.saver.wait()  # one at a time, so that none is left out
        if step.index == 3:
            # A step that is there, and no checkpoint: its save is refused.
            (run.directory / "checkpoints" / "step-000000004").mkdir(exist_ok=True)
        step()


if __name__ == "__main__":
    ar.launch(main)
"""


def test_saves_are_events_of_the_run_and_one_that_fails_is_a_warning(argosy):
    run = argosy.detach("-n", "2", argosy.script("trains.py", TRAINS))
    ended = argosy.wait_ended(run)
    assert ended["outcome"] == "succeeded", argosy("why", run).stdout
    notes = [fact for fact in argosy.facts(run) if fact["kind"] == "note"]
    told = [fact["text"] for fact in notes if fact.get("level", "info") == "info"]
    for step in (2, 6, 7):
        assert any(text.startswith(f"step {step} is durable after ") for text in told), told
    (warned,) = [fact["text"] for fact in notes if fact.get("level") == "warning"]
    assert warned.startswith("step 4 was not saved: ")
    assert "never overwritten" in warned
    assert {2, 6, 7} <= set(Listing(f"{ended['directory']}/checkpoints").steps())
