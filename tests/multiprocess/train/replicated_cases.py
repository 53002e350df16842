"""Updates that user code makes itself, on private parameters: sharpness-aware, quasi-Newton, plain; with deaths in the middle."""

import json
import os
import time

import household_cases
import torch
from household_cases import Numbers, die_at
from model_cases import adamw, classify, network
from torch import nn

from argosy.errors import ConfigError

STEPS = 5


def trainer_of(run, **given):
    return run.trainer(
        **{
            "model": network(nn.Dropout(0.2)),
            "data": Numbers(),
            "loss": classify,
            "batch_size": 32,
            "lanes": 8,
            "layout": "replicated",
            **given,
        }
    )


def momentum(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def summary(trainer, losses):
    values = {name: p.detach().tolist() for name, p in trainer.model.named_parameters()}
    return {"digest": trainer.digest(), "losses": losses, "values": values}


# --- plain ----------------------------------------------------------------------------------------


def plain(run, optimizer=momentum, die=None, **given):
    trainer = trainer_of(run, optimizer=optimizer, clip=1.0, **given)
    losses = []
    for step in trainer.steps(STEPS):
        found = step.gradients()
        if die is not None:
            die_at(run, die)
        trainer.optimizer.step()
        result = step.commit()
        assert (result.loss, result.gradient_norm) == (found.loss, found.gradient_norm)
        losses.append([result.loss, result.gradient_norm, result.tokens])
    return summary(trainer, losses)


def sgd(run):
    return plain(run, model=network(nn.BatchNorm1d(16), nn.Dropout(0.2)))


def adam(run):
    return plain(run, adamw)


def half(run):
    """A module in another dtype than the slots for gradients."""

    def loss(model, batch):
        logits = model(batch.inputs.bfloat16()).float()
        return nn.functional.cross_entropy(logits, batch.labels, reduction="sum"), len(batch.labels)

    return plain(run, adamw, model=network().bfloat16(), loss=loss)


def adam_shared(run):
    """The same by the trainer's own update."""
    trainer = trainer_of(run, optimizer=adamw, clip=1.0, layout="shared")
    losses = []
    for step in trainer.steps(STEPS):
        result = step()
        losses.append([result.loss, result.gradient_norm, result.tokens])
    return summary(trainer, losses)


def by_hand(run):
    """Noise from the default generators is the same on every rank; state of one's own lives in run.state."""
    trainer = trainer_of(run)
    for step in trainer.steps(STEPS):
        step.gradients()
        rate = 0.1 / (1 + run.state.get("steps", 0))
        with torch.no_grad():
            for p in trainer.model.parameters():
                p -= rate * (p.grad + 0.01 * torch.randn_like(p))
        run.state["steps"] = run.state.get("steps", 0) + 1
        step.commit()
    found = trainer.evaluate(Numbers(64, seed=2))
    return {**summary(trainer, []), "evaluated": found}


# --- several gradients in a step ------------------------------------------------------------------


def sharpness_aware(run, die=None, rank=1, steps=STEPS):
    trainer = trainer_of(run, optimizer=momentum)
    parameters = list(trainer.model.parameters())
    losses = []
    for step in trainer.steps(steps):
        if die is not None:
            let_join(run, step.index > die[0])
        first = step.gradients()
        moves = [0.05 * p.grad / first.gradient_norm for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)

        def loss(model, batch, step=step):
            if die is not None and batch.lane == die[1] and run.gang.rank == rank:
                die_at(run, die[0], rank=rank)
            return classify(model, batch)

        second = step.gradients(loss)
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        trainer.optimizer.step()
        assert step.commit().loss == first.loss
        losses.append([first.loss, second.loss])
    return summary(trainer, losses)


def sharpness_aware_killed(run):
    """In the middle of a step whose weights no version has."""
    found = sharpness_aware(run, die=(1, 4), steps=STEPS * 2)
    return {**found, "is_joined": (run.directory / "joined").exists()}


def sharpness_aware_long(run):
    return sharpness_aware(run, steps=STEPS * 2)


def let_join(run, is_due):
    """The replacement says that it is in the loop; the others give it time before each step until it is."""
    joined = run.directory / "joined"
    if not household_cases.is_first_life:
        joined.touch()
    deadline = time.monotonic() + 3.0
    while is_due and not joined.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def quasi_newton(run, die=None, steps=STEPS, is_saved=False):
    """Calls the closure several times in a step, and keeps lists that grow."""
    trainer = trainer_of(
        run, optimizer=lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=3, history_size=4)
    )
    losses = []
    for step in trainer.steps(steps):
        if die is not None:
            let_join(run, step.index > die)
        calls = []

        def closure(step=step, calls=calls):
            calls.append(step.gradients().loss)
            if die is not None and len(calls) == 2:
                die_at(run, die)
            return calls[-1]

        trainer.optimizer.step(closure)
        step.commit()
        losses.append(calls)
    if is_saved:
        trainer.parts.save()
    return summary(trainer, losses)


def quasi_newton_long(run):
    return quasi_newton(run, steps=STEPS * 2)


def quasi_newton_killed(run):
    found = quasi_newton(run, die=2, steps=STEPS * 2)
    return {**found, "is_joined": (run.directory / "joined").exists()}


def quasi_newton_resumed(run):
    """From what the other world size has saved after half of the steps."""
    run.resume_from = min(run.directory.parent.glob("*-quasi_newton_saved"))
    return quasi_newton(run, steps=STEPS * 2)


def quasi_newton_saved(run):
    return quasi_newton(run, is_saved=True)


def logged_killed(run):
    """The lowest rank dies; its replacement has the number before it takes part."""
    trainer = trainer_of(run, optimizer=momentum)
    for step in trainer.steps(STEPS * 2):
        let_join(run, step.index > 2)
        step.gradients()
        die_at(run, 2, rank=0)
        trainer.optimizer.step()
        run.log(loss=step.commit().loss)
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return {"steps": [json.loads(line)["step"] for line in lines]}


# --- bad numbers and bad use ----------------------------------------------------------------------


def not_finite(run):
    """Batch 2 is poisoned: its step leaves everything as it was."""

    def loss(model, batch):
        total, count = classify(model, batch)
        return total * (float("nan") if batch.index == 2 else 1.0), count

    trainer = trainer_of(run, optimizer=adamw, loss=loss)
    flags, digests = [], []
    for step in trainer.steps(STEPS):
        found = step.gradients()
        trainer.optimizer.step()
        flags.append([found.is_skipped, step.commit().is_skipped])
        digests.append(trainer.digest())
    return {"flags": flags, "digests": digests}


def private_noise(run):
    """What only one process knows comes into the weights."""
    trainer = trainer_of(run, optimizer=momentum)
    for step in trainer.steps(STEPS):
        step.gradients()
        with torch.no_grad():
            trainer.model[0].bias.add_(os.getpid() * 1e-6)
        step.commit()


def misused(run):
    said = []

    def note(call):
        try:
            call()
        except ConfigError as error:
            said.append(str(error))

    for given in ({"ema": 0.9}, {"schedule": lambda step: 1.0}, {"precision": "bfloat16"}):
        note(lambda given=given: trainer_of(run, **given))
    trainer = trainer_of(run, optimizer=momentum)
    for step in trainer.steps(1):
        note(step)
        note(step.commit)
        note(lambda: trainer.edit().__enter__())
        step.gradients()
        step.commit()
        note(step.gradients)
    return {"said": said}


def gradients_of_shared(run):
    for step in trainer_of(run, optimizer=momentum, layout="shared").steps(1):
        step.gradients()
