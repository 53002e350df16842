"""The task of the training benchmarks: one model, one file of tokens, one loss and one optimizer for all sides.

BENCH_SIZE is XS (0.2 M parameters) or S (10 M), BENCH_TOKENS the file, BENCH_ROW the tokens of a row if they are not the model's own. The peers get the same batches as ours, taken from the same feed before
they begin and kept in memory: reading data costs them nothing. Runs in the peers' environments too, where only the package's sources are on the path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from argosy.data.tokens import Tokens
from argosy.models import sizes, transformer

LANES = 8
ROWS_PER_LANE = 2
LEARNING_RATE = 3e-4
KEPT_STEPS = 32

CONFIGS = {"XS": sizes.XS, "S": sizes.S}
CONFIG = CONFIGS[os.environ.get("BENCH_SIZE", "XS")]
ROW = int(os.environ.get("BENCH_ROW", CONFIG.sequence_length))
TOKENS_PER_STEP = LANES * ROWS_PER_LANE * ROW


class Micro(NamedTuple):
    """One lane's batch, as the peers hold it."""

    tokens: torch.Tensor
    labels: torch.Tensor


def model() -> torch.nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    return transformer.GPT(CONFIG)


def blocks(whole: Any) -> Iterable[torch.nn.Module]:
    """What FSDP2 shards one by one."""
    return whole.blocks


def loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    logits = model(batch.tokens)
    total = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return total, batch.labels.numel()


def optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def source() -> Tokens:
    return Tokens(os.environ["BENCH_TOKENS"], "uint16", sequence_length=ROW)


def batches(lanes: Sequence[int]) -> list[list[Micro]]:
    """The first steps' micro-batches of these lanes; the peers go round and round in them."""
    feed = source().feed(batch_size=LANES * ROWS_PER_LANE, lanes=LANES, seed=0)
    return [[_micro(feed.batch(index, lane)) for lane in lanes] for index in range(KEPT_STEPS)]


def _micro(batch: Any) -> Micro:
    return Micro(batch.tokens.clone(), batch.labels.clone())


class Repeated(Dataset[Any]):
    """A list again and again, as a map-style data set whose end is not reached."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        return self._items[index % len(self._items)]
