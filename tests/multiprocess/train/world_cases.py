"""A GPT of the smallest kind on tokens, for comparing world sizes and ways of adding."""

import contextlib
import os

import numpy as np
import torch
from torch.nn import functional

import argosy as ar
from argosy.move import kernels

LENGTH, STEPS = 24, 6


def predict(model, batch):
    logits = model(batch.tokens).flatten(0, 1)
    summed = functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
    return summed, batch.labels.numel()


def tokens(run):
    """The same in every process and every case."""
    path = run.directory.parent / "tokens.bin"
    if not path.exists():
        beside = path.with_name(f"tokens.{os.getpid()}")
        np.random.default_rng(3).integers(0, 64, 8192).astype("uint16").tofile(beside)
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
        beside.unlink()
    return ar.data.Tokens(path, dtype="uint16", sequence_length=LENGTH)


def gpt(run):
    model = ar.models.GPT.of_depth(1, vocab_size=64, sequence_length=LENGTH)
    trainer = run.trainer(
        model=model,
        data=tokens(run),
        loss=predict,
        optimizer=lambda params: torch.optim.AdamW(params.decayed(0.1), lr=1e-3, fused=True),
        batch_size=16,
        lanes=8,
        clip=1.0,
    )
    results = [step() for step in trainer.steps(STEPS)]
    return {
        "digest": trainer.digest(),
        "losses": [result.loss.hex() for result in results],
        "norms": [result.gradient_norm.hex() for result in results],
        "kernels": kernels.path(),
    }
