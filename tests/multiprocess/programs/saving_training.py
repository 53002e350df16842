"""Trains a small model for STEPS steps with a save every third (EVERY), frozen layers, an average and a buffer that forward changes; prints the digest
of the state and of all numbers that the loop has drawn from the default generators, before and after each step.

LOG makes it log each loss, HOLD is a step after which it waits to be killed.
OBJECTS is the address of an object store, PEERS the directory of the sockets of hosts `a`, which this is, and `b`: every fifth step goes there.
"""

import hashlib
import os
import random
import time

import numpy as np
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


def drawn():
    return f"{random.random()} {np.random.rand()} {torch.rand(1).item()}"


def streams():
    kind, words, *rest = np.random.get_state()
    return f"{random.getstate()} {kind} {words.tolist()} {rest} {torch.get_rng_state().tolist()}"


def digest_of(*texts):
    return hashlib.sha256(" ".join(texts).encode()).hexdigest()


def main(run):
    url = os.environ.get("OBJECTS")
    objects = ar.checkpoint.Objects(url) if url else None
    sockets = os.environ.get("PEERS")
    peers = (
        ar.checkpoint.Peers(hosts=("a", "b"), host="a", every=5, keep=3, directory=sockets)
        if sockets
        else None
    )
    keep, every = ar.checkpoint.Keep(last=3), int(os.environ.get("EVERY", "3"))
    trainer = run.trainer(
        model=model(),
        data=Rows(),
        loss=loss,
        optimizer=optimizer,
        batch_size=16,
        lanes=4,
        ema=0.9,
        recovery=os.environ.get("RECOVERY", "on") == "on",
        checkpoints=ar.Checkpoints(every=every, keep=keep, objects=objects, peers=peers),
    )
    for step in trainer.steps(int(os.environ["STEPS"])):
        before = drawn()
        result = step()
        run.state["drawn"] = digest_of(run.state.get("drawn", ""), before, drawn())
        if "TALK" in os.environ:
            print(f"step {step.index} is done", flush=True)
        if "LOG" in os.environ:
            run.log(loss=result.loss)
        if step.index == int(os.environ.get("HOLD", "-1")):
            time.sleep(60)
        time.sleep(float(os.environ.get("PAUSE", "0")))
    if trainer.is_first:
        found = digest_of(trainer.digest(), run.state["drawn"], streams())
        print(f"digest {found}", flush=True)


if __name__ == "__main__":
    ar.launch(main)
