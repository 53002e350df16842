"""Trials of the benchmark `checkpoint` that need no peer: damage, kills, and how much is read, written and held; prints a JSON line.

`python checkpoint_trials.py SECTION TRIALS MEBIBYTES DIRECTORY SEED`; `load` and `hf_export` are steps of `sizes`. Every trial is checked by what a load gives, not by what is reported.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from argosy.checkpoint import Checkpointer, Keep, exports
from argosy.checkpoint.reads import Statistics
from argosy.errors import ArgosyError

MIB = 1 << 20
WIDTH = 1024


def values(step: int) -> dict[str, torch.Tensor]:
    """A small state that is another one at each step."""
    generator = torch.Generator().manual_seed(step)
    shapes = [(512, 512), (300, 64), (7,), (128, 128), ()]
    return {f"t{place}": torch.randn(s, generator=generator) for place, s in enumerate(shapes)}


def model_of(step: int) -> torch.nn.Module:
    torch.manual_seed(step)
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 64))


# --- damage -----------------------------------------------------------------------------------


def damage(trials: int, directory: Path, draw: random.Random) -> dict[str, Any]:
    """Spoil the newest of two checkpoints in one way, look, and mend it again."""
    store = directory / "store"
    with Checkpointer(store) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": model_of(step), "user": values(step)}, streams=False)
    good = {path: path.read_bytes() for path in sorted((store / "step-000000002").iterdir())}
    detected = fallbacks = 0
    missed: list[str] = []
    kinds = {"flip": flip, "truncate": truncate, "swap": swap, "remove": remove}
    for trial in range(trials):
        kind = list(kinds)[trial % len(kinds)]
        spoilt = kinds[kind](good, draw)
        is_detected = not Checkpointer(store).catalogue.verify(2).is_good
        is_good = loads_what_it_says(store)
        detected += is_detected
        fallbacks += is_good
        if not (is_detected and is_good):
            missed.append(f"{kind} of {', '.join(path.name for path in spoilt)}")
        for path in spoilt:
            path.write_bytes(good[path])
    if not Checkpointer(store).catalogue.verify(2).is_good:
        raise SystemExit("the trials left damage behind")
    return {"trials": trials, "detected": detected, "fallbacks": fallbacks, "missed": missed[:10]}


def flip(good: dict[Path, bytes], draw: random.Random) -> list[Path]:
    path = draw.choice(list(good))
    data = bytearray(good[path])
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return [path]


def truncate(good: dict[Path, bytes], draw: random.Random) -> list[Path]:
    path = draw.choice(list(good))
    path.write_bytes(good[path][: draw.randrange(len(good[path]))])
    return [path]


def swap(good: dict[Path, bytes], draw: random.Random) -> list[Path]:
    """A file's place is taken by another file of the checkpoint, or by its own of the step before."""
    path, other = draw.sample(list(good), 2)
    older = path.parent.parent / "step-000000001" / path.name
    if draw.random() < 0.5 and older.exists() and older.read_bytes() != good[path]:
        path.write_bytes(older.read_bytes())
        return [path]
    path.write_bytes(good[other])
    other.write_bytes(good[path])
    return [path, other]


def remove(good: dict[Path, bytes], draw: random.Random) -> list[Path]:
    path = draw.choice(list(good))
    path.unlink()
    return [path]


def loads_what_it_says(store: Path) -> bool:
    """Whether a load gives all values of the step that it names."""
    model, user = model_of(3), dict[str, Any]()
    try:
        loaded = Checkpointer(store).load({"model": model, "user": user}, streams=False)
    except ArgosyError:
        return False
    if loaded is None:
        return False
    same = [torch.equal(user[name], one) for name, one in values(loaded.step).items()]
    wanted = model_of(loaded.step).state_dict()
    return all(same) and all(torch.equal(model.state_dict()[name], wanted[name]) for name in wanted)


# --- kills ------------------------------------------------------------------------------------


def save_for_ever(store: Path, first: int, pipe: int) -> None:
    """Save, commit, keep two and collect; tell a step only when it is durable. Every other save goes on beside the next one."""
    torch.set_num_threads(1)
    frozen = torch.ones(200_000)
    checkpointer = Checkpointer(store, keep=Keep(last=2))
    for step in range(first, first + 100_000):
        state = {"x": torch.full((70_000,), float(step)), "frozen": frozen, "step": step}
        if step % 2:
            checkpointer.save(step, state)
        else:
            checkpointer.save(step, state, wait=False).wait()
        os.write(pipe, step.to_bytes(8, "little"))


def kills(trials: int, directory: Path, draw: random.Random) -> dict[str, Any]:
    store = directory / "store"
    told = lost = torn = seen = 0
    for trial in range(trials):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                signal.alarm(120)
                save_for_ever(store, told + 1, writing)
            finally:
                os._exit(70)
        os.close(writing)
        if trial % 4:  # else the kill hits the opening, the lock and the sweep
            os.read(reading, 8)
        time.sleep(draw.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while data := os.read(reading, 8):
            told = int.from_bytes(data, "little")
        os.close(reading)
        checkpointer = Checkpointer(store)
        # A save that was staged is finished by the writer process; what is there then must be whole.
        x = torch.zeros(70_000)
        loaded = checkpointer.load({"x": x, "frozen": torch.zeros(200_000), "step": 0})
        newest = 0 if loaded is None else loaded.step
        lost += newest < told
        if loaded is not None:
            torn += not torch.equal(x, torch.full((70_000,), float(newest)))
            torn += bool(loaded.skipped)
        seen += newest > 0
        told = max(told, newest)
    return {"trials": trials, "lost": lost, "torn": torn, "steps": told, "trials_with_a_step": seen}


# --- sizes ------------------------------------------------------------------------------------


class Peak:
    """The most memory that this process holds beyond what it held at the beginning."""

    def __enter__(self) -> Peak:
        self._is_over = threading.Event()
        self._first = self._most = _own_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def mebibytes(self) -> float:
        return (self._most - self._first) / MIB

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self._most = max(self._most, _own_bytes())


def _own_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def trained(mebibytes: int) -> dict[str, Any]:
    layers = max(4, mebibytes * MIB // (WIDTH * WIDTH * 12))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def in_another_process(what: str, mebibytes: int, directory: Path) -> float:
    words = [sys.executable, __file__, what, "1", str(mebibytes), str(directory), "0"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def peak_of_load(mebibytes: int, directory: Path) -> float:
    state, checkpointer = trained(mebibytes), Checkpointer(directory / "whole")
    with Peak() as peak:
        checkpointer.load(state)
    return peak.mebibytes


def peak_of_export(directory: Path) -> float:
    with Checkpointer(directory / "whole").open(1) as opened, Peak() as peak:
        exports.export(opened, directory / "hf", "hf")
    return peak.mebibytes


def sizes(mebibytes: int, directory: Path) -> dict[str, Any]:
    """Memory of a load and of an export, bytes of a quarter and of an incremental save."""
    with Checkpointer(directory / "whole") as checkpointer:
        checkpointer.save(1, trained(mebibytes))
    # Each in a process of its own: memory that an earlier one took and kept would not be counted.
    found: dict[str, Any] = {
        f"{what}_extra_mib": in_another_process(what, mebibytes, directory)
        for what in ("load", "hf_export")
    }
    with Checkpointer(directory / "whole").open(1) as opened:
        first, inner = Statistics(), Statistics()
        for name in opened.names():
            lazy = opened.tensor(name)
            if len(lazy.shape) == 2:
                _ = lazy[: lazy.shape[0] // 4]
                _add(first, lazy.statistics, lazy.dtype.itemsize * lazy.shape.numel() // 4)
                _ = lazy[:, : lazy.shape[1] // 4]
                _add(inner, lazy.statistics, lazy.dtype.itemsize * lazy.shape.numel() // 4)
        found["quarter_dim0"] = first.bytes_read / first.bytes_wanted
        found["quarter_inner"] = inner.bytes_read / inner.bytes_wanted
    found["incremental"] = incremental(mebibytes, directory / "frozen")
    return found


def _add(total: Statistics, one: Statistics, wanted: int) -> None:
    total.bytes_read += one.bytes_read
    total.bytes_wanted += wanted


def incremental(mebibytes: int, store: Path) -> float:
    """Bytes that a second save takes on the disk over those of the tenth that has changed."""
    layers = max(10, mebibytes * MIB // (WIDTH * WIDTH * 4))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    changing = list(model[: layers // 10].parameters())
    for parameter in model[layers // 10 :].parameters():
        parameter.requires_grad_(False)
    with Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": model})
        with torch.no_grad():
            for parameter in changing:
                parameter.add_(1.0)
        checkpointer.save(2, {"model": model})
    new = [path for path in (store / "step-000000002").iterdir() if path.stat().st_nlink == 1]
    return sum(path.stat().st_size for path in new) / sum(p.nbytes for p in changing)


def main() -> None:
    section, trials, mebibytes, directory, seed = sys.argv[1:6]
    torch.set_num_threads(1)
    path, draw = Path(directory), random.Random(int(seed))
    sections: dict[str, Callable[[], Any]] = {
        "damage": lambda: damage(int(trials), path, draw),
        "kills": lambda: kills(int(trials), path, draw),
        "sizes": lambda: sizes(int(mebibytes), path),
        "load": lambda: peak_of_load(int(mebibytes), path),
        "hf_export": lambda: peak_of_export(path),
    }
    print(json.dumps(sections[section]()), flush=True)


if __name__ == "__main__":
    main()
