"""Trains a small model for STEPS steps with a save every third, frozen layers, an average and a buffer that forward changes; prints the digest."""

import os
import time

import torch

import argosy as ar


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, place):
        x = torch.randn(16, generator=torch.Generator().manual_seed(place))
        return {"x": x, "y": x[:4].sum()}


def model():
    found = torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        torch.nn.BatchNorm1d(32, momentum=0.5),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 32),
        torch.nn.Linear(32, 1),
    )
    found[3].requires_grad_(False)
    return found


def loss(model, batch):
    out = model(batch.x).squeeze(-1)
    return (out - batch.y).square().sum(), out.numel()


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def main(run):
    url = os.environ.get("OBJECTS")
    objects = ar.checkpoint.Objects(url) if url else None
    trainer = run.trainer(
        model=model(),
        data=Rows(),
        loss=loss,
        optimizer=optimizer,
        batch_size=16,
        lanes=4,
        ema=0.9,
        recovery=os.environ.get("RECOVERY", "on") == "on",
        checkpoints=ar.Checkpoints(every=3, keep=ar.checkpoint.Keep(last=3), objects=objects),
    )
    for step in trainer.steps(int(os.environ["STEPS"])):
        step()
        time.sleep(float(os.environ.get("PAUSE", "0")))
    if trainer.is_first:
        print(f"digest {trainer.digest()}", flush=True)


if __name__ == "__main__":
    ar.launch(main)
