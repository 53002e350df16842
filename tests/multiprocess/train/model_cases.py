"""Kinds of models, losses and optimizers that must come to the same bits at every world size."""

import torch
from household_cases import WIDTH, Numbers, die_at
from torch import nn
from torch.nn import functional

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


def plain_killed(run):
    return train(run, network(), before=lambda trainer, step: die_at(run, 2))


def frozen(run):
    model = network()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    before = model[0].weight.clone()
    found = train(run, model)
    return {**found, "is_kept": torch.equal(before, model[0].weight)}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, WIDTH, bias=False)
        self.head = nn.Linear(16, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs):
        return self.head(torch.tanh(inputs @ self.embed.weight))


def tied(run):
    return train(run, Tied())


def decay_groups(run):
    return train(
        run, network(), optimizer=lambda params: torch.optim.AdamW(params.decayed(0.1), lr=1e-2)
    )


def bfloat16(run):
    def loss(model, batch):
        logits = model(batch.inputs.bfloat16()).float()
        return functional.cross_entropy(logits, batch.labels, reduction="sum"), len(batch.labels)

    return train(run, network(), loss=loss, precision="bfloat16")


class Checkpointed(nn.Module):
    def __init__(self, *, is_reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Tanh())
        self.head = nn.Linear(16, 4)
        self.is_reentrant = is_reentrant

    def forward(self, inputs):
        inputs = inputs.requires_grad_(self.is_reentrant)
        return self.head(
            torch.utils.checkpoint.checkpoint(self.inner, inputs, use_reentrant=self.is_reentrant)
        )


def checkpointed(run):
    return train(run, Checkpointed(is_reentrant=False))


def checkpointed_reentrant(run):
    return train(run, Checkpointed(is_reentrant=True))


def batch_norm(run):
    model = network(nn.BatchNorm1d(16))
    found = train(run, model)
    return {
        **found,
        "mean": model[1].running_mean.tolist(),
        "count": int(model[1].num_batches_tracked),
    }


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.table((inputs.abs() * 4).long().clamp(max=11)).mean(1))


def sparse_embedding(run):
    return train(run, Bag())


def variable_counts(run):
    def loss(model, batch):
        kept = batch.inputs[:, 0] > 0
        return (
            functional.cross_entropy(
                model(batch.inputs)[kept], batch.labels[kept], reduction="sum"
            ),
            int(kept.sum()),
        )

    return train(run, network(), loss=loss)


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


def reference_of_named_terms():
    """The same by hand, on whole batches: the loss and the norm of the first gradient."""
    from argosy import data
    from argosy.train.seeds import seed_all

    seed_all(3)
    model = network()
    feed = data.as_source(Numbers()).feed(batch_size=32, lanes=8, seed=3)
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
    return loss.item(), norm.item()


def compiled(run):
    return train(run, torch.compile(network(nn.Dropout(0.1)), dynamic=False), steps=3)


# --- several optimizers ---------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(WIDTH, WIDTH)
        self.d = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def adversaries(run, die=False):
    def judge(model, batch):
        if die and batch.lane == 3:
            die_at(run, 2)
        made = model.g(batch.inputs).detach()
        real, false = model.d(batch.inputs), model.d(made)
        return functional.softplus(-real).sum() + functional.softplus(false).sum(), len(real)

    def cheat(model, batch):
        if die and batch.lane == 5:
            die_at(run, 4, rank=2)
        return functional.softplus(-model.d(model.g(batch.inputs))).sum(), len(batch.inputs)

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
        step.update(judge, optimizer="d")
        step.update(cheat, optimizer="g")
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
