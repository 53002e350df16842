"""Evaluations, edits, averages, fed batches and rewinds, with deaths in the middle."""

import json
import os
import time

import torch
from household_cases import WIDTH, Numbers, die_at
from model_cases import Pair, adamw, cheat, classify, judge, network
from torch import nn
from torch.nn import functional

import argosy as ar
from argosy.errors import ConfigError
from argosy.train import feeding


def trainer_of(run, **given):
    return run.trainer(
        **{
            "model": network(nn.Dropout(0.1)),
            "data": Numbers(),
            "loss": classify,
            "optimizer": adamw,
            "batch_size": 32,
            "lanes": 8,
            **given,
        }
    )


def accuracy(model, batch):
    logits = model(batch.inputs)
    return {
        "loss": (functional.cross_entropy(logits, batch.labels, reduction="sum"), len(logits)),
        "accuracy": (int((logits.argmax(1) == batch.labels).sum()), len(logits)),
    }


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(run, die=False):
    held = Numbers(256, seed=2)
    trainer = trainer_of(run, model=network(nn.BatchNorm1d(16), nn.Dropout(0.5)))
    found = [trainer.evaluate(held)]

    def count_and_die(model, batch):
        if die and batch.index == 1:  # in the middle of whatever lane it has taken
            die_at(run, 2, rank=1, last=4)
        return accuracy(model, batch)

    for step in trainer.steps(5):
        step()
        found.append(trainer.evaluate(held, count_and_die))
    found.append(trainer.evaluate(held, batches=3))
    trainer.model.eval()
    with torch.no_grad():
        by_hand = accuracy(trainer.model, ByHand(held))
    return {
        "found": found,
        "digest": trainer.digest(),
        "by_hand": [float(by_hand["accuracy"][0]) / 256, float(by_hand["loss"][0]) / 256],
    }


def frozen_statistics(run):
    """A part that user code keeps in evaluation mode stays in it, whatever else is done with the model."""
    model = network(nn.BatchNorm1d(16), nn.Dropout(0.5))
    model[1].eval()
    before = model[1].running_mean.clone()
    trainer = trainer_of(run, model=model)
    for step in trainer.steps(3):
        step()
        trainer.evaluate(Numbers(256, seed=2))
        if trainer.is_first:
            model.eval()  # to draw a sample, say
    return {
        "digest": trainer.digest(),
        "is_kept": torch.equal(before, model[1].running_mean),
    }


def evaluate_all(run):
    """Sets that do not fill a last batch, or not even one."""
    trainer = trainer_of(run)
    for step in trainer.steps(2):
        step()
    sizes = 251, 40, 20, 9
    found = {size: trainer.evaluate(Numbers(size, seed=2), accuracy) for size in sizes}
    trainer.model.eval()
    with torch.no_grad():
        by_hand = {size: accuracy(trainer.model, ByHand(Numbers(size, seed=2))) for size in sizes}
    return {
        "found": [found[size] for size in sizes],
        "by_hand": [
            {name: float(total) / count for name, (total, count) in by_hand[size].items()}
            for size in sizes
        ],
    }


class ByHand:
    def __init__(self, held):
        self.inputs, self.labels = held.inputs, held.labels


def evaluate_killed(run):
    return evaluate(run, die=True)


def evaluate_before_steps(run, die=False):
    """A rank that joins comes to evaluations before its first step, and the others have done them."""
    held = Numbers(256, seed=2)
    trainer = trainer_of(run)
    found = []
    for step in trainer.steps(6):
        found.append(trainer.evaluate(held, accuracy))
        if die:
            die_at(run, 2, rank=2)
        step()
        found.append(trainer.evaluate(held, accuracy, batches=4))
    return {"found": found, "digest": trainer.digest()}


def evaluate_before_steps_killed(run):
    return evaluate_before_steps(run, die=True)


def evaluate_wrongly(run):
    trainer = trainer_of(run)
    try:
        trainer.evaluate(Numbers(256), lambda model, batch: model(batch.inputs).mean())
    except ConfigError as error:
        return {"said": str(error)}


# --- data -----------------------------------------------------------------------------------------


class Slow(Numbers):
    """Storage that lets one rank wait for a sample, once, much longer than a step takes."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __getitem__(self, number):
        mark = self.run.directory / "waited"
        if self.run.step == 4 and self.run.gang.rank == 1 and not mark.exists():
            mark.touch()
            time.sleep(3.0)
        return super().__getitem__(number)


def slow_batch(run):
    trainer = trainer_of(run, data=Slow(run), hang_seconds=0.1)
    for step in trainer.steps(6):
        step()
    return {"digest": trainer.digest(), "has_waited": (run.directory / "waited").exists()}


def large_state_killed(run):
    """As much as there may be, of what takes most room, from before the first step on; and many terms of the loss."""
    names = [f"term-{number}" for number in range(32)]

    def loss(model, batch):
        total, count = classify(model, batch)
        return {name: (total / len(names), count) for name in names}

    trainer = trainer_of(
        run,
        loss=loss,
        terms=tuple(names),
        counts=lambda batch: dict.fromkeys(names, len(batch.labels)),
    )
    run.state["text"] = '"' * 32_000
    run.state["steps"] = 0
    for step in trainer.steps(3):
        run.state["steps"] += 1
        die_at(run, 1)
        assert sorted(step().terms) == sorted(names)
    return {"size": len(run.state["text"]), "steps": run.state["steps"]}


# --- edits ----------------------------------------------------------------------------------------


def edit(run, die=False):
    trainer = trainer_of(run)
    losses = []
    for step in trainer.steps(6):
        if step.index in (2, 4):
            with trainer.edit() as params:
                if die and step.index == 2:
                    die_at(run, 2, rank=1)
                params["0.weight"].add_(torch.randn_like(params["0.weight"]) * 0.01)
            if die and step.index == 4:
                die_at(run, 4, rank=2)
            with trainer.edit() as params:
                for value in params.values():
                    value.mul_(0.5)
        losses.append(step().loss)
    return {"digest": trainer.digest(), "losses": losses}


def edit_killed(run):
    return edit(run, die=True)


def edit_halves(run):
    """By how much the weights change, and that nothing but them does."""
    trainer = trainer_of(run)
    for step in trainer.steps(2):
        if step.index == 1:
            before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
            steps = trainer.parts.committed.ledger["step"]
            with trainer.edit() as params:
                for value in params.values():
                    value.mul_(0.5)
            is_halved = all(
                torch.equal(p, before[n] * 0.5) for n, p in trainer.model.named_parameters()
            )
            is_same_step = trainer.parts.committed.ledger["step"] == steps == step.index
        step()
    said = []
    for outside in (lambda: trainer.edit().__enter__(), lambda: trainer.weights("ema").__enter__()):
        try:
            outside()
        except ConfigError as error:
            said.append(str(error))
    return {"is_halved": is_halved, "is_same_step": is_same_step, "said": said}


def change_outside(run):
    trainer = trainer_of(run)
    for step in trainer.steps(2):
        if step.index == 1 and run.gang.rank == 0:
            with torch.no_grad():
                trainer.model[0].bias.mul_(0.5)
        step()


def change_data_outside(run):
    trainer = trainer_of(run)
    for step in trainer.steps(2):
        if step.index == 1:
            trainer.model[0].weight.data.clamp_(-0.01, 0.01)
        step()


# --- averages -------------------------------------------------------------------------------------


def averages(run):
    trainer = trainer_of(run, ema=0.75, precision="float32")
    names = dict(trainer.model.named_parameters())
    expected = {name: p.detach().clone() for name, p in names.items()}
    held = Numbers(256, seed=2)
    for step in trainer.steps(5):
        step()
        for name, value in expected.items():
            expected[name] = torch.lerp(value, names[name].detach(), 0.25)
    live = {name: p.detach().clone() for name, p in names.items()}
    first = trainer.evaluate(held)["loss"]
    with trainer.weights("ema"):
        is_equal = all(torch.equal(p, expected[name]) for name, p in names.items())
        averaged = trainer.evaluate(held)["loss"]
    is_back = all(torch.equal(p, live[name]) for name, p in names.items())
    for step in trainer.steps(6):
        step()
    return {
        "is_equal": is_equal,
        "is_back": is_back,
        "differ": averaged != first,
        "evaluated": [first, averaged],
        "digest": trainer.digest(),
    }


# --- fed batches ----------------------------------------------------------------------------------


def feed(run, die=False, replay=None):
    """Batches that come from the model and from something that never repeats."""
    trainer = trainer_of(run, data=None, model=network(nn.Dropout(0.3)))
    losses = []
    for step in trainer.steps(5):

        def produce(lane, step=step):
            if replay is not None:
                return feeding.read(replay, step.index, lane)
            noise = torch.tensor([hash((time.time_ns(), os.getpid())) % 1000 / 1000.0])
            inputs = torch.randn(4, WIDTH) + noise
            return {"inputs": inputs, "labels": trainer.model(inputs).argmax(1)}

        def loss(model, batch, step=step):
            found = classify(model, batch)
            if die and step.index == 2 and batch.lane == 5:
                die_at(run, 2, rank=1)
                die_at(run, 2, rank=2)
            return found

        step.feed(produce, record=True)
        step.update(loss)
        losses.append(step.commit().loss)
    return {"digest": trainer.digest(), "losses": losses, "directory": str(run.directory)}


def feed_killed(run):
    """Some lanes are computed again by others; then the run is repeated from what was recorded."""
    return feed(run, die=True)


def feed_again(run):
    recorded = min(run.directory.parent.glob("*-feed_killed")) / "fed"
    return feed(run, replay=recorded)


def feed_nothing(run):
    trainer = trainer_of(run, data=None)
    for step in trainer.steps(1):
        step()


# --- rewinds --------------------------------------------------------------------------------------


def rewind(run, die=False, spike=None, is_forgotten=False):
    """Batch 5 is poisoned: its loss is not a number, or far too large."""
    bad = (5,) if spike is None else (20,)
    steps = 9 if spike is None else 24

    def loss(model, batch):
        total, count = classify(model, batch)
        if die and batch.index == bad[0] and batch.lane == 2:
            die_at(run, bad[0], rank=1)
        factor = 1.0 if batch.index not in bad else (float("nan") if spike is None else 1e3)
        return total * factor, count

    guard = ar.Guard(policy="rewind", snapshot_every=3, spike=spike, window=8)
    trainer = trainer_of(run, loss=loss, guard=guard)
    seen, flags = [], []
    for step in trainer.steps(steps):
        run.state["steps"] = run.state.get("steps", 0) + 1
        if is_forgotten and step.index == bad[0]:
            forget_snapshots(trainer)
        result = step()
        seen.append(step.index)
        flags.append([result.is_skipped, result.is_rewound])
        run.log(loss=result.loss)
    ledger = trainer.parts.committed.ledger
    return {
        "digest": trainer.digest(),
        "seen": seen,
        "omitted": ledger.get("omitted", []),
        "flags": flags,
        "state": run.state.get("steps"),
        "measured": steps_in(run.directory / "metrics.jsonl"),
        "superseded": steps_in(run.directory / "metrics.superseded.jsonl"),
    }


def steps_in(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def forget_snapshots(trainer):
    for owner, held in trainer.parts.state.pins().items():
        for version, _ in held:
            trainer.parts.state.unpin(version, owner=owner)


def rewind_without_snapshot(run):
    return rewind(run, spike=8.0, is_forgotten=True)


def rewind_killed(run):
    return rewind(run, die=True)


def rewind_spike(run):
    return rewind(run, spike=8.0)


def without_the_batch(run):
    """What a rewind must come to: the same training on data without batch 5."""
    trainer = trainer_of(run)
    trainer.parts.committed.ledger = {"step": 0, "omitted": [5]}
    for step in trainer.steps(9):
        step()
    return {"digest": trainer.digest()}


# --- rewinds of several updates, and of fed batches ---------------------------------------------------


def rewind_pair(run, bad=1, die=False, omitted=()):
    """Two optimizers; batch 5 is poisoned in one of the two losses."""

    def spoilt(loss, place):
        def call(model, batch):
            total, count = loss(model, batch)
            if die and batch.index == 5 and batch.lane == 2 and place == bad:
                die_at(run, 5, rank=1)
            return total * (float("nan") if (batch.index, place) == (5, bad) else 1.0), count

        return call

    trainer = trainer_of(
        run,
        model=Pair(),
        loss=judge,
        optimizer={"d": of_part("d."), "g": of_part("g.")},
        guard=ar.Guard(policy="rewind", snapshot_every=3, window=8),
    )
    if omitted:
        trainer.parts.committed.ledger = {"step": 0, "omitted": list(omitted)}
    seen = []
    for step in trainer.steps(8):
        step.update(spoilt(judge, 0), optimizer="d")
        step.update(spoilt(cheat, 1), optimizer="g")
        seen.append([step.index, step.commit().is_rewound])
    return {
        "digest": trainer.digest(),
        "seen": seen,
        "omitted": trainer.parts.committed.ledger.get("omitted", []),
    }


def of_part(prefix):
    return lambda params: torch.optim.AdamW(params.where(lambda n, _: n.startswith(prefix)), lr=0.1)


def rewind_first_of_pair(run):
    return rewind_pair(run, bad=0)


def rewind_pair_killed(run):
    return rewind_pair(run, die=True)


def pair_without_the_batch(run):
    return rewind_pair(run, bad=None, omitted=(5,))


def feed_counted(run, die=False, replay=None):
    """Named terms of fed batches, each with its own denominator; step 3's first batch is bad, and is made anew after a rewind."""

    def loss(model, batch):
        if die and batch.lane == 5:
            die_at(run, 1, rank=1)
        logits, chosen = model(batch.inputs), batch.inputs[:, 0] > 0
        summed = functional.cross_entropy(logits, batch.labels, reduction="sum")
        summed = summed * (float("nan") if batch.index == 3 and replay is None else 1.0)
        return {
            "main": (summed, len(logits)),
            "side": (logits[chosen].square().sum(), int(chosen.sum()), 0.5),
        }

    trainer = trainer_of(
        run,
        data=None,
        loss=loss,
        terms=("main", "side"),
        counts=lambda batch: {
            "main": len(batch.labels),
            "side": int((batch.inputs[:, 0] > 0).sum()),
        },
        guard=ar.Guard(policy="rewind", snapshot_every=2, window=8),
    )
    seen = []
    for step in trainer.steps(5):

        def produce(lane, step=step):
            if die and lane == 6:
                die_at(run, 4, rank=2)
            if replay is not None:
                return feeding.read(replay, step.index, lane)
            noise = torch.tensor([hash((time.time_ns(), os.getpid())) % 1000 / 1000.0])
            inputs = torch.randn(4 + lane % 3, WIDTH) + noise
            return {"inputs": inputs, "labels": trainer.model(inputs).argmax(1)}

        step.feed(produce, record=True)
        seen.append([step.index, step().is_rewound])
    return {"digest": trainer.digest(), "seen": seen}


def feed_counted_killed(run):
    return feed_counted(run, die=True)


def feed_counted_again(run):
    recorded = min(run.directory.parent.glob("*-feed_counted_killed")) / "fed"
    return feed_counted(run, replay=recorded)
