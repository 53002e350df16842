"""Generation: both ways give the same tokens, fixed shapes give training's bits, and arguments are checked first."""

import numpy as np
import pytest
import torch

from argosy.errors import ConfigError
from argosy.models import GPT, XS, generate, stream, token_logprobs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPT.of_depth(2, vocab_size=256, width=96, num_heads=3, sequence_length=48)


def prompts(rows, length):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 40, "seed": 3}, {"top_p": 0.8}])
def test_both_ways_of_decoding_give_the_same_tokens(model, options):
    cached = generate(model, prompts(3, 8), 30, cache="kv", **options)
    full = generate(model, prompts(3, 8), 30, cache="none", **options)
    assert cached == full
    assert [len(row) for row in cached.tokens] == [30] * 3


def test_greedy_tokens_are_the_likeliest_by_the_full_forward(model):
    tokens = prompts(2, 8)
    for new in generate(model, tokens, 10, temperature=0).tokens[0]:
        assert int(model(tokens)[0, -1].argmax()) == new
        tokens = torch.cat((tokens, torch.tensor([[new], [0]])), 1)


def test_a_fixed_shape_gives_the_log_probabilities_of_training_bit_by_bit():
    torch.manual_seed(0)
    model = GPT(XS)
    made = generate(model, prompts(3, 8), 40, cache="none", logprobs=True, shape=(4, 256))
    batch = torch.zeros(4, 256, dtype=torch.int64)
    batch[:3, :48] = torch.cat((prompts(3, 8), torch.tensor(made.tokens)), 1)
    batch[:3, 48:] = 11  # what comes later and what the last row holds does not matter
    batch[3] = 5
    trained = token_logprobs(model, batch)
    assert trained.requires_grad
    assert torch.equal(torch.tensor(made.logprobs), trained[:3, 7:47])


def test_log_probabilities_with_a_cache_are_near_those_of_training(model):
    made = generate(model, prompts(2, 8), 40, logprobs=True)
    whole = torch.cat((prompts(2, 8), torch.tensor(made.tokens)), 1)
    torch.testing.assert_close(
        torch.tensor(made.logprobs), token_logprobs(model, whole)[:, 7:], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("cache", ["kv", "none"])
def test_ragged_prompts_give_what_each_gives_alone(model, cache):
    rows = [prompts(1, n)[0] for n in (3, 11, 7)]
    together = generate(model, rows, 12, temperature=0, cache=cache)
    assert together.tokens == [
        generate(model, row, 12, temperature=0, cache=cache).tokens[0] for row in rows
    ]


def test_a_row_draws_the_same_tokens_whatever_stands_beside_it(model):
    first, others = prompts(1, 5)[0], prompts(2, 9)
    alone = generate(model, first, 20, seed=4)
    assert generate(model, [first, *others], 20, seed=4).tokens[0] == alone.tokens[0]
    assert generate(model, first, 20, seed=5) != alone


def test_a_longer_text_begins_like_the_shorter(model):
    assert generate(model, b"def", 30).tokens[0][:9] == generate(model, b"def", 9).tokens[0]


def test_a_stop_ends_its_row_and_is_kept(model):
    free = generate(model, prompts(2, 4), 20, seed=2)
    token, run = free.tokens[0][6], free.tokens[0][3:5]
    where = free.tokens[0].index(token)
    stopped = generate(model, prompts(2, 4), 20, seed=2, stop=token, logprobs=True)
    assert stopped.tokens[0] == free.tokens[0][: where + 1]
    assert [len(row) for row in stopped.logprobs] == [len(row) for row in stopped.tokens]
    by_run = generate(model, prompts(2, 4), 20, seed=2, stop=[bytes(run)])
    assert by_run.tokens[0] == free.tokens[0][:5]
    assert by_run.tokens[1] == free.tokens[1]


def test_a_stream_gives_the_same_tokens_step_by_step(model):
    whole = generate(model, [b"ab", b"abcd"], 6)
    steps = list(stream(model, [b"ab", b"abcd"], 6))
    assert [
        [t for t in row if t is not None] for row in zip(*(s.tokens for s in steps), strict=True)
    ] == whole.tokens
    assert steps[0].tokens[1] is None
    assert len(steps) == 8


def test_between_steps_of_a_stream_gradients_work(model):
    for _ in stream(model, b"x", 2):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        model(prompts(1, 4)).sum().backward()
    model.zero_grad()


def test_prompts_may_be_bytes_lists_arrays_or_tensors(model):
    wanted = generate(model, b"hello", 5)
    for same in (list(b"hello"), np.frombuffer(b"hello", np.uint8), torch.tensor(list(b"hello"))):
        assert generate(model, same, 5) == wanted
        assert generate(model, [same, same], 5).tokens[0] == wanted.tokens[0]


def test_generation_leaves_the_default_generator_and_the_weights_alone(model):
    before, weights = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    generate(model, b"hello", 5)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((b"", 5), {}, "empty"),
        (([b"a", b""], 5), {}, "empty"),
        (([300], 5), {}, "token 300"),
        ((b"abc", 0), {}, "max_new_tokens = 0"),
        ((b"abc", 46), {}, "sequence_length = 48"),
        ((b"abc", 5), {"temprature": 1.0}, "temperature"),
        ((b"abc", 5), {"cache": "paged"}, "cache"),
        ((b"abc", 5), {"cache": "none", "shape": (1, 7)}, "shape"),
        ((b"abc", 5), {"stop": [b""]}, "stop"),
        ((b"abc", 5), {"top_p": 1.5}, "top_p"),
    ],
)
def test_wrong_arguments_are_explained_before_anything_is_computed(
    model, arguments, options, message
):
    with pytest.raises(ConfigError, match=message):
        stream(model, *arguments, **options)
