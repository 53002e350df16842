"""Runs inside the environment of Hugging Face transformers: a Llama with the weights in `weights.npz` of its directory.

`generate ROWS PROMPT NEW` times its own greedy `generate` with a key-value cache and gives the tokens; `score` answers
how far the tokens in `tokens.json` are from the likeliest ones by its own full forward; `train ROWS LENGTH` times one
forward and backward. Answers are lines of JSON after the mark `@`.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM


def answer(**fields: object) -> None:
    print("@" + json.dumps(fields), flush=True)


def llama(weights: dict[str, np.ndarray], shape: dict[str, int | float | bool]) -> LlamaForCausalLM:
    """The same architecture under its own names; fused matrices are cut into theirs."""
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["width"],
        intermediate_size=shape["hidden_width"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        max_position_embeddings=shape["sequence_length"],
        rms_norm_eps=shape["norm_epsilon"],
        rope_theta=shape["rope_base"],
        tie_word_embeddings=shape["is_tied"],
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    head_width = shape["width"] // shape["num_heads"]
    q, kv = shape["num_heads"] * head_width, shape["num_kv_heads"] * head_width
    state = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["norm.weight"],
        "lm_head.weight": weights.get("head.weight", weights["embedding.weight"]),
    }
    for layer in range(shape["num_layers"]):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        projected = weights[ours + "attention.project_in.weight"]
        gate, up = np.split(weights[ours + "feed.gate_up.weight"], 2)
        state |= {
            theirs + "self_attn.q_proj.weight": projected[:q],
            theirs + "self_attn.k_proj.weight": projected[q : q + kv],
            theirs + "self_attn.v_proj.weight": projected[q + kv :],
            theirs + "self_attn.o_proj.weight": weights[ours + "attention.project_out.weight"],
            theirs + "mlp.gate_proj.weight": gate,
            theirs + "mlp.up_proj.weight": up,
            theirs + "mlp.down_proj.weight": weights[ours + "feed.down.weight"],
            theirs + "input_layernorm.weight": weights[ours + "attention_norm.weight"],
            theirs + "post_attention_layernorm.weight": weights[ours + "feed_norm.weight"],
        }
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return model.eval()


def generate(model: LlamaForCausalLM, prompts: torch.Tensor, new: int) -> None:
    mask = torch.ones_like(prompts)
    started = time.perf_counter()
    out = model.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        use_cache=True,
    )
    seconds = time.perf_counter() - started
    answer(seconds=seconds, tokens=out[:, prompts.shape[1] :].tolist())


@torch.no_grad()
def score(model: LlamaForCausalLM, tokens: torch.Tensor, start: int) -> None:
    """The largest amount by which a chosen token's logit is below the likeliest one's."""
    logits = model(tokens).logits[:, start - 1 : -1]
    chosen = logits.gather(-1, tokens[:, start:, None])
    answer(shortfall=float((logits.amax(-1, keepdim=True) - chosen).max()))


def train(model: LlamaForCausalLM, tokens: torch.Tensor) -> None:
    started = time.perf_counter()
    logits = model(tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    seconds = time.perf_counter() - started
    model.zero_grad()
    answer(seconds=seconds, loss=float(loss))


def main() -> None:
    torch.set_num_threads(1)
    shape = json.loads(Path("shape.json").read_text())
    model = llama(dict(np.load("weights.npz")), shape)
    answer(version=f"transformers {transformers.__version__}, torch {torch.__version__}")
    for line in sys.stdin:
        verb, *numbers = line.split()
        tokens = torch.tensor(json.loads(Path("tokens.json").read_text()))
        if verb == "generate":
            generate(model, tokens, int(numbers[0]))
        elif verb == "score":
            score(model, tokens, int(numbers[0]))
        else:
            train(model, tokens)


if __name__ == "__main__":
    main()
