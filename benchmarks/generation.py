"""Generation with a key-value cache against Hugging Face transformers, and the distance of log-probabilities from training's.

Both sides hold the same weights (size S, float32, one thread) and continue the same prompts greedily, in turns; each
side's tokens are then judged by the other side's full forward. `python -m benchmarks.generation --json` runs it alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from argosy.models import GPT, XS, S, generate, num_parameters, token_logprobs
from benchmarks.measure import SideFailed, median, rounded, say, scratch, spread
from benchmarks.peers.drivers import Driver

PROMPT_LENGTH, NEW_TOKENS = 32, 96
BATCHES = (1, 8)
SLACK = 1e-3  # a token this near to the likeliest logit counts as chosen greedily


def run(*, quick: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    metrics: dict[str, Any] = logprob_distances()
    metrics["parameters"] = num_parameters(S)
    try:
        metrics |= against_transformers(rounds=3 if quick else 15)
    except SideFailed as failure:
        metrics["generate_tokens_per_second_over_hf"] = None
        metrics["generate_tokens_per_second_over_hf_reason"] = str(failure)
    return metrics


def against_transformers(rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(S).eval()
    with scratch() as directory:
        weights = {name: value.numpy() for name, value in model.state_dict().items()}
        np.savez(directory / "weights.npz", **weights)
        (directory / "shape.json").write_bytes(msgspec.json.encode(S))
        driver = Driver("transformers", directory, environment="trainers")
        try:
            metrics: dict[str, Any] = {"peer": driver.version}
            for batch in BATCHES:
                metrics |= compare(model, driver, directory, batch, rounds)
            return metrics | compare_training(model, driver, directory, rounds)
        finally:
            driver.close()


def compare(model: GPT, driver: Driver, directory: Path, batch: int, rounds: int) -> dict[str, Any]:
    prompts = torch.randint(S.vocab_size, (batch, PROMPT_LENGTH), generator=torch.manual_seed(1))
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(rounds + 1):
        (directory / "tokens.json").write_text(json.dumps(prompts.tolist()))
        started = time.perf_counter()
        mine = generate(model, prompts, NEW_TOKENS, temperature=0).tokens
        seconds = time.perf_counter() - started
        reply = driver.ask(f"generate {NEW_TOKENS}")
        if turn == 0:  # the first turn warms both sides and is judged
            judge(model, driver, directory, prompts.tolist(), mine, reply["tokens"])
            continue
        ours.append(batch * NEW_TOKENS / seconds)
        theirs.append(batch * NEW_TOKENS / float(reply["seconds"]))
        say(f"generate, {batch} rows: {ours[-1]:.0f} tokens/s, transformers {theirs[-1]:.0f}")
    suffix = "" if batch == 1 else f"_{batch}_rows"
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        f"generate_tokens_per_second_over_hf{suffix}": rounded(median(pairs)),
        f"generate_tokens_per_second_over_hf{suffix}_spread": spread(pairs),
        f"generate_tokens_per_second{suffix}": rounded(median(ours), 1),
        f"hf_generate_tokens_per_second{suffix}": rounded(median(theirs), 1),
    }


def judge(
    model: GPT,
    driver: Driver,
    directory: Path,
    prompts: list[list[int]],
    mine: list[list[int]],
    theirs: list[list[int]],
) -> None:
    """Each side's tokens must be the greedy ones by the other side's own full forward."""
    whole = [prompt + new for prompt, new in zip(prompts, mine, strict=True)]
    (directory / "tokens.json").write_text(json.dumps(whole))
    shortfall = float(driver.ask(f"score {PROMPT_LENGTH}")["shortfall"])
    if len(mine[0]) != NEW_TOKENS or not shortfall < SLACK:
        raise SideFailed(f"our tokens are {shortfall} below the likeliest by transformers' logits")
    tokens = torch.tensor([prompt + new for prompt, new in zip(prompts, theirs, strict=True)])
    with torch.no_grad():
        logits = model(tokens)[:, PROMPT_LENGTH - 1 : -1]
    chosen = logits.gather(-1, tokens[:, PROMPT_LENGTH:, None])
    shortfall = float((logits.amax(-1, keepdim=True) - chosen).max())
    if len(theirs[0]) != NEW_TOKENS or not shortfall < SLACK:
        raise SideFailed(f"transformers' tokens are {shortfall} below the likeliest by our logits")


def compare_training(model: GPT, driver: Driver, directory: Path, rounds: int) -> dict[str, Any]:
    """Forward and backward of one micro-batch, in turns: the model alone, without a trainer."""
    tokens = torch.randint(S.vocab_size, (4, S.sequence_length + 1), generator=torch.manual_seed(2))
    (directory / "tokens.json").write_text(json.dumps(tokens.tolist()))
    pairs = []
    for turn in range(rounds + 1):
        started = time.perf_counter()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        seconds = time.perf_counter() - started
        model.zero_grad()
        reply = driver.ask("train")
        if abs(float(loss) - float(reply["loss"])) > 1e-4:
            raise SideFailed(f"losses differ: {float(loss)} and {reply['loss']}")
        if turn:
            pairs.append(float(reply["seconds"]) / seconds)
    return {
        "forward_backward_over_hf": rounded(median(pairs)),
        "forward_backward_over_hf_spread": spread(pairs),
    }


def logprob_distances() -> dict[str, Any]:
    """The largest difference between log-probabilities of generated tokens and those of the training forward."""
    found = {}
    for cache, suffix in (("none", ""), ("kv", "_kv")):
        worst = 0.0
        for config, rows in ((XS, 3), (S, 2)):
            torch.manual_seed(0)
            model = GPT(config)
            room = config.sequence_length - PROMPT_LENGTH
            new = room if config is XS else 24
            prompts = torch.randint(config.vocab_size, (rows, PROMPT_LENGTH))
            made = generate(model, prompts, new, cache=cache, seed=1, logprobs=True)
            whole = torch.zeros(rows, config.sequence_length, dtype=torch.int64)
            whole[:, :PROMPT_LENGTH] = prompts
            whole[:, PROMPT_LENGTH : PROMPT_LENGTH + new] = torch.tensor(made.tokens)
            trained = token_logprobs(model, whole)[:, PROMPT_LENGTH - 1 :][:, :new]
            worst = max(worst, float((torch.tensor(made.logprobs) - trained.detach()).abs().max()))
        found[f"train_generate_logprob_max_diff{suffix}"] = worst
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; for a first look")
    options = parser.parse_args()
    metrics = run(quick=options.quick)
    if not options.json:
        for name, value in metrics.items():
            print(f"{name:40} {value}")
    print(json.dumps({"bench": "generation", "metrics": metrics}), flush=True)


if __name__ == "__main__":
    main()
