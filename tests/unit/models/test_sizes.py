"""Configurations: the dial, the named sizes, counts, and what is refused."""

import subprocess
import sys

import msgspec
import pytest

from argosy.errors import ConfigError
from argosy.models import GPT, XS, GPTConfig, S, describe, flops_per_token, num_parameters


@pytest.mark.parametrize("depth", range(1, 13))
def test_every_depth_gives_a_consistent_model(depth):
    config = GPTConfig.of_depth(depth)
    assert config.width == 64 * depth
    assert config.num_heads * config.head_width == config.width
    assert config.num_heads % config.num_kv_heads == 0
    assert config.hidden_width % 64 == 0
    assert 2.6 < config.hidden_width / config.width < 3.1


def test_named_sizes_are_what_they_are_called():
    assert 0.18e6 < num_parameters(XS) < 0.24e6
    assert 9.5e6 < num_parameters(S) < 10.5e6


@pytest.mark.parametrize("changes", [{}, {"is_tied": False}, {"num_kv_heads": 3}])
def test_parameters_counted_from_the_config_are_those_of_the_model(changes):
    model = GPT.of_depth(2, width=96, num_heads=3, vocab_size=100, **changes)
    assert num_parameters(model) == num_parameters(model.config)


def test_overrides_take_part_in_what_is_derived():
    config = GPTConfig.of_depth(4, width=128)
    assert (config.num_heads, config.num_kv_heads, config.hidden_width) == (2, 1, 384)
    assert GPTConfig.of_depth(4, hidden_width=512).hidden_width == 512


def test_a_misspelt_field_is_named_with_its_neighbour():
    with pytest.raises(ConfigError, match=r"no field 'num_head'[\s\S]*num_heads"):
        GPT.of_depth(2, num_head=4)


@pytest.mark.parametrize(
    "changes",
    [{"num_heads": 5}, {"num_kv_heads": 2, "num_heads": 3}, {"vocab_size": 0}, {"width": 3.5}],
)
def test_sizes_that_do_not_fit_together_are_refused(changes):
    with pytest.raises(ConfigError, match="fix"):
        GPTConfig.of_depth(2, **({"width": 96} | changes))


def test_a_config_survives_json():
    assert msgspec.json.decode(msgspec.json.encode(S), type=GPTConfig) == S


def test_flops_are_six_per_matrix_parameter_and_causal_attention():
    config = GPTConfig.of_depth(2, sequence_length=7)
    matrices = num_parameters(config) - 5 * config.width
    attention = 3 * 4 * config.num_layers * config.width * 4  # 4 of 7 positions are seen on average
    assert flops_per_token(config) == 6 * matrices + attention
    assert 3 * flops_per_token(config, is_training=False) == flops_per_token(config)


def test_a_description_says_size_and_shape():
    text = describe(GPT(XS))
    assert f"GPT: {round(num_parameters(XS) / 1000)} k parameters, float32" in text
    assert "2 layers of width 96" in text
    assert "3 heads of 32, 1 for keys and values" in text


def test_frozen_parameters_are_told_apart():
    model = GPT(XS)
    model.embedding.weight.requires_grad_(False)
    assert num_parameters(model, is_trainable=True) == num_parameters(model) - XS.vocab_size * 96
    assert "of them trained" in describe(model)


def test_sizes_are_known_without_torch():
    code = "import sys; from argosy.models import S, flops_per_token; flops_per_token(S); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
