"""A model with everything that has misled an update before, trained here and by a plain loop of torch; and values that ranks agree on."""

import copy
import json
import os
import time

import torch
from household_cases import WIDTH, Numbers, die_at
from torch import nn
from torch.nn import functional

from argosy import data

STEPS, LANES, CLIP = 4, 8, 0.3


def classify(model, batch):
    logits = model(batch.inputs)
    return functional.cross_entropy(logits, batch.labels, reduction="sum"), len(batch.labels)


def make_model():
    """A matrix that lies in memory the other way round, and statistics, which travel with gradients but are none."""
    model = nn.Sequential(
        nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)
    )
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return model


def reference(model, feed):
    """The norms of the gradients of a plain loop over the same lanes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for index in range(STEPS):
        optimizer.zero_grad()
        count = 0
        for lane in range(LANES):
            total, size = classify(model, feed.batch(index, lane))
            total.backward()
            count += size
        for parameter in model.parameters():
            parameter.grad /= count
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return norms


def against_torch(run):
    model = make_model()
    other = copy.deepcopy(model)
    trainer = run.trainer(
        model=model,
        data=Numbers(),
        loss=classify,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batch_size=32,
        lanes=LANES,
        clip=CLIP,
    )
    norms = [step().gradient_norm for step in trainer.steps(STEPS)]
    feed = data.as_source(Numbers()).feed(batch_size=32, lanes=LANES, seed=run.seed)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    wanted = reference(other, feed)
    return {
        "strides": list(model[0].weight.stride()),
        "norms": norms,
        "wanted": wanted,
        "difference": max(float((a - b).detach().abs().max()) for a, b in pairs),
    }


def agreements(run):
    """Values agreed on before, between and after the pieces of a step, with an edit in the middle and a rank that dies; each rank leaves what it saw."""
    trainer = run.trainer(
        model=nn.Linear(WIDTH, 4),
        data=Numbers(),
        loss=classify,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
        batch_size=32,
        lanes=LANES,
    )
    for step in trainer.steps(8):
        die_at(run, 3)
        count = run.state.get("count", 0)
        own = [os.getpid(), step.index]
        seen = [step.agree([*own, "first"])]
        if step.index % 2:
            with trainer.edit() as params:
                params["bias"].add_(1.0)
        seen.append(step.agree([*own, "edited"]))
        step.update()
        time.sleep(0.002 * (os.getpid() % 5))  # ranks come to the next one at different times
        seen.append(step.agree([*own, "updated"]))
        step.commit()
        seen.append(step.agree([*own, "committed"]))
        run.state["count"] = count + 1  # after the commit: it belongs to the next turn
        path = run.directory / f"seen-{step.index}-{os.getpid()}.json"
        path.write_text(json.dumps({"agreed": seen, "count": count}))
    return {"directory": str(run.directory)}


def death_at_the_end(run):
    """The others have finished and gone before the replacement of one that died in the last step is there."""
    trainer = run.trainer(
        model=nn.Linear(WIDTH, 4),
        data=Numbers(),
        loss=classify,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
        batch_size=32,
        lanes=LANES,
    )
    for step in trainer.steps(3):
        step.update()
        die_at(run, 2)
        step.commit()
    return {"steps": trainer.step}
