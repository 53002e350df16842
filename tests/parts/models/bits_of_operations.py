"""Prints a digest of forward and backward of every operation that GPT uses, in exact mode with one thread.

Started by test_operation_bits.py in several processes. Within one process each operation runs several times, its
arguments at different offsets from an aligned address; all these must give one digest, so a set is printed for each.
"""

import hashlib
import json
import math
import os

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # as the runtime does: see the doctor's probe

import torch
from torch.nn import functional

from argosy.models import GPT, XS
from argosy.models.transformer import rotate, rotation_tables

OFFSETS = (0, 1, 2, 5, 8, 16)  # elements: 2 to 64 bytes
ROWS, LENGTH, WIDTH, VOCAB = 2, 64, XS.width, XS.vocab_size
HEADS, KV_HEADS, HEAD = XS.num_heads, XS.num_kv_heads, XS.head_width


def numbers(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(dtype)


def placed(value, offset):
    """A copy whose memory begins `offset` elements behind an aligned address."""
    memory = torch.empty(value.numel() + 64, dtype=value.dtype)
    skipped = -memory.data_ptr() % 64 // memory.element_size()
    start = skipped + offset
    return memory[start : start + value.numel()].view(value.shape).copy_(value)


def silu_mul(x):
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def attention(heads):
    queries, keys, values = heads.transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
    return functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )


def operations(dtype):
    """{name: (function, its differentiable arguments)}"""
    tokens = torch.randint(7, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    turn = rotation_tables(XS, torch.device("cpu"))
    turn = (turn[0][:LENGTH], turn[1][:LENGTH])

    def make(*shape):
        return numbers(*shape, dtype=dtype)

    x = make(ROWS, LENGTH, WIDTH)
    heads = make(ROWS, LENGTH, HEADS + 2 * KV_HEADS, HEAD)
    return {
        "linear": (functional.linear, (x, make(WIDTH * 2, WIDTH))),
        "embedding": (lambda weight: functional.embedding(tokens, weight), (make(VOCAB, WIDTH),)),
        "rms_norm": (lambda x, w: functional.rms_norm(x, (WIDTH,), w, 1e-5), (x, make(WIDTH))),
        "qk_norm": (lambda x: functional.rms_norm(x[:, :, :HEADS], (HEAD,)), (heads,)),
        "attention": (attention, (heads,)),
        "silu_mul": (silu_mul, (x,)),
        "rope": (lambda x: rotate(x, turn), (heads,)),
        "cross_entropy": (
            lambda x: functional.cross_entropy(x.flatten(0, 1), tokens.flatten(), reduction="sum"),
            (make(ROWS, LENGTH, VOCAB),),
        ),
    }


def digest(*tensors):
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def run(function, arguments, offset):
    leaves = [placed(a, offset).requires_grad_() for a in arguments]
    out = function(*leaves)
    out.backward(placed(numbers(*out.shape, dtype=out.dtype), offset))
    return digest(out, *(leaf.grad for leaf in leaves))


def run_model(dtype, offset, **changes):
    """The whole of it, every weight at an odd place."""
    torch.default_generator.manual_seed(5)
    model = GPT.of_depth(2, width=96, num_heads=3, **changes).to(dtype)
    for parameter in model.parameters():
        parameter.data = placed(parameter.data, offset)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1))
    loss = functional.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
    )
    loss.backward()
    return digest(loss, *(p.grad for p in model.parameters()))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        for name, (function, arguments) in operations(dtype).items():
            runs = {run(function, arguments, offset) for offset in (*OFFSETS, 0)}
            found[f"{name} {kind}"] = sorted(runs)
        found[f"tied model {kind}"] = sorted({run_model(dtype, o) for o in (0, 1, 0)})
        found[f"untied normed model {kind}"] = sorted(
            {run_model(dtype, o, is_tied=False, has_qk_norm=True) for o in (0, 3)}
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
