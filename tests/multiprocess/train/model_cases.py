"""Kinds of models, losses and optimizers that must come to the same bits at every world size."""

import torch
from household_cases import WIDTH, Numbers, die_at
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from argosy import data

STEPS = 4


def classify(model, batch):
    return functional.cross_entropy(model(batch.inputs), batch.labels, reduction="sum"), len(
        batch.labels
    )


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def network(*middle):
    return nn.Sequential(nn.Linear(WIDTH, 16), *middle, nn.Tanh(), nn.Linear(16, 4))


def train(run, model, *, loss=classify, optimizer=adamw, steps=STEPS, before=None, **given):
    trainer = run.trainer(
        model=model,
        data=Numbers(),
        loss=loss,
        optimizer=optimizer,
        **{"batch_size": 32, "lanes": 8, **given},
    )
    results = []
    for step in trainer.steps(steps):
        if before is not None:
            before(trainer, step)
        results.append(step())
    return {
        "digest": trainer.digest(),
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "terms": results[-1].terms if results else {},
    }


def plain(run):
    return train(run, network())


def bfloat16(run):
    def loss(model, batch):
        logits = model(batch.inputs.bfloat16()).float()
        return functional.cross_entropy(logits, batch.labels, reduction="sum"), len(batch.labels)

    return train(run, network(), loss=loss, precision="bfloat16")


class Kinds(nn.Module):
    """Frozen and tied weights, low-rank adapters, batch statistics, a sparse table, layers computed again in backward."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8, sparse=True)
        self.base = nn.Linear(WIDTH, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.kept = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())
        self.again = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())
        self.turn = nn.Linear(8, 8, bias=False)
        self.back = nn.Linear(8, 8, bias=False)
        self.back.weight = self.turn.weight
        self.head = nn.Linear(8, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        found = self.base(inputs) + self.up(self.down(inputs))
        found = self.norm(found + self.table((inputs.abs() * 4).long().clamp(max=11)).mean(1))
        found = checkpoint(self.kept, found, use_reentrant=False)
        # Twice: its gradient comes in two pieces.
        found = checkpoint(self.again, found, use_reentrant=True)
        found = checkpoint(self.again, found, use_reentrant=True)
        return self.head(self.back(self.turn(found)))


def kinds(run):
    model = Kinds()
    before = model.base.weight.clone()

    def loss(model, batch):
        model.zero_grad()  # a habit that must not cost the sibling's gradient
        return classify(model, batch)

    found = train(
        run,
        model,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params.decayed(0.1), lr=1e-2),
    )
    return {
        **found,
        "is_kept": torch.equal(before, model.base.weight),
        "is_tied": model.back.weight is model.turn.weight,
        "num_batches": int(model.norm.num_batches_tracked),
        "has_statistics": bool(model.norm.running_mean.abs().sum() > 0),
    }


def empty_lanes(run, nothing=lambda loss: (torch.zeros(()), 0)):
    """Lanes in which there is nothing to learn from: one in every step, all of them in one."""

    def loss(model, batch):
        is_empty = batch.lane == batch.index or batch.index == 2
        found = classify(model, batch)
        return nothing(found[0]) if is_empty else found

    return train(run, network(), loss=loss)


def empty_lanes_by_hand(run):
    return empty_lanes(run, lambda loss: (loss * 0.0, 0))


def positive(batch):
    return {"main": len(batch.labels), "side": int((batch.inputs[:, 0] > 0).sum())}


def named_terms(run):
    def loss(model, batch):
        logits = model(batch.inputs)
        counts = positive(batch)
        kept = logits[batch.inputs[:, 0] > 0]
        return {
            "main": (
                functional.cross_entropy(logits, batch.labels, reduction="sum"),
                counts["main"],
            ),
            "side": (kept.square().mean(1).sum(), counts["side"], 0.5),
        }

    return train(run, network(), loss=loss, terms=("main", "side"), counts=positive)


def named_terms_by_hand(run):
    """The same by hand, on whole batches: the loss and the norm of the first gradient."""
    model = network()
    feed = data.as_source(Numbers()).feed(batch_size=32, lanes=8, seed=run.seed)
    batches = [feed.batch(0, lane) for lane in range(8)]
    inputs = torch.cat([batch.inputs for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    logits = model(inputs)
    loss = (
        functional.cross_entropy(logits, labels)
        + 0.5 * logits[inputs[:, 0] > 0].square().mean(1).mean()
    )
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    return {"loss": loss.item(), "norm": norm.item()}


def compiled(run):
    def evaluate(trainer, step):
        if step.index == 1:  # batches of other shapes, in other numbers on each rank
            trainer.evaluate(Numbers(41, seed=2))

    return train(run, torch.compile(network(nn.Dropout(0.1))), steps=3, before=evaluate)


# --- several optimizers ---------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(WIDTH, WIDTH)
        self.d = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def judge(model, batch):
    made = model.g(batch.inputs).detach()
    real, false = model.d(batch.inputs), model.d(made)
    return functional.softplus(-real).sum() + functional.softplus(false).sum(), len(real)


def cheat(model, batch):
    return functional.softplus(-model.d(model.g(batch.inputs))).sum(), len(batch.inputs)


def adversaries(run, die=False):
    def judge_and_die(model, batch):
        if die and batch.lane == 3:
            die_at(run, 2)
        return judge(model, batch)

    def cheat_and_die(model, batch):
        if die and batch.lane == 5:
            die_at(run, 4, rank=2)
        return cheat(model, batch)

    trainer = run.trainer(
        model=Pair(),
        data=Numbers(),
        loss=judge,
        optimizer={
            "d": lambda params: torch.optim.AdamW(
                params.where(lambda n, _: n.startswith("d.")), lr=1e-2
            ),
            "g": lambda params: torch.optim.SGD(
                params.where(lambda n, _: n.startswith("g.")), lr=1e-2, momentum=0.9
            ),
        },
        batch_size=32,
        lanes=8,
        clip=0.5,
    )
    losses = []
    for step in trainer.steps(6):
        step.update(judge_and_die, optimizer="d")
        step.update(cheat_and_die, optimizer="g")
        losses.append(step.commit().loss)
    return {"digest": trainer.digest(), "losses": losses}


def adversaries_killed(run):
    return adversaries(run, die=True)


OPTIMIZERS = {
    name: getattr(torch.optim, name)
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam",
        "RAdam", "RMSprop", "Rprop", "SGD",
    )
}  # fmt: skip


def every_optimizer(run):
    """One matrix and one optimizer of each class, all in one step."""
    model = nn.ModuleDict({name: nn.Linear(WIDTH, 4, bias=False) for name in OPTIMIZERS})

    def loss_of(name):
        return lambda model, batch: classify(model[name], batch)

    trainer = run.trainer(
        model=model,
        data=Numbers(),
        loss=classify,
        optimizer={
            name: lambda params, name=name, kind=kind: kind(
                params.where(lambda each, _: each.startswith(f"{name}.")), lr=1e-2
            )
            for name, kind in OPTIMIZERS.items()
        },
        batch_size=16,
        lanes=4,
    )
    for step in trainer.steps(3):
        for name in OPTIMIZERS:
            step.update(loss_of(name), optimizer=name)
        step.commit()
    return {"digest": trainer.digest()}
