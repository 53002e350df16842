"""A GPT's gradients summed over torch.distributed have the bits of the shared exchange: sums, norms and terms of the loss."""

import hashlib
import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch._inductor  # what deterministic algorithms import, once for all forks
import torch.distributed as dist
from torch.nn import functional

from argosy.models import GPT
from argosy.move import exchange, groups, remote
from argosy.move.layout import Layout, Parameter
from argosy.move.rounds import Round
from argosy.train.lanes import WHOLE, Lanes
from argosy.train.shares import lanes_of, parameters_of

pytestmark = pytest.mark.multiprocess

LANES, LENGTH, VOCABULARY = 5, 16, 64


def batch_of(lane):
    made = torch.Generator().manual_seed(lane)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=made)
    return SimpleNamespace(tokens=tokens[:, :-1], labels=tokens[:, 1:])


def loss(model, batch):
    logits = model(batch.tokens).flatten(0, 1) * model.factors.mean().float()
    summed = functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
    return summed, batch.labels.numel()


def sums(rank, size, make):
    """Two rounds of a GPT's lanes; by page a digest of the sum and its part of the norm, of this rank's pages."""
    torch.manual_seed(5)
    torch.use_deterministic_algorithms(True)
    model = GPT.of_depth(1, vocab_size=VOCABULARY, sequence_length=LENGTH)
    model.factors = torch.nn.Parameter(torch.rand(70_000, dtype=torch.float64))
    trained = dict(model.named_parameters())
    sizes = {name: parameter.numel() for name, parameter in trained.items()}
    layout = Layout(
        num_lanes=LANES,
        most_ranks=size,
        parameters=tuple(
            Parameter(name=n, numel=p.numel(), is_double=p.dtype == torch.float64)
            for n, p in trained.items()
        ),
        terms=(WHOLE, "loss"),
    )
    shared = make("gpt", layout)
    shared.enter(1, rank, dict.fromkeys(range(size), -1), deadline=time.monotonic() + 60)
    lanes = Lanes(model, trained, layout, seed=3, is_exact=True)
    mine = [p for name in parameters_of(rank, size, sizes) for p in layout.pages_of(name)]
    found = {"pages": {}, "votes": [], "terms": []}
    for step in range(2):
        round, deadline = Round(0, step), time.monotonic() + 60
        own = lanes_of(rank, size, LANES)
        for node in layout.blocks(own.start, len(own)):
            claim = shared.claim(round, node)
            touched, terms = lanes.compute(claim, step, loss, batch_of, None)
            shared.publish(claim, touched=touched, terms=terms)
        gathered = shared.wait_lanes(round, deadline=deadline)
        out = torch.zeros(layout.num_elements)
        partials = shared.reduce(gathered, mine, out)
        for page, partial in zip(mine, partials, strict=True):
            data = out[slice(*layout.bounds(page))].numpy().tobytes()
            found["pages"][f"{step}:{page}"] = [hashlib.sha256(data).hexdigest(), partial.hex()]
        shared.vote(round, mine, partials)
        votes = shared.wait_votes(round, deadline=deadline)
        found["votes"].append([vote.hex() for vote in votes])
        found["terms"].append({n: [t.hex(), c] for n, (t, c) in gathered.terms.items()})
        shared.wait_read(round, deadline=deadline)
    assert set(gathered.touched) == set(trained)
    return found


def test_sums_of_a_gpts_gradients_have_the_bits_of_the_shared_exchange(forked):
    def local(rank, _):
        torch.set_num_threads(1)
        return sums(rank, 1, exchange.open)

    def join(size, backend):
        def prepare(rank, directory):
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            os.environ["ARGOSY_LOCALITY"] = "left" if rank < (size + 1) // 2 else "right"
            store = dist.FileStore(str(directory / "store"), size)
            seconds = timedelta(seconds=60)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=seconds
            )

        return prepare

    (alone,) = forked(1, local, lambda *_: None, "alone")
    assert "result" in alone, alone
    expected = alone["result"]
    assert len(expected["pages"]) > 4
    assert expected["terms"][0] == expected["terms"][1], "the weights have not changed"
    # Gloo alone, and the argosy backend with the ranks on two pretended hosts: 2 + 1 and 2 + 2.
    for size, backend in ((2, "gloo"), (3, groups.NAME), (4, groups.NAME)):
        said = forked(
            size,
            lambda rank, _, n=size: sums(rank, n, remote.open),
            join(size, backend),
            f"{size} ranks",
        )
        assert all("result" in one for one in said), said
        pages = {page: bits for one in said for page, bits in one["result"]["pages"].items()}
        assert pages == expected["pages"]
        for one in said:
            assert one["result"]["votes"] == expected["votes"]
            assert one["result"]["terms"] == expected["terms"]
