"""Hugging Face's own loader takes a checkpoint directory as it is."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from argosy.checkpoint import Checkpointer  # noqa: E402


def test_from_pretrained_opens_the_weights_unconverted(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    attached = {"config.json": config.to_json_string().encode()}
    path = Checkpointer(tmp_path).save(1, {"model": model}, attachments=attached)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]  # tied to the embedding
    found, report = transformers.GPT2LMHeadModel.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    for name, parameter in model.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name
