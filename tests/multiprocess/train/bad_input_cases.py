"""Programs that are wrong in one way each; what they are told is compared in test_bad_input.py."""

import os
import shutil
from pathlib import Path

import numpy as np
import torch
from household_cases import WIDTH, Numbers
from model_cases import adamw, classify, network, train
from torch import nn
from torch.nn import functional

import argosy as ar
from argosy.move import hostmemory
from argosy.train import fingerprint

# --- arguments ------------------------------------------------------------------------------------


def indivisible(run):
    train(run, network(), batch_size=30)


def no_batch_size(run):
    run.trainer(model=network(), data=Numbers(), loss=classify, optimizer=adamw)


def second_trainer(run):
    train(run, network())
    train(run, network())


def lanes_as_text(run):
    train(run, network(), lanes="8")


def two_lanes(run):
    train(run, network(), batch_size=4, lanes=2)


def misspelt(run):
    train(run, network(), batchsize=4)


def made_optimizer(run):
    model = network()
    train(run, model, optimizer=torch.optim.AdamW(model.parameters()))


def no_module(run):
    train(run, lambda inputs: inputs)


def loss_is_no_function(run):
    train(run, network(), loss=torch.tensor(1.0))


def too_large(run):
    hostmemory.available_bytes = lambda: hostmemory.MARGIN_BYTES + (2 << 20)
    train(run, nn.Sequential(network(), nn.Linear(4, 50_000), nn.Linear(50_000, 4)))


# --- models and losses ----------------------------------------------------------------------------


def complex_parameter(run):
    model = network()
    model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    train(run, model)


def nothing_to_train(run):
    train(run, network().requires_grad_(False))


def no_count(run):
    train(run, network(), loss=lambda model, batch: classify(model, batch)[0])


def count_is_no_number(run):
    train(run, network(), loss=lambda model, batch: (classify(model, batch)[0], None))


def not_summed(run):
    def loss(model, batch):
        each = functional.cross_entropy(model(batch.inputs), batch.labels, reduction="none")
        return each, len(each)

    train(run, network(), loss=loss)


def detached(run):
    train(run, network(), loss=lambda model, batch: (classify(model, batch)[0].detach(), 4))


class Table(nn.Module):
    def __init__(self, *, is_sparse):
        super().__init__()
        self.table = nn.Embedding(12, WIDTH, sparse=is_sparse)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, inputs):
        rows = inputs[:, 0].mul(4).long().remainder(12)
        return self.head(self.table(rows) + inputs)


def sparse(run):
    return train(run, Table(is_sparse=True))


def dense(run):
    return train(run, Table(is_sparse=False))


# --- what ranks cannot see of each other ----------------------------------------------------------


def private_noise(run):
    """Noise from a generator that nobody seeds: found by the audit, on one rank too."""
    own = torch.Generator()
    own.manual_seed(os.getpid())

    def loss(model, batch):
        noise = torch.rand(batch.inputs.shape, generator=own)
        logits = model(batch.inputs + noise)
        return functional.cross_entropy(logits, batch.labels, reduction="sum"), len(logits)

    train(run, network(), loss=loss)


def private_start(run):
    model = network()
    own = torch.Generator().manual_seed(os.getpid())
    with torch.no_grad():
        model[2].weight.copy_(torch.rand(model[2].weight.shape, generator=own))
    train(run, model)


def changed_outside(run):
    def change(trainer, step):
        if step.index == 1:
            with torch.no_grad():
                trainer.model[0].weight.mul_(0.5)

    train(run, network(), before=change)


def no_rate(run):
    train(run, network(), schedule=lambda step: float("nan") if step == 2 else 1.0)


def cast(run):
    train(run, network(), before=lambda trainer, step: step.index and trainer.model.double())


def assigned(run):
    def assign(trainer, step):
        if step.index:
            trainer.model.load_state_dict(network().state_dict(), assign=True)

    train(run, network(), before=assign)


def assigned_to_a_replica(run):
    trainer = run.trainer(
        model=network(),
        data=Numbers(),
        loss=classify,
        optimizer=adamw,
        batch_size=32,
        layout="replicated",
    )
    for step in trainer.steps(2):
        trainer.model.load_state_dict(network().state_dict(), assign=True)
        step.gradients()
        step.commit()


def changed_and_saved(run):
    changed_outside(run)


class Counting(nn.Module):
    """Begins to count rows in a buffer only after a while."""

    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, inputs):
        return self.inner(inputs)


def named_without_count(run):
    train(run, network(), loss=lambda model, batch: {"loss": classify(model, batch)[0]})


def late_buffer(run):
    def loss(model, batch):
        if batch.index >= 2:
            model.rows += len(batch.labels)
        return classify(model, batch)

    train(run, Counting(), loss=loss)


def many_optimizers(run):
    train(run, network(), optimizer={str(number): adamw for number in range(17)})


# --- data -----------------------------------------------------------------------------------------


def short_data(run):
    trainer = run.trainer(
        model=network(), data=Numbers(16), loss=classify, optimizer=adamw, batch_size=32
    )
    next(trainer.steps(1))()


def no_data_set(run):
    run.trainer(model=network(), data="code.bin", loss=classify, optimizer=adamw, batch_size=32)


def write_tokens(path, dtype="uint16", count=4096, seed=0):
    made = np.random.default_rng(seed)
    made.integers(0, 200, count).astype(dtype).tofile(path)
    return path


class Letters(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        return self.head(self.table(tokens))


def predict(model, batch):
    logits = model(batch.tokens).flatten(0, 1)
    summed = functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
    return summed, batch.labels.numel()


def letters(run, data, steps=3, before=None, **given):
    trainer = run.trainer(
        model=Letters(),
        data=data,
        loss=predict,
        optimizer=adamw,
        **{"batch_size": 8, "lanes": 4, **given},
    )
    for step in trainer.steps(steps):
        if before is not None:
            before(trainer, step)
        step()
    return trainer


def wide_tokens(run):
    path = write_tokens(run.directory / "wide.bin", "uint32")
    letters(run, ar.data.Tokens(path, dtype="uint16", sequence_length=16))


def odd_bytes(run):
    path = run.directory / "odd.bin"
    path.write_bytes(b"\1\0" * 400 + b"\1")
    letters(run, ar.data.Tokens(path, dtype="uint16", sequence_length=16))


def no_dtype(run):
    path = write_tokens(run.directory / "bare.bin")
    letters(run, ar.data.Tokens(path, sequence_length=16))


def tokens_change(run):
    """The file is written again while the run goes on."""
    path = run.directory / "changing.bin"
    if run.gang.rank == 0 and not path.exists():
        write_tokens(path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        pass

    def change(trainer, step):
        if step.index == 2 and run.gang.rank == 0:
            others = write_tokens(path.with_suffix(".others"), seed=1).read_bytes()
            with path.open(
                "r+b"
            ) as file:  # not cut first: a rank that reads just then would be killed
                file.write(others)

    letters(run, ar.data.Tokens(path, dtype="uint16", sequence_length=16), steps=40, before=change)


# --- resumes --------------------------------------------------------------------------------------


def saved(run):
    """What the resumes below begin from."""
    path = write_tokens(run.directory / "code.bin")
    trainer = letters(run, ar.data.Tokens(path, dtype="uint16", sequence_length=16))
    trainer.parts.save()
    return {"digest": trainer.digest(), "save": str(run.directory)}


def resume(run, *, data=None, **given):
    before = min(run.directory.parent.glob("*-saved"))
    run.resume_from = before
    data = data or ar.data.Tokens(before / "code.bin", dtype="uint16", sequence_length=16)
    return {"digest": letters(run, data, **given).digest()}


def resumed(run):
    return resume(run)


def resumed_with_other_data(run):
    path = write_tokens(run.directory / "other.bin", seed=5)
    resume(run, data=ar.data.Tokens(path, dtype="uint16", sequence_length=16))


def resumed_with_changed_data(run):
    """The same name, other tokens."""
    path = write_tokens(run.directory / "code.bin", seed=5)
    resume(run, data=ar.data.Tokens(path, dtype="uint16", sequence_length=16))


def resumed_with_other_batches(run):
    path = min(run.directory.parent.glob("*-saved")) / "code.bin"
    data = ar.data.Tokens(path, dtype="uint16", sequence_length=8)
    resume(run, data=data, batch_size=16)


def resumed_without_data(run):
    run.resume_from = min(run.directory.parent.glob("*-saved"))
    letters(run, None)


def resumed_with_other_lanes(run):
    resume(run, lanes=8)


def resume_another(run, model, optimizer=adamw, **given):
    before = min(run.directory.parent.glob("*-saved"))
    run.resume_from = before
    trainer = run.trainer(
        model=model,
        data=ar.data.Tokens(before / "code.bin", dtype="uint16", sequence_length=16),
        loss=predict,
        optimizer=optimizer,
        batch_size=8,
        lanes=4,
        **given,
    )
    next(trainer.steps(9))


def resumed_with_other_model(run):
    resume_another(run, Letters(width=4))


def resumed_with_other_optimizer(run):
    resume_another(run, Letters(), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))


def resumed_with_frozen(run):
    model = Letters()
    next(model.parameters()).requires_grad_(False)
    resume_another(run, model)


def resumed_with_averages(run):
    resume_another(run, Letters(), ema=0.9)


def resumed_replicated(run):
    resume_another(run, Letters(), layout="replicated")


def resumed_elsewhere(run):
    """Under another numerics fingerprint."""
    take = fingerprint.take
    fingerprint.take = lambda **given: {**take(**given), "capability": "AVX1024"}
    resume(run)


def resumed_elsewhere_with_consent(run):
    take = fingerprint.take
    fingerprint.take = lambda **given: {**take(**given), "capability": "AVX1024"}
    return resume(run, allow_drift=True)


def resumed_from_nothing(run):
    run.resume_from = run.directory
    letters(
        run,
        ar.data.Tokens(
            write_tokens(run.directory / "code.bin"), dtype="uint16", sequence_length=16
        ),
    )


def copy_of_save(run):
    source = min(run.directory.parent.glob("*-saved"))
    return shutil.copytree(source, run.directory / "copy")


def resumed_from_damage(run, damage=None):
    """A copy of the save, with one byte turned or cut short."""
    copied = copy_of_save(run)
    (tensors,) = copied.rglob("model-*.safetensors")
    whole = bytearray(tensors.read_bytes())
    if damage == "cut":
        del whole[-100:]
    else:
        whole[-9] ^= 64
    tensors.write_bytes(whole)
    run.resume_from = copied
    letters(run, ar.data.Tokens(copied / "code.bin", dtype="uint16", sequence_length=16))


def resumed_from_cut(run):
    resumed_from_damage(run, "cut")


def resumed_from_no_record(run):
    copied = copy_of_save(run)
    (record,) = copied.rglob("MANIFEST.json")
    record.write_text("{")
    run.resume_from = copied
    letters(run, ar.data.Tokens(copied / "code.bin", dtype="uint16", sequence_length=16))


# --- user code that raises ------------------------------------------------------------------------


def raises_in_a_lane(run):
    """Whoever computes lane 5 of step 2."""

    def loss(model, batch):
        if (batch.index, batch.lane) == (2, 5):
            raise ValueError("label 11 is out of range")
        return classify(model, batch)

    train(run, network(), loss=loss)


def raises_on_one_rank(run):
    if run.gang.rank == 1:
        Path("there/is/no/such/file").read_text()
    train(run, network())


def never_counted(run):
    guard = ar.Guard(policy="stop")
    train(run, network(), loss=lambda m, b: (classify(m, b)[0], 0), guard=guard)


def always_uncounted(run):
    train(run, network(), loss=lambda m, b: (classify(m, b)[0], 0), steps=20)


def uncounted_now_and_then(run):
    digests = {}

    def loss(model, batch):
        total, count = classify(model, batch)
        return total, 0 if batch.index == 2 else count

    def note(trainer, step):
        digests[step.index] = trainer.digest()

    found = train(run, network(), loss=loss, before=note)
    return {"digest": found["digest"], "is_left_as_it_was": digests[2] == digests[3]}


def never_finite(run):
    guard = ar.Guard(policy="stop")
    train(run, network(), loss=lambda m, b: (classify(m, b)[0] * float("nan"), 4), guard=guard)


def raises_in_the_optimizer(run):
    class Picky(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            Picky.steps += 1
            if Picky.steps > 12:
                raise ValueError("the optimizer has had enough")
            return super().step(closure)

    train(run, network(), optimizer=lambda params: Picky(params, lr=0.1), steps=40)
