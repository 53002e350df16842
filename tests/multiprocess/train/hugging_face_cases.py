"""A Hugging Face model with random weights, built from its config, in the trainer as it is."""

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCAB = 12, 64


class Counting(torch.utils.data.Dataset):
    """Rows that count upwards from their own number: easily learned."""

    fingerprint = "counting"

    def __len__(self):
        return 256

    def __getitem__(self, number):
        row = (torch.arange(LENGTH + 1) + number) % VOCAB
        return row[:-1], row[1:]


def loss(model, batch):
    logits = model(batch.inputs, use_cache=False).logits
    summed = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return summed, batch.labels.numel()


def llama(run):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    trainer = run.trainer(
        model=LlamaForCausalLM(config),
        data=Counting(),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batch_size=16,
        lanes=4,
    )
    losses = [step().loss for step in trainer.steps(8)]
    return {"digest": trainer.digest(), "losses": losses}
