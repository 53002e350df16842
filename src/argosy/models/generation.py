"""Continue prompts with a `GPT`: `generate` for whole texts, `stream` for one step at a time.

Two ways to the same tokens: with a key-value cache each step computes one position; with `cache="none"` each step is
the full forward at one fixed shape, and its log-probabilities equal those of the training forward of that shape bit by
bit. A ragged batch starts at its shortest prompt; rows still inside their prompt take its tokens instead of drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypedDict, Unpack

import msgspec
import torch
from torch import Tensor

from argosy.config.nearest import did_you_mean
from argosy.errors import ConfigError
from argosy.models.keyvalues import KeyValueCache
from argosy.models.sampling import Sampling, draw, uniform_rows
from argosy.models.transformer import GPT

Prompt = Sequence[int] | Tensor  # bytes are a sequence of numbers too


class Options(TypedDict, total=False):
    """Keywords of `generate` and `stream`; defaults in the fields of `Sampling` and `Plan`."""

    temperature: float
    top_k: int | None
    top_p: float
    seed: int
    cache: Literal["kv", "none"]
    stop: int | Sequence[int | Sequence[int]]
    logprobs: bool
    shape: tuple[int, int] | None


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of each prompt, its stop included, and their log-probabilities if they were asked for."""

    tokens: list[list[int]]
    logprobs: list[list[float]] | None


class Emission(msgspec.Struct, frozen=True):
    """One step: for each row a new token, or None where it is finished or still inside its prompt."""

    tokens: list[int | None]
    logprobs: list[float] | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Checked arguments of one generation."""

    rows: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    seed: int = 0
    cache: str = "kv"
    stop: tuple[list[int], ...] = ()  # runs of tokens that end a row
    logprobs: bool = False  # of the new tokens, at temperature 1, all tokens allowed
    shape: tuple[int, int] | None = None  # of the full forward; None: (rows, sequence_length)

    @property
    def num_positions(self) -> int:
        """Positions of the longest row when it is finished."""
        return max(map(len, self.rows)) + self.max_new_tokens


def generate(
    model: GPT,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int,
    **options: Unpack[Options],
) -> Generated:
    """Continue each prompt by at most `max_new_tokens`; equal arguments give equal tokens."""
    plan = plan_generation(model, prompts, max_new_tokens, options)
    tokens: list[list[int]] = [[] for _ in plan.rows]
    logprobs: list[list[float]] = [[] for _ in plan.rows]
    for emission in _emissions(model, plan):
        for row, token in enumerate(emission.tokens):
            if token is not None:
                tokens[row].append(token)
                if emission.logprobs is not None:
                    logprobs[row].append(emission.logprobs[row])
    return Generated(tokens=tokens, logprobs=logprobs if plan.logprobs else None)


def stream(
    model: GPT,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int,
    **options: Unpack[Options],
) -> Iterator[Emission]:
    """As `generate`, one `Emission` per step; arguments are checked at once."""
    return _emissions(model, plan_generation(model, prompts, max_new_tokens, options))


def token_logprobs(model: GPT, tokens: Tensor) -> Tensor:
    """Log-probabilities of tokens[:, 1:] by the training forward of this shape: (rows, length - 1), with gradients."""
    scores = model(tokens)[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def plan_generation(
    model: GPT, prompts: Prompt | Sequence[Prompt], max_new_tokens: int, options: Options
) -> Plan:
    """Check every argument before anything is computed."""
    given: dict[str, Any] = dict(options)
    for name in given.keys() - Options.__annotations__.keys():
        raise ConfigError(
            f"generation has no option {name!r}", fix=did_you_mean(name, Options.__annotations__)
        )
    plan = Plan(
        rows=_rows_of(prompts, model.config.vocab_size),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(**{n: given.pop(n) for n in Sampling.__struct_fields__ if n in given}),
        stop=_runs_of(given.pop("stop", ())),
        **given,
    )
    if plan.cache not in ("kv", "none"):
        raise ConfigError(f"cache = {plan.cache!r}", fix='use "kv" or "none"')
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens = {max_new_tokens}", fix="generate at least one token")
    if plan.num_positions > model.config.sequence_length:
        raise ConfigError(
            f"a prompt of {plan.num_positions - max_new_tokens} and {max_new_tokens} new tokens exceed "
            f"sequence_length = {model.config.sequence_length}",
            fix="shorten one of them, or build the model with a longer sequence_length",
        )
    rows, length = plan.shape or (len(plan.rows), plan.num_positions)
    if rows < len(plan.rows) or not plan.num_positions <= length <= model.config.sequence_length:
        raise ConfigError(
            f"shape = {plan.shape} does not hold {len(plan.rows)} rows of {plan.num_positions}",
            fix="use the shape of the training forward, and prompts that fit in it",
        )
    return plan


@torch.inference_mode()
def _emissions(model: GPT, plan: Plan) -> Iterator[Emission]:
    lengths = [len(row) for row in plan.rows]
    shortest, longest = min(lengths), max(lengths)
    texts, uniforms = _texts_and_uniforms(plan, model.output_weight.device)
    inside = torch.tensor(lengths, device=texts.device)
    next_logits = (
        _by_cache(model, plan, texts) if plan.cache == "kv" else _by_full(model, plan, texts)
    )
    remaining = [plan.max_new_tokens] * len(plan.rows)
    for position in range(shortest, plan.num_positions):
        logits = next_logits(position)
        chosen = draw(logits, uniforms[:, position], plan.sampling)
        if position < longest:
            chosen = torch.where(inside > position, texts[:, position], chosen)
        texts[:, position] = chosen
        tokens: list[int | None] = chosen.tolist()
        for row, length in enumerate(lengths):
            if position < length or not remaining[row]:
                tokens[row] = None
            elif plan.stop and _is_stopped(texts[row, length : position + 1], plan.stop):
                remaining[row] = 0
            else:
                remaining[row] -= 1
        yield Emission(tokens, _logprobs_of(logits, chosen) if plan.logprobs else None)
        if not any(remaining):
            return


def _by_cache(model: GPT, plan: Plan, texts: Tensor) -> Callable[[int], Tensor]:
    """Logits for a position from those after the last call's: the whole prompt once, then one by one."""
    cache = KeyValueCache(
        model.config, len(plan.rows), plan.num_positions, like=model.output_weight
    )

    def next_logits(position: int) -> Tensor:
        return model.logits(model.hidden(texts[:, cache.length : position], cache)[:, -1])

    return next_logits


def _by_full(model: GPT, plan: Plan, texts: Tensor) -> Callable[[int], Tensor]:
    """Logits for a position from the forward of a fixed shape; what stands behind it is masked and cannot matter."""
    rows, length = plan.shape or (len(plan.rows), model.config.sequence_length)
    padded = texts.new_zeros(rows, length)

    def next_logits(position: int) -> Tensor:
        padded[: len(plan.rows), :position] = texts[:, :position]
        return model(padded)[: len(plan.rows), position - 1]

    return next_logits


def _texts_and_uniforms(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts with room behind them, and for each position the number that will choose its token."""
    shape = (len(plan.rows), plan.num_positions)
    texts = torch.zeros(shape, dtype=torch.int64)
    uniforms = torch.zeros(shape, dtype=torch.float64)
    numbers = uniform_rows(plan.seed, len(plan.rows), plan.max_new_tokens)
    for row, prompt in enumerate(plan.rows):
        end = len(prompt)
        texts[row, :end] = torch.tensor(prompt)
        uniforms[row, end : end + plan.max_new_tokens] = numbers[row]
    return texts.to(device), uniforms.to(device)


def _logprobs_of(logits: Tensor, chosen: Tensor) -> list[float]:
    scores: list[float] = logits.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()
    return scores


def _is_stopped(text: Tensor, runs: tuple[list[int], ...]) -> bool:
    end = text[-max(map(len, runs)) :].tolist()
    return any(end[-len(run) :] == run for run in runs)


def _runs_of(stop: Any) -> tuple[list[int], ...]:
    """`stop` as runs of tokens; bytes are one run."""
    if isinstance(stop, (int, bytes)):
        stop = [stop]
    runs = tuple([run] if isinstance(run, int) else list(run) for run in stop)
    if not all(runs):
        raise ConfigError("stop holds an empty run of tokens", fix="leave it out")
    return runs


def _rows_of(prompts: Any, vocab_size: int) -> list[list[int]]:
    """One prompt or many, as tensors, arrays, bytes or lists, as lists of numbers."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if len(prompts) and isinstance(prompts[0], int):
        prompts = [prompts]
    rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in prompts]
    if not rows or not all(rows):
        raise ConfigError("a prompt is empty", fix="give at least one token to start from")
    outside = next((t for row in rows for t in row if not 0 <= t < vocab_size), None)
    if outside is not None:
        raise ConfigError(
            f"token {outside} is not in the vocabulary of {vocab_size}",
            fix="encode the prompt with the tokenizer the model was trained with",
        )
    return rows
