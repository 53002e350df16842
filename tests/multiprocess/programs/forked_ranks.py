"""Runs named cases on P forked ranks over one backend and prints what each case did on each rank as one JSON line.

`python forked_ranks.py MODULE SIZE[,SIZE…] [CASE…]`: MODULE is a file beside this one whose functions `case_*` take (rank, size). Torch is
imported once, before the forks; each size gets its own ranks, its own store and its own process group.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import argosy.move.groups  # noqa: F401 - registers the backend

DEADLINE_SECONDS = 100


def main() -> int:
    module = load(Path(__file__).parent / sys.argv[1])
    sizes = [int(size) for size in sys.argv[2].split(",")]
    cases = sys.argv[3:] or [name for name in vars(module) if name.startswith("case_")]
    found = {}
    for size in sizes:
        wanted = [name for name in cases if size in getattr(getattr(module, name), "sizes", sizes)]
        found[str(size)] = run(module, size, wanted)
    print(json.dumps(found), flush=True)
    return 0


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run(module, size: int, cases: list[str]) -> dict[str, list[str]]:
    """By case: what each rank says, "ok" or a traceback."""
    with tempfile.TemporaryDirectory() as scratch:
        pids = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = member(module, rank, size, cases, Path(scratch))
                finally:
                    os._exit(code)
            pids[rank] = pid
        wait_for(list(pids.values()))
        said = {case: [] for case in cases}
        for rank in range(size):
            file = Path(scratch) / f"{rank}.json"
            own = json.loads(file.read_text()) if file.exists() else {}
            for case in cases:
                said[case].append(own.get(case, "never ran"))
        return said


def wait_for(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    left = set(pids)
    while left and time.monotonic() < deadline:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def member(module, rank: int, size: int, cases: list[str], scratch: Path) -> int:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    prepare = getattr(module, "prepare", None)
    if prepare is not None:
        prepare(rank, size)
    before = leftovers()
    dist.init_process_group(
        "argosy",
        store=dist.FileStore(str(scratch / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
    )
    said = {}
    for case in cases:
        try:
            getattr(module, case)(rank, size)
            said[case] = "ok"
        except BaseException:
            said[case] = traceback.format_exc()
            break
    (scratch / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
    if all(text == "ok" for text in said.values()) and cases:
        after = leftovers()
        if after != before:
            said[cases[-1]] = f"left behind: {before} before, {after} after"
    (scratch / f"{rank}.json").write_text(json.dumps(said))
    return 0


def leftovers() -> dict[str, object]:
    """Memfds of groups, process descriptors and threads of ours in this process."""
    gc.collect()  # models are cycles, and buffers of the fast path live as long as their model
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    mapped = Path("/proc/self/maps").read_text().count("memfd:argosy")
    return {
        "memfds": sum("argosy" in link for link in links),
        "pidfds": sum("pidfd" in link for link in links),
        "mapped": mapped,
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("argosy")),
    }


if __name__ == "__main__":
    sys.exit(main())
