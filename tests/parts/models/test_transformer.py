"""The model: what it computes, how it starts, and that it stays a plain module."""

import math

import pytest
import torch
from torch.nn import functional

from argosy.errors import ConfigError
from argosy.models import GPT, XS
from argosy.models.keyvalues import KeyValueCache
from argosy.models.transformer import rotate, rotation_tables

VARIANTS = [
    {},
    {"is_tied": False},
    {"has_qk_norm": True},
    {"num_kv_heads": 3},
    {"should_recompute": True},
]


def small(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT.of_depth(2, 256, 32, width=96, num_heads=3, **changes)


def some_tokens(rows=2, length=32):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))


def reference(model, tokens):
    """The same arithmetic written out, head by head, in float64."""
    config, weights = model.config, {n: p.double() for n, p in model.named_parameters()}
    length, width = tokens.shape[1], config.head_width
    x = weights["embedding.weight"][tokens]

    def norm(x, weight=1.0, epsilon=config.norm_epsilon):
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight

    def turn(x):
        half = width // 2
        angles = torch.arange(length).double()[:, None] * config.rope_base ** (
            -torch.arange(half).double() / half
        )
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
        )

    for layer in range(config.num_layers):
        own = {
            n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"blocks.{layer}.")
        }
        heads = norm(x, own["attention_norm.weight"]) @ own["attention.project_in.weight"].T
        heads = heads.split(width, -1)
        mixed = []
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            query, key = heads[head], heads[config.num_heads + shared]
            if config.has_qk_norm:
                query, key = norm(query, epsilon=2**-23), norm(key, epsilon=2**-23)
            scores = turn(query) @ turn(key).transpose(1, 2) / math.sqrt(width)
            hidden = torch.ones(length, length).triu(1).bool()
            value = heads[config.num_heads + config.num_kv_heads + shared]
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value)
        x = x + torch.cat(mixed, -1) @ own["attention.project_out.weight"].T
        gate, up = (norm(x, own["feed_norm.weight"]) @ own["feed.gate_up.weight"].T).chunk(2, -1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ own["feed.down.weight"].T
    output = weights["embedding.weight"] if config.is_tied else weights["head.weight"]
    return norm(x, weights["norm.weight"]) @ output.T


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_logits_are_those_of_the_arithmetic_written_out(changes):
    model = small(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)  # norms differ from one
    tokens = some_tokens()
    torch.testing.assert_close(
        model(tokens).double(), reference(model, tokens), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_loss_starts_near_chance_and_falls(changes):
    model, tokens = small(**changes), some_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(256)) < 1.0
    assert losses[-1] < losses[0] - 1.0


def test_every_parameter_gets_a_gradient():
    model = small(is_tied=False, has_qk_norm=True)
    model(some_tokens()).square().mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_seed_decides_every_weight_and_no_other_generator_is_used():
    first, again, other = small(3), small(3), small(4)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs if a.dim() > 1)


def test_forward_draws_no_random_numbers():
    model = small(should_recompute=True)
    before = torch.get_rng_state()
    model(some_tokens()).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_a_position_does_not_see_later_tokens():
    model, tokens = small(), some_tokens()
    changed = tokens.clone()
    changed[:, 20:] = 7
    assert torch.equal(model(tokens)[:, :20], model(changed)[:, :20])
    assert not torch.equal(model(tokens)[:, 20:], model(changed)[:, 20:])


def test_recomputing_activations_changes_no_bit():
    plain, sparing = small(), small(should_recompute=True)
    for model in (plain, sparing):
        model(some_tokens()).square().sum().backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(plain.parameters(), sparing.parameters(), strict=True)
    )


def test_rotation_depends_on_the_distance_of_positions_alone():
    tables = rotation_tables(XS, torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 1, XS.head_width).double()

    def score(at, other):
        turned = [
            rotate(x, (tables[0][p : p + 1].double(), tables[1][p : p + 1].double()))
            for x, p in ((query, at), (key, other))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-3)


def test_rotation_tables_are_no_state_and_survive_casts_and_moves():
    model = small()
    assert not [name for name in model.state_dict() if "cosines" in name or "sines" in name]
    tables = model.cosines.clone()
    assert torch.equal(model.to(torch.bfloat16).cosines, tables)
    empty = small().to("meta").to_empty(device="cpu")
    assert torch.equal(empty.cosines, tables)


def test_state_moves_between_models_by_name():
    source, target = small(1), small(2)
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(some_tokens()), target(some_tokens()))


@pytest.mark.parametrize("pieces", [[32], [5, 1, 1, 9, 16]])
def test_a_cached_forward_in_pieces_gives_the_logits_of_the_whole(pieces):
    model, tokens = small(has_qk_norm=True), some_tokens()
    cache = KeyValueCache(model.config, rows=2, capacity=32, like=model.output_weight)
    with torch.no_grad():
        parts = [model(part, cache) for part in tokens.split(pieces, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-5)
    assert cache.length == 32


def test_hidden_and_logits_make_up_the_forward():
    model, tokens = small(), some_tokens()
    assert torch.equal(model.logits(model.hidden(tokens)), model(tokens))


def test_the_model_is_captured_as_one_graph_without_a_change_of_bits():
    model, tokens = small(has_qk_norm=True), some_tokens()
    captured = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(captured(tokens), model(tokens))


def test_sequences_longer_than_the_rotation_tables_are_refused():
    with pytest.raises(ConfigError, match="33 tokens exceed sequence_length = 32"):
        small()(some_tokens(length=33))
