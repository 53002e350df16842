"""The program that `argosy demo` runs: a small GPT learns the standard library's sources, then continues a line of code.

    argosy run -n 4 demo_training.py --set data=stdlib.bin
    python demo_training.py --set data=stdlib.bin

An ordinary training program: nothing in it knows of ranks, of deaths, or of the demo. What it came to is left in `demo.json` of the run's directory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

import argosy as ar

END = 256
"""The token after a document, of the byte tokenizer."""
PROMPT = 'def read_lines(self, path):\n    """Return '


@dataclass
class Config:
    """What `argosy demo` chooses."""

    data: str = "stdlib.bin"
    depth: int = 2
    width: int = 128
    sequence_length: int = 256
    rows_per_lane: int = 1
    lanes: int = 8
    learning_rate: float = 4e-3
    steps: int = 200
    sample_tokens: int = 200


def loss(model: torch.nn.Module, batch: ar.data.Batch) -> tuple[torch.Tensor, int]:
    """Sum over the labels, and how many there are."""
    logits = model(batch.tokens)
    total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return total, batch.labels.numel()


def main(run: ar.Run, config: Config) -> None:
    """Every rank runs this; a replacement for a dead one, too."""
    model = ar.models.GPT.of_depth(
        config.depth,
        width=config.width,
        num_heads=4,
        sequence_length=config.sequence_length,
    )
    trainer = run.trainer(
        model=model,
        data=ar.data.Tokens(config.data, sequence_length=config.sequence_length),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=config.learning_rate, fused=True),
        batch_size=config.lanes * config.rows_per_lane,
        lanes=config.lanes,
        clip=1.0,
        schedule=ar.schedules.cosine(config.steps, warmup=config.steps // 10, least=0.05),
    )
    for step in trainer.steps(config.steps):
        result = step()
        run.log(loss=result.loss, tokens=result.tokens, seconds=result.seconds)

    def report() -> None:
        prompt = PROMPT.encode()
        drawn = ar.models.generate(
            model, prompt, config.sample_tokens, temperature=0.7, seed=run.seed, stop=END
        )
        text = bytes(token for token in drawn.tokens[0] if token < 256)
        found = {
            "steps": trainer.step,
            "digest": trainer.digest(),
            "parameters": ar.models.num_parameters(model),
            "prompt": PROMPT,
            "sample": text.decode(errors="replace"),
            **trainer.statistics(),
        }
        (run.directory / "demo.json").write_text(json.dumps(found))

    run.once(report)


if __name__ == "__main__":
    ar.launch(main, Config)
