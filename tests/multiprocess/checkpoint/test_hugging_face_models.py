"""What the trainer saves of a Hugging Face model is opened by its own library."""

import pytest
import torch

from argosy.checkpoint import Checkpointer

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

transformers = pytest.importorskip("transformers", reason="transformers is an optional dependency")

SAVES = """
import argosy as ar
import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"x": (torch.arange(8) + number) % 64}


def loss(model, batch):
    found = model(batch.x, use_cache=False).logits
    return found.square().sum(), batch.x.numel()


def main(run):
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    trainer = run.trainer(
        model=GPT2LMHeadModel(config),
        data=Counting(),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batch_size=16,
        lanes=2,
        checkpoints=ar.Checkpoints(every=2, attachments={"README.md": b"counts"}),
    )
    for step in trainer.steps(3):
        step()
        trainer.parts.saver.wait()


if __name__ == "__main__":
    ar.launch(main)
"""


def test_checkpoints_of_the_trainer_are_opened_by_from_pretrained_as_they_are(argosy):
    run = argosy.detach("-n", "2", argosy.script("saves.py", SAVES))
    ended = argosy.wait_ended(run)
    assert ended["outcome"] == "succeeded", argosy("why", run).stdout
    with Checkpointer(f"{ended['directory']}/checkpoints") as checkpointer:
        assert checkpointer.steps() == [2, 3], "one made on the way, one at the end"
        for step in checkpointer.steps():
            path = checkpointer.path / f"step-{step:09d}"
            assert (path / "README.md").read_bytes() == b"counts"
            model = transformers.GPT2LMHeadModel.from_pretrained(path)
            assert model.config.n_embd == 32
            with checkpointer.open(step) as opened:
                for name, found in model.named_parameters():
                    assert torch.equal(found, opened.tensor(name).read()), name
