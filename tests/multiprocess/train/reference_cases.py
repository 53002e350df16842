"""A model with everything that has misled an update before, trained here and by a plain loop of torch; and values that ranks agree on."""

import copy
import json
import os
import signal
import time

import torch
from household_cases import WIDTH, Numbers, die_at
from torch import nn
from torch.nn import functional

from argosy import data

STEPS, LANES, CLIP = 4, 8, 0.3


def classify(model, batch):
    logits = model(batch.inputs.to(next(model.parameters()).dtype))
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


def trainer_of(run, model=None, **given):
    return run.trainer(
        **{
            "model": model or nn.Linear(WIDTH, 4),
            "data": Numbers(),
            "loss": classify,
            "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
            "batch_size": 32,
            "lanes": LANES,
            **given,
        }
    )


def against_torch(run, dtype=torch.float32):
    model = make_model().to(dtype)
    other = copy.deepcopy(model)
    trainer = trainer_of(run, model, clip=CLIP)
    norms = [step().gradient_norm for step in trainer.steps(STEPS)]
    feed = data.as_source(Numbers()).feed(batch_size=32, lanes=LANES, seed=run.seed)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    wanted = reference(other, feed)
    return {
        "strides": list(model[0].weight.stride()),
        "norms": norms,
        "wanted": wanted,
        "difference": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "dtypes": sorted({str(tensor.dtype) for tensor in trainer.parts.committed.tensors}),
    }


def against_torch_in_double(run):
    return against_torch(run, torch.float64)


class Mixed(nn.Module):
    """Parameters of both kinds, more than a page of each, statistics in double, and one that is used in another dtype."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(WIDTH, 6000).double()
        self.norm = nn.BatchNorm1d(6000).double()
        self.narrow = nn.Linear(6000, 12)
        self.head = nn.Linear(12, 4).double()

    def forward(self, inputs):
        found = self.norm(self.wide(inputs.double()).tanh())
        return self.head(self.narrow(found.float()).double())


def doubles(run, **given):
    trainer = trainer_of(run, Mixed(), ema=0.5, lanes=5, batch_size=20, **given)
    losses = []
    for step in trainer.steps(4):
        if step.index == 1:
            with trainer.edit() as params:
                params["head.bias"].add_(1e-12)
        losses.append(step().loss)
    with trainer.weights("ema"):
        found = trainer.evaluate(Numbers(256, seed=2))
    return {"digest": trainer.digest(), "losses": losses, "found": found}


def doubles_in_place(run):
    return doubles(run, recovery=False)


def halved_doubles(run):
    """A model in double whose weights are halves: masters stay what the model was."""
    trainer = trainer_of(run, nn.Linear(WIDTH, 4).double(), precision="bfloat16")
    for step in trainer.steps(2):
        step()
    dtypes = {str(p.dtype) for p in trainer.model.parameters()}
    masters = {
        str(trainer.parts.committed.tensor(n).dtype) for n, _ in trainer.model.named_parameters()
    }
    return {"dtypes": sorted(dtypes), "masters": sorted(masters)}


def agreements(run):
    """Values agreed on before, between and after the pieces of a step, with an edit in the middle and a rank that dies; each rank leaves what it saw."""
    trainer = trainer_of(run)
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
    trainer = trainer_of(run)
    for step in trainer.steps(3):
        step.update()
        die_at(run, 2)
        step.commit()
    return {"steps": trainer.step}


# --- mode="fast" ------------------------------------------------------------------------------------


def fast(run, mode="fast", die=False):
    """Lanes of a rank are added up in one slot."""

    def loss(model, batch):
        if die and batch.lane == 3:
            die_at(run, 3)
        return classify(model, batch)

    trainer = trainer_of(run, make_model(), loss=loss, clip=CLIP, mode=mode)
    losses = [step().loss for step in trainer.steps(6)]
    return {"losses": losses, "slots": trainer.parts.exchange.statistics()["slots_used"]}


def fast_killed(run):
    return fast(run, die=True)


def exactly(run):
    return fast(run, mode="exact")


# --- recovery=False: state is updated in place ------------------------------------------------------


def kept(run, recovery=True, before=None, steps=6, **given):
    """Averages, an edit and an evaluation besides the steps."""
    trainer = trainer_of(
        run, make_model(), clip=CLIP, ema=0.75, recovery=recovery, schedule=shrink, **given
    )
    found = []
    for step in trainer.steps(steps):
        if step.index == 2:
            with trainer.edit() as params:
                params["3.weight"].mul_(0.5)
        if before is not None:
            before(step)
        found.append(step().loss)
        run.state["made"] = run.state.get("made", 0) + 1  # after the commit
    with trainer.weights("ema"):
        found.append(trainer.evaluate(Numbers(256, seed=2))["loss"])
    values, weights = trainer.parts.committed, trainer.parts.memories.weights.tensors
    is_shared = [values.tensor(n).data_ptr() == w.data_ptr() for n, w in weights.items()]
    return {
        "digest": trainer.digest(),
        "found": found,
        "in_place": is_shared,
        "slots": len(trainer.parts.memories._versions),
    }


def shrink(step):
    return 0.9**step


def in_place(run):
    return kept(run, recovery=False)


def own_updates(run, recovery=True):
    """Private parameters that user code updates, with a state of the optimizer that is committed as a whole."""
    trainer = trainer_of(run, make_model(), layout="replicated", recovery=recovery)
    for step in trainer.steps(4):
        step.gradients()
        trainer.optimizer.step()
        step.commit()
    return {"digest": trainer.digest()}


def in_place_own_updates(run):
    return own_updates(run, recovery=False)


def in_place_bad_steps(run, recovery=False):
    """A step that is not finite is computed twice and skipped; nothing of it is in the state."""

    def loss(model, batch):
        total, count = classify(model, batch)
        return total * (float("nan") if batch.index == 1 else 1.0), count

    return kept(run, recovery=recovery, loss=loss)


def kept_bad_steps(run):
    return in_place_bad_steps(run, recovery=True)


def in_place_lost(run):
    """A rank is killed between the two halves of a step."""
    trainer = trainer_of(run, recovery=False)
    for step in trainer.steps(5):
        step.update()
        die_at(run, 2)
        step.commit()


def in_place_alone(run):
    """The only one is killed, and starts again over what it had begun to change."""
    trainer = trainer_of(run, recovery=False)
    for step in trainer.steps(5):
        die_at(run, 2, rank=0)
        step()


def in_place_raises(run):
    def loss(model, batch):
        if (batch.index, batch.lane) == (2, 5):
            raise ValueError("label 11 is out of range")
        return classify(model, batch)

    for step in trainer_of(run, loss=loss, recovery=False).steps(5):
        step()


def in_place_stopped(run):
    """The whole household is asked to stop in the middle of a step."""

    def stop(step):
        if step.index == 3 and run.gang.rank == 1:
            os.kill(os.getppid(), signal.SIGTERM)

    return kept(run, recovery=False, before=stop, steps=500)


def in_place_resumed(run):
    """What was saved then, taken as far as `kept` goes."""
    run.resume_from = min(run.directory.parent.glob("*-in_place_stopped"))
    trainer = trainer_of(run, make_model(), clip=CLIP, ema=0.75, schedule=shrink, recovery=False)
    first, made = trainer.step, []
    for step in trainer.steps(first + 2):
        made.append(run.state.get("made"))
        step()
    return {"digest": trainer.digest(), "first": first, "made": made[0]}


def kept_as_long(run):
    """As many steps as that, in one go."""
    (save,) = min(run.directory.parent.glob("*-in_place_stopped")).glob("checkpoints/step-*")
    return kept(run, steps=int(save.name.rpartition("-")[2]) + 2)
