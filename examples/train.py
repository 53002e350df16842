# train.py     python train.py   |   argosy run train.py -n 4
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import argosy as ar


@dataclass
class Config:  # every field is a key of --set
    depth: int = 2
    learning_rate: float = 2e-3
    steps: int = 100


def loss(model, batch):  # (sum, count): the runtime divides, over the whole batch
    logits = model(batch.tokens).flatten(0, 1)
    total = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
    return total, batch.labels.numel()


def main(run: ar.Run, config: Config):  # every rank runs this
    corpus = ar.data.stdlib_corpus("stdlib.bin")  # 12 MB of Python; nothing is downloaded
    trainer = run.trainer(
        model=ar.models.GPT.of_depth(config.depth),
        data=ar.data.Tokens(corpus, sequence_length=256),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=config.learning_rate),
        batch_size=16,
        lanes=8,
    )
    for step in trainer.steps(config.steps):  # your loop; a step is retried, never lost
        result = step()
        if step.index % 20 == 0:
            run.log(loss=result.loss, tokens_per_second=result.tokens_per_second)
    run.once(lambda: print("state", trainer.digest()))  # of parameters and moments


if __name__ == "__main__":
    ar.launch(main, Config)
