"""A plain data-parallel training script in torchrun's style: it knows nothing of Argosy.

    torchrun --nproc-per-node 4 plain_torchrun.py
    argosy run -n 4 plain_torchrun.py

It learns to continue the text of this very file, saves its state every few steps, and starts from the newest state it finds.
"""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

STEPS = int(os.environ.get("STEPS", "120"))
SAVE_EVERY = 10
CONTEXT = 16


def main() -> None:
    """Train; every rank runs this."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 32),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * CONTEXT, 256),
        torch.nn.GELU(),
        torch.nn.Linear(256, 256),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    checkpoint = Path(os.environ.get("CHECKPOINT", f"/tmp/argosy-demo-{os.getuid()}.npz"))
    first = load(checkpoint, model)

    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        at = torch.randint(len(text) - CONTEXT, (32,), generator=generator)
        windows = torch.stack([text[i : i + CONTEXT + 1] for i in at])
        loss = F.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        # One message per step: the gradients of all parameters, and the loss.
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([loss.detach().view(1), *(g.view(-1) for g in gradients)])
        dist.all_reduce(flat)
        mean_loss, *means = torch.split(flat / world_size, [1, *(g.numel() for g in gradients)])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        optimizer.step()
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            save(checkpoint, model, step + 1)
            print(f"step {step + 1} loss {mean_loss.item():.3f}")
    print("done")
    dist.destroy_process_group()
    if rank == 0:
        checkpoint.unlink(missing_ok=True)


def save(path: Path, model: torch.nn.Module, step: int) -> None:
    """Write beside and rename, so that a death in the middle leaves the older one whole."""
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        np.savez(
            file, step=step, **{name: value.numpy() for name, value in model.state_dict().items()}
        )
    beside.replace(path)


def load(path: Path, model: torch.nn.Module) -> int:
    """Return the step to go on with."""
    if not path.exists():
        return 0
    with np.load(path) as state:
        step = int(state["step"])
        model.load_state_dict(
            {name: torch.from_numpy(state[name]) for name in state if name != "step"}
        )
    print(f"resumed at step {step}")
    return step


if __name__ == "__main__":
    main()
