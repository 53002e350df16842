"""Runs named cases of training, each in a household of its own, and prints what they came to as one JSON line.

`python household_cases.py FILE DIRECTORY CASE:RANKS…`: FILE is beside this one and has a function for each case, `CASE(run)`, which every rank runs;
what rank 0 returns is the result: it is not to be killed. Torch is imported once, before the forks.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # what an optimizer imports when it is made
import torch.utils.checkpoint

import argosy.data.datasets
import argosy.train.trainer  # noqa: F401
from argosy.native import isa
from argosy.train.seeds import seed_all
from argosy.worker import stops
from argosy.worker.household import keep_house
from argosy.worker.run import Run

ROWS, WIDTH = 512, 6
is_first_life = False
"""Whether this process is no replacement."""


class Numbers(torch.utils.data.Dataset):
    """Rows of random numbers, each with a class and a target."""

    def __init__(self, rows=ROWS, seed=1):
        made = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(rows, WIDTH, generator=made)
        self.labels = torch.randint(0, 4, (rows,), generator=made)
        self.fingerprint = f"numbers {rows} {seed}"

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, number):
        return self.inputs[number], self.labels[number]


def die_at(run, step, *, rank=1, last=None):
    """End this process like a killed one, if it is that rank's first and the step is that one, or one up to `last`."""
    if is_first_life and run.gang.rank == rank and step <= (run.step or 0) <= (last or step):
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    file, directory, *wanted = sys.argv[1:]
    sys.modules["household_cases"] = sys.modules["__main__"]
    spec = importlib.util.spec_from_file_location("cases", Path(__file__).with_name(file))
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    os.environ.update(isa.environment(os.environ))
    found = {}
    for place, each in enumerate(wanted):
        name, ranks = each.split(":")
        found[each] = run_case(
            getattr(cases, name), int(ranks), Path(directory) / f"{place}-{name}"
        )
        sys.stderr.write(found[each]["errors"])
    print(json.dumps(found), flush=True)


def run_case(case, num_ranks, directory):
    directory.mkdir(parents=True)
    run = Run(name="case", directory=directory, seed=3)

    def live():
        global is_first_life
        is_first_life = os.environ["ARGOSY_GENERATION"] == "1"
        stops.watch()
        torch.set_num_threads(1)
        seed_all(run.seed)
        result = case(run)
        if run.gang.rank == 0:
            (directory / "result.json").write_text(json.dumps(result))

    environment = {"ARGOSY_RUN": directory.name, "OMP_NUM_THREADS": "1"}
    with errors_in(directory / "errors"):
        try:
            end = keep_house(
                live, num_ranks=num_ranks, directory=str(directory), environment=environment
            )
            code = end.code
        except Exception:  # one case must not hide the results of the others
            traceback.print_exc()
            code = 99
    path = directory / "result.json"
    return {
        "code": code,
        "result": json.loads(path.read_text()) if path.exists() else None,
        "errors": (directory / "errors").read_text(),
        "saves": sorted(each.name for each in directory.glob("checkpoints/step-*")),
    }


@contextlib.contextmanager
def errors_in(path):
    """What this process and its ranks say on standard error goes to a file."""
    sys.stderr.flush()
    kept, own = os.dup(2), os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(own, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(own)


if __name__ == "__main__":
    main()
