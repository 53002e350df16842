"""Several launches of one small training, one after the other in this process; after each of them its exit code is printed.

What happens in step 4 is said by the config: all ranks are killed and Ctrl-C is pressed (`vanish`), Ctrl-C is pressed twice, when a checkpoint was made on the way (`twice`), or user code breaks out of its
loop (`break`) or raises in this and in every later step (`raise`); with `sleepy` one rank hangs before it makes its trainer, with `wider` its batches are larger.
With `stop at POINT of RANK` Ctrl-C is pressed when that rank is at that point of step 4, and it stays there until the other has heard.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import argosy as ar

STEPS = 8


@dataclass
class Config:
    case: str = ""


class Rows(torch.utils.data.Dataset):
    fingerprint = "rows"

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.full((4,), float(number))


def press_at(run, trainer, case):
    """Ctrl-C at a point inside a step, which a program does not see otherwise."""
    _, _, point, _, rank = case.split()
    pass_by = trainer.parts.transaction._injector.pass_by

    def press(passed, step, slot=None):
        if (passed, step, str(run.rank)) == (point, 4, rank):
            os.kill(os.getppid(), signal.SIGINT)
            while not run.gang.stopping:
                time.sleep(0.001)
            time.sleep(0.3)
        pass_by(passed, step, slot)

    trainer.parts.transaction._injector.pass_by = press


def main(run, config):
    pids = Path("pids")  # beside the run's directory, which is removed if it is refused
    pids.mkdir(exist_ok=True)
    (pids / str(run.rank)).write_text(str(os.getpid()))
    is_first_life = os.environ.get("ARGOSY_GENERATION", "1") == "1"
    if config.case == "sleepy" and is_first_life and run.gang.rank == 1:
        time.sleep(600)
    trainer = run.trainer(
        model=nn.Linear(4, 1),
        data=ar.data.as_source(Rows(), names=("row",)),
        loss=lambda model, batch: (model(batch.row).square().sum(), batch.rows),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        batch_size=16 if config.case == "wider" else 8,
        lanes=4,
        first_hang_seconds=0.3,
        checkpoints=ar.Checkpoints(every=2) if config.case == "twice" else ar.Checkpoints(),
    )
    if config.case.startswith("stop at"):
        press_at(run, trainer, config.case)
    run.state.setdefault("made", [])
    # Each failure may cost several steps: who comes back late finds them done by the other.
    for step in trainer.steps(10 * STEPS if config.case == "raise" else STEPS):
        step()
        if config.case.startswith("stop at") and run.gang.stopping:
            time.sleep(1.5)  # longer than ranks wait for one another to save
        run.state["made"] = [*run.state["made"], step.index]
        if step.index == 4:
            if config.case == "break":
                break
            disturb(run, config.case, pids)
        if step.index >= 4 and config.case == "raise":
            raise ValueError("the loop is wrong")
    if config.case == "made" and run.rank == 0:
        print("made", *run.state["made"], file=sys.stderr, flush=True)


def disturb(run, case, pids):
    if case not in ("vanish", "twice"):
        return
    if run.rank == 0:
        asked = os.getppid() if run.world_size > 1 else os.getpid()
        if case == "vanish":
            os.kill(int((pids / "1").read_text()), signal.SIGKILL)
        while case == "twice" and not has_saved_on_the_way(run):
            time.sleep(0.001)
        os.kill(asked, signal.SIGINT)
        if case == "vanish":
            os.kill(os.getpid(), signal.SIGKILL)
        while not run.gang.stopping:
            time.sleep(0.001)
        os.kill(asked, signal.SIGINT)
    time.sleep(600)


def has_saved_on_the_way(run):
    """And is not at another save, which is this rank's if anybody's."""
    is_saving = any(thread.name == "argosy-save" for thread in threading.enumerate())
    return not is_saving and any(run.directory.glob("checkpoints/step-*"))


def launch(*words):
    print("$", *words, file=sys.stderr, flush=True)
    code = 0
    try:
        ar.launch(main, Config, argv=words)
    except SystemExit as left:
        code = left.code
    print(f"code {code}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if "ARGOSY_HOUSEHOLD" in os.environ:
        pass  # a rank, which runs main()
    elif sys.argv[1:]:
        point, rank = sys.argv[1:]
        launch("-n", "2", "--directory", "stopped", "--set", f"case=stop at {point} of {rank}")
        launch("-n", "2", "--resume", "stopped", "--set", "case=made")
    else:
        launch("-n", "5")
        assert not Path("runs").exists()
        launch("-n", "2", "--directory", "vanished", "--set", "case=vanish")
        launch("-n", "2", "--resume", "vanished", "--set", "case=")
        launch("-n", "2", "--resume", "vanished", "--set", "case=wider")
        launch("-n", "1", "--resume", "vanished")
        launch("-n", "2", "--directory", "twice", "--set", "case=twice")
        launch("-n", "1", "--directory", "alone", "--set", "case=twice")
        launch("-n", "2", "--directory", "broken", "--set", "case=break")
        launch("-n", "2", "--directory", "sleepy", "--set", "case=sleepy")
        launch("-n", "2", "--directory", "hopeless", "--set", "case=raise")
