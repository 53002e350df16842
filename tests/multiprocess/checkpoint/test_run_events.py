"""What becomes of saves stands among the events of the run, of a trainer's and of a script's own; one that fails is a warning there, and training goes on."""

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


ALONE = """
import sys

import torch
import torch.distributed as dist

import argosy as ar

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
with ar.checkpoint.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, {"model": model})
    checkpointer.save(2, {"model": model}, wait=False).wait()
    shape = (4, 1) if dist.get_rank() == 0 else (2, 1)
    try:
        checkpointer.save(3, {"model": {"weight": torch.zeros(shape)}})
    except ar.errors.ArgosyError as failure:
        print("refused", failure)
dist.destroy_process_group()
"""


def notes_of(argosy, run, level):
    notes = [fact for fact in argosy.facts(run) if fact["kind"] == "note"]
    return [fact["text"] for fact in notes if fact.get("level", "info") == level]


def test_saves_of_a_script_are_events_of_its_run(argosy, tmp_path):
    script = argosy.script("alone.py", ALONE)
    run = argosy.detach("-n", "2", script, "--", tmp_path / "store")
    ended = argosy.wait_ended(run)
    assert ended["outcome"] == "succeeded", argosy("why", run).stdout
    told = [text.partition(" after ")[0] for text in notes_of(argosy, run, "info")]
    assert told == ["step 1 is durable", "step 2 is durable"]
    warned = notes_of(argosy, run, "warning")
    assert 1 <= len(warned) <= 2
    assert all(text.startswith("step 3 was not saved: ") for text in warned)
    assert "shape" in warned[0]


def test_saves_are_events_of_the_run_and_one_that_fails_is_a_warning(argosy):
    run = argosy.detach("-n", "2", argosy.script("trains.py", TRAINS))
    ended = argosy.wait_ended(run)
    assert ended["outcome"] == "succeeded", argosy("why", run).stdout
    told = notes_of(argosy, run, "info")
    for step in (2, 6, 7):
        assert any(text.startswith(f"step {step} is durable after ") for text in told), told
    (warned,) = notes_of(argosy, run, "warning")
    assert warned.startswith("step 4 was not saved: ")
    assert "never overwritten" in warned
    assert {2, 6, 7} <= set(Listing(f"{ended['directory']}/checkpoints").steps())
