"""`argosy demo`: the main job on this machine. A GPT is trained, a rank is killed in the middle, and the bits are compared.

Packs the standard library's sources, trains on all cores, sends SIGKILL to a rank, lets the run finish, and trains once more undisturbed on
another number of ranks: parameters and moments must be the same. Everything is what a person could type, and everything shown is checked:
exit code 0 means that it happened. A cluster that it had to start is stopped again; the runs stay in the history. Never imports torch.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from argosy.cli.arguments import Arguments
from argosy.cli.connection import connect
from argosy.cli.demochecks import (
    Kill,
    Plan,
    check_disturbed,
    check_undisturbed,
    figures,
    mean_end,
)
from argosy.cli.demoscreen import Field, Screen
from argosy.cli.watchedrun import Member, WatchedRun
from argosy.control.home import open_cluster
from argosy.data.corpus import stdlib_corpus
from argosy.data.tokenfiles import TokenFile

MOST_RANKS = 64
FEWEST_LANES = 8
STEPS, QUICK_STEPS = 200, 40
KILL_AT = 0.4
"""Part of the way at which the rank dies."""


def demo(arguments: Arguments) -> int:
    """Run it all; 0 when everything shown really happened."""
    started = time.monotonic()
    screen = Screen(is_error_stream=bool(arguments.get("json")))
    with (
        _stopped_by_signals(),
        _cluster(screen) as was_up,
        tempfile.TemporaryDirectory(prefix="argosy-demo-") as scratch,
    ):
        plan = _plan(Path(scratch) / "stdlib.bin", is_quick=bool(arguments.get("quick")))
        found = _perform(plan, screen)
    found["seconds"] = round(time.monotonic() - started, 1)
    failed = [name for name, is_true in found["checks"].items() if not is_true]
    found["ok"] = not failed
    if arguments.get("json"):
        print(json.dumps(found))
    elif not failed:
        _tell_how_to_look(found, was_up, screen)
    for name in failed:
        print(f"argosy demo: not so: {name}", file=sys.stderr)
    return 1 if failed else 0


def _plan(corpus: Path, *, is_quick: bool) -> Plan:
    ranks = max(2, min(len(os.sched_getaffinity(0)), MOST_RANKS))
    lanes = max(FEWEST_LANES, 1 << ranks.bit_length())
    steps = QUICK_STEPS if is_quick else STEPS
    plan = Plan(ranks=ranks, lanes=lanes, steps=steps, corpus=corpus)
    plan.settings = [f"data={corpus}", f"steps={steps}", f"lanes={lanes}"]
    if is_quick:
        plan.settings += ["width=64", "sequence_length=128", "sample_tokens=60"]
    return plan


def _perform(plan: Plan, screen: Screen) -> dict[str, Any]:
    checks: dict[str, bool] = {}
    found: dict[str, Any] = {"ranks": plan.ranks, "lanes": plan.lanes, "checks": checks}
    found["tokens"] = _pack(plan, screen)
    screen.section("train")
    run, kill = _train(plan, screen, ranks=plan.ranks, should_kill=True)
    checks |= check_disturbed(run, kill, plan)
    if run.outcome != "succeeded":
        return found
    result = run.result()
    found |= figures(run, kill, result)
    _show_sample(result, screen)
    screen.section("proof")
    screen.say("the same training on another number of ranks, undisturbed")
    other, _ = _train(plan, screen, ranks=plan.other_ranks, should_kill=False)
    proof = other.result()
    found["proof"] = {"ranks": plan.other_ranks, "digest": proof.get("digest", "")}
    checks |= check_undisturbed(other, plan)
    checks["the digests are equal"] = bool(proof) and proof["digest"] == result.get("digest")
    _report(plan, found, screen)
    return found


def _pack(plan: Plan, screen: Screen) -> int:
    began = time.monotonic()
    tokens = TokenFile(stdlib_corpus(plan.corpus)).count
    took = time.monotonic() - began
    text = f"sources of Python {platform.python_version()}'s standard library"
    screen.section("data")
    screen.say(f"{tokens:,} bytes of the {text}, packed in {took:.1f} s")
    return tokens


def _train(
    plan: Plan, screen: Screen, *, ranks: int, should_kill: bool
) -> tuple[WatchedRun, Kill | None]:
    """One run to its end, in view; with a kill in the middle if it should be."""
    script = Path(__file__).parents[1] / "worker" / "demo_training.py"
    name = f"demo-{os.getpid()}{'' if should_kill else '-proof'}"
    screen.command(f"argosy run {script.name} -n {ranks}")
    settings = [word for setting in plan.settings for word in ("--set", setting)]
    run = WatchedRun(open_cluster(), ["-n", str(ranks), "--name", name, *settings, str(script)])
    kill: Kill | None = None

    def look() -> None:
        nonlocal kill
        if should_kill and kill is None:
            kill = _kill_in_the_middle(run, plan, screen)
        elif kill is not None:
            _tell_of_recovery(run, kill, plan, screen)
        screen.show(len(run.steps), plan.steps, _fields(run, plan, ranks))

    try:
        run.follow(look)
    finally:
        screen.clear()
        if not run.outcome:
            screen.say("stopping the run")
            run.stop()
    if run.outcome == "succeeded" and run.steps:
        losses = [step["loss"] for step in run.steps]
        screen.say(
            f"{len(losses)} steps, loss {losses[0]:.2f} to {mean_end(losses):.2f}  ",
            (screen.sparkline(losses), "cyan"),
            f"  {run.tokens_per_second():,.0f} tokens/s",
        )
    else:
        _explain(run, screen)
    return run, kill


def _fields(run: WatchedRun, plan: Plan, ranks: int) -> list[Field]:
    """What the live view says."""
    if not run.steps:
        alive = len(run.living())
        return [
            ("starting" if not alive else f"{alive} of {ranks} ranks prepare the first step", "")
        ]
    last, alive = run.steps[-1], len(run.living())
    return [
        (f"step {last['step'] + 1}/{plan.steps}", "bold"),
        (f"loss {last['loss']:.3f}", ""),
        (f"{last['tokens'] / last['seconds']:,.0f} tokens/s", ""),
        (f"generation {run.generation}", "" if run.generation == 1 else "yellow"),
        (f"{alive} of {ranks} ranks", "green" if alive == ranks else "bold red"),
    ]


def _kill_in_the_middle(run: WatchedRun, plan: Plan, screen: Screen) -> Kill | None:
    """SIGKILL to one rank, once enough steps are done."""
    if len(run.steps) < plan.steps * KILL_AT:
        return None
    victim = next((each for each in run.living() if each.rank == plan.victim), None)
    if victim is None:
        return None
    run.read_steps()
    kill = Kill(victim.pid, run.steps[-1]["step"] + 1, time.time(), run.median_seconds())
    os.kill(victim.pid, signal.SIGKILL)
    screen.command(f"kill -9 {victim.pid}", f"rank {victim.rank}, in step {kill.step + 1}")
    return kill


def _tell_of_recovery(run: WatchedRun, kill: Kill, plan: Plan, screen: Screen) -> None:
    """Say what came after the kill, when it comes."""
    if kill.commit_seconds is None:
        after = next((step for step in run.steps if step["time"] > kill.at), None)
        if after is not None:
            kill.commit_seconds = after["time"] - kill.at
            screen.say(
                f"step {after['step'] + 1} is committed {kill.commit_seconds:.2f} s after the kill",
                (f"   a step takes {kill.median_seconds:.2f} s", "dim"),
            )
    if not kill.is_replaced:
        new = _replacement(run, plan)
        if new is not None:
            kill.is_replaced = True
            screen.say(f"generation {run.generation}: a new rank {new.rank}, pid {new.pid}")


def _replacement(run: WatchedRun, plan: Plan) -> Member | None:
    ranks = (each for each in run.living() if each.rank == plan.victim and each.generation > 1)
    return next(ranks, None)


def _show_sample(result: dict[str, Any], screen: Screen) -> None:
    screen.section("sample")
    text = result.get("prompt", "") + result.get("sample", "")
    for number, line in enumerate(text.rstrip().splitlines()[:12]):
        shown = "".join(char if char.isprintable() else "?" for char in line.expandtabs(4))
        screen.say((shown, "bold" if number == 0 else ""))


def _report(plan: Plan, found: dict[str, Any], screen: Screen) -> None:
    labels = (f"{plan.ranks} ranks, one killed", f"{plan.other_ranks} ranks, undisturbed")
    is_equal = found["checks"]["the digests are equal"]
    style = "bold green" if is_equal else "bold red"
    digests = found["digest"], found["proof"]["digest"]
    screen.compare(dict(zip(labels, digests, strict=True)), style)
    what = "SHA-256 of all parameters and both moments of AdamW"
    screen.say((f"{'the same bits' if is_equal else 'NOT the same'}: {what}", "bold"))
    screen.section("report")
    beyond = max(0.0, found.get("recovery_seconds", 0.0))
    screen.item("model", f"GPT, {found['parameters']:,} parameters, {plan.lanes} lanes")
    screen.item("speed", f"{found['tokens_per_second']:,.0f} tokens/s on {plan.ranks} ranks")
    screen.item("recovery", f"{beyond:.2f} s beyond a step, from the kill to the next commit")
    screen.item("recomputed", f"{found['lanes_recomputed']} lanes, in the dead rank's place")


def _tell_how_to_look(found: dict[str, Any], was_up: bool, screen: Screen) -> None:
    screen.item("in all", f"{found['seconds']:.0f} s")
    screen.item("to look", f"{'' if was_up else 'argosy up; '}argosy why {found['run']}")


def _explain(run: WatchedRun, screen: Screen) -> None:
    """The run did not succeed: its story, as `argosy why` tells it."""
    story = _argosy("why", run.handle.run)
    screen.say((f"the run ended: {run.outcome}", "bold red"))
    screen.say(story.stdout.strip() or story.stderr.strip())


@contextmanager
def _cluster(screen: Screen) -> Iterator[bool]:
    """Whether there was a cluster; else it is stopped at the end, and further signals wait until that is done."""
    was_up = connect().client.status() is not None
    try:
        yield was_up
    finally:
        screen.clear()
        if not was_up:
            before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
            _argosy("down")
            for number, handler in before.items():
                signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo in order, as Ctrl-C does."""

    numbers = (signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _argosy(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "argosy", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, start_new_session=True
    )
