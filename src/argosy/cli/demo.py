"""`argosy demo`: four torch ranks train, one is killed in the middle, the run heals, the story is told.

It uses the same commands a person would type and checks what it shows: all steps done, one death, one new generation.
A cluster that it had to start is stopped again at the end; the run stays in the history.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import argosy

RANKS = 4
VICTIM = 2
STEPS = 300
DEADLINE_SECONDS = 180.0

HELP = """usage: argosy demo

Starts four torch ranks of a small training script, kills one of them, and shows how the run heals.
Takes well under a minute; needs nothing but this machine.
"""


def main(arguments: list[str]) -> int:
    """Run the demo; 0 when everything it shows really happened."""
    if arguments:
        print(HELP)
        return 0 if arguments[0] in ("-h", "--help") else 64
    was_up = _argosy("status", "--json").returncode == 0
    script = Path(argosy.__file__).parent / "worker" / "demo_training.py"
    with tempfile.TemporaryDirectory(prefix="argosy-demo-") as scratch:
        name = f"demo-{os.getpid()}"
        _say(f"$ argosy run -n {RANKS} --name {name} demo_training.py")
        checkpoint = Path(scratch) / "state.npz"
        environment = {**os.environ, "CHECKPOINT": str(checkpoint), "STEPS": str(STEPS)}
        run = subprocess.Popen(
            [sys.executable, "-m", "argosy", "run", "-n", str(RANKS), "--name", name, str(script)],
            env=environment,
        )
        try:
            killed = _kill_a_rank_in_the_middle(run, name, checkpoint)
            code = run.wait(timeout=DEADLINE_SECONDS)
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
                run.wait(timeout=30)
    healed = killed and code == 0 and _tell_the_story(name)
    if not was_up:
        _argosy("down")
    if not healed:
        print("argosy demo: something did not happen as it should: see above", file=sys.stderr)
    return 0 if healed else 1


def _kill_a_rank_in_the_middle(run: subprocess.Popen[bytes], name: str, checkpoint: Path) -> bool:
    """Wait until the run has made some steps, then send SIGKILL to one rank."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while run.poll() is None and time.monotonic() < deadline:
        if checkpoint.exists():
            processes = _processes(name)
            victim = next((p for p in processes if p["rank"] == VICTIM and p["pid"]), None)
            if victim is not None:
                _say(f"$ kill -9 {victim['pid']}        # rank {VICTIM}")
                os.kill(victim["pid"], signal.SIGKILL)
                return True
        time.sleep(0.05)
    return False


def _tell_the_story(name: str) -> bool:
    _say(f"$ argosy why {name}")
    story = _argosy("why", name)
    print(story.stdout, end="")
    view = _view(name)
    generation = max((role["generation"] for role in view["roles"]), default=0)
    _say(
        f"{RANKS} ranks, {STEPS} steps, 1 death, generation {generation}, outcome {view['outcome']}"
    )
    _say(f"more: argosy events {name} · argosy logs {name} · argosy ps {name}")
    return bool(view["outcome"] == "succeeded" and generation == 2)


def _view(name: str) -> dict[str, Any]:
    listing = json.loads(_argosy("ps", name, "--json").stdout)
    view: dict[str, Any] = listing["runs"][0]
    return view


def _processes(name: str) -> list[dict[str, Any]]:
    return [process for role in _view(name)["roles"] for process in role["processes"]]


def _argosy(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "argosy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _say(text: str) -> None:
    print(f"\n{text}" if text.startswith("$") else text, file=sys.stderr, flush=True)
