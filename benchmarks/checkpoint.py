"""`checkpoint`: durable saves, cold loads, and what a save beside training costs, against torch's own ways and the bare disk; then damage, kills, bytes and memory.

Each section runs in processes of its own (programs/checkpoint_sides.py, checkpoint_peer.py, checkpoint_trainer.py, checkpoint_trials.py), its sides in turns; a section that fails gives null and says why.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    PROGRAMS,
    PYTHON,
    SideFailed,
    fair_environment,
    median,
    ratio,
    rounded,
    say,
    scratch,
    spread,
)
from benchmarks.teams import Team, peer_python, peer_versions

GIVES = {
    "saves": (
        "save_speedup_over_dcp",
        "save_speedup_over_torch_save_fsync",
        "save_over_raw_direct",
        "cpu_seconds_per_gb_over_dcp",
        "load_speedup_over_dcp",
        "load_over_raw_direct",
    ),
    "stalls": (
        "stall_over_dcp_async",
        "stall_over_dcp_async_reused_stager",
        "step_inflation_until_durable_over_dcp_async",
    ),
    "peer": ("stall_over_torch_checkpointing", "inflation_over_torch_checkpointing"),
    "pinned": ("pinned_stall_over_dcp_async", "pinned_inflation_until_durable_over_dcp_async"),
    "memory": ("ram_restore_over_disk_load", "ram_restore_cpu_over_disk_load"),
    "sizes": (
        "load_extra_mib",
        "quarter_shard_bytes_over_needed_dim0",
        "quarter_shard_bytes_over_needed_inner",
        "incremental_bytes_over_changed",
        "hf_export_extra_mib",
    ),
    "damage": ("corruptions_detected", "fallbacks_good"),
    "kills": ("committed_steps_lost", "torn_checkpoints"),
}
"""What is null when a section fails."""
MEBIBYTES, QUICK_MEBIBYTES = 1500, 400
PEER = "torch_checkpointing"
Times = dict[str, list[float]]


def run(
    *, quick: bool, only: str = "", trials: int | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Measure the sections that were asked for, and return the metrics; `trials` is the number of rounds, or of damages and kills."""
    chosen = [name for name in GIVES if not only or name in only.split(",")]
    size = QUICK_MEBIBYTES if quick else MEBIBYTES
    rounds = trials or (3 if quick else 7)
    tries, kills = trials or (100 if quick else 1000), trials or (30 if quick else 300)
    chance = 7 if seed is None else seed
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "saves": lambda: of_saves(measure("saves", rounds=rounds, mebibytes=size)),
        "stalls": lambda: of_stalls(measure("stalls", rounds=rounds, mebibytes=size)),
        "peer": lambda: of_peer(rounds, size),
        "pinned": lambda: of_pinned(rounds, size),
        "memory": lambda: of_memory(max(3, rounds // 2), size),
        "sizes": lambda: of_sizes(trial("sizes", 1, size, chance)),
        "damage": lambda: of_damage(trial("damage", tries, size, chance)),
        "kills": lambda: of_kills(trial("kills", kills, size, chance)),
    }
    found: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for section in chosen:
        say(f"section {section}")
        try:
            found |= sections[section]()
        except (SideFailed, subprocess.TimeoutExpired) as failure:
            notes[section] = str(failure)
            found |= dict.fromkeys(GIVES[section])
            say(f"{section} failed: {failure}")
    return found | ({"notes": notes} if notes else {})


def of_saves(result: dict[str, Any]) -> dict[str, Any]:
    """Durable saves and cold loads."""
    seconds = {side: median(times) for side, times in result["seconds"].items()}
    cpu = {side: median(times) for side, times in result["cpu"].items()}
    loads = {side: median(times) for side, times in result["loads"].items()}
    gigabytes = result["num_bytes"] / 1e9
    return {
        "state_gb": rounded(gigabytes, 3),
        "save_speedup_over_dcp": rounded(ratio(seconds["dcp"], seconds["ours"]), 2),
        "save_speedup_over_torch_save_fsync": rounded(ratio(seconds["torch"], seconds["ours"]), 2),
        "save_over_raw_direct": rounded(ratio(seconds["raw"], seconds["ours"]), 3),
        "staged_save_over_raw_direct": rounded(ratio(seconds["raw"], seconds["writer"]), 3),
        "cpu_seconds_per_gb_over_dcp": rounded(ratio(cpu["ours"], cpu["dcp"]), 3),
        "cpu_seconds_per_gb": rounded((cpu["ours"] or 0) / gigabytes, 3),
        "writer_cpu_seconds_per_gb": rounded((cpu["writer"] or 0) / gigabytes, 3),
        "load_speedup_over_dcp": rounded(ratio(loads["dcp"], loads["ours"]), 2),
        "load_over_raw_direct": rounded(ratio(loads["raw"], loads["ours"]), 3),
        "save_spread_seconds": {side: spread(one) for side, one in result["seconds"].items()},
        "load_spread_seconds": {side: spread(one) for side, one in result["loads"].items()},
    }


def of_stalls(result: dict[str, Any]) -> dict[str, Any]:
    """What training feels of a save."""
    stalls = {side: median(times) for side, times in result["stalls"].items()}
    losses = {side: median(times) for side, times in result["losses"].items()}
    return {
        "stall_over_dcp_async": rounded(ratio(stalls["ours"], stalls["dcp"])),
        "stall_over_dcp_async_reused_stager": rounded(ratio(stalls["ours"], stalls["reused"])),
        "step_inflation_until_durable_over_dcp_async": rounded(
            ratio(losses["ours"], losses["dcp"])
        ),
        "stall_spread_seconds": {side: spread(one) for side, one in result["stalls"].items()},
        "inflation_spread_seconds": {side: spread(one) for side, one in result["losses"].items()},
    }


def of_pinned(rounds: int, mebibytes: int) -> dict[str, Any]:
    """What a save costs a trainer, whose version is pinned, and what torch's asynchronous save costs a plain loop on the same model."""
    with (
        scratch() as directory,
        Team("ours", directory, 1) as ours,
        Team("dcp", directory, 1) as dcp,
    ):
        ours.spawn(
            [str(PYTHON), str(PROGRAMS / "checkpoint_trainer.py"), "-n", "1"],
            BENCH_FORM="pinned",
            BENCH_MEBIBYTES=str(mebibytes),
        )
        dcp.spawn(side_alone("dcp_turns", mebibytes, directory))
        stalls, losses = in_turns(ours, dcp, rounds)
    return {
        "pinned_stall_over_dcp_async": rounded(
            ratio(median(stalls["ours"]), median(stalls["dcp"]))
        ),
        "pinned_inflation_until_durable_over_dcp_async": rounded(
            ratio(median(losses["ours"]), median(losses["dcp"]))
        ),
        "pinned_stall_spread_seconds": {side: spread(one) for side, one in stalls.items()},
        "pinned_inflation_spread_seconds": {side: spread(one) for side, one in losses.items()},
    }


def of_peer(rounds: int, mebibytes: int) -> dict[str, Any]:
    """What a save beside training costs with ours and with torch_checkpointing, which has an environment of its own."""
    python = peer_python(PEER)
    with (
        scratch() as directory,
        Team("ours", directory, 1) as ours,
        Team(PEER, directory, 1) as peer,
    ):
        ours.spawn(side_alone("our_turns", mebibytes, directory))
        program = str(PROGRAMS / "checkpoint_peer.py")
        peer.spawn([str(python), program, str(mebibytes), str(directory)])
        stalls, losses = in_turns(ours, peer, rounds)
        for team in (ours, peer):
            wrong = team.ask("check")["wrong"]
            if wrong:
                raise SideFailed(f"{team.name}: {wrong[0]} and {len(wrong) - 1} more are torn")
    return {
        "stall_over_torch_checkpointing": rounded(
            ratio(median(stalls["ours"]), median(stalls[PEER]))
        ),
        "inflation_over_torch_checkpointing": rounded(
            ratio(median(losses["ours"]), median(losses[PEER]))
        ),
        "peer_stall_spread_seconds": {side: spread(one) for side, one in stalls.items()},
        "peer_inflation_spread_seconds": {side: spread(one) for side, one in losses.items()},
        "versions": peer_versions(PEER, ("torch", PEER)),
        "remarks": {PEER: "direct I/O off; its saves are never flushed: over is not durable"},
    }


def side_alone(section: str, mebibytes: int, directory: Path) -> list[str]:
    """One side of checkpoint_sides.py that takes turns with another process."""
    program = str(PROGRAMS / "checkpoint_sides.py")
    return [str(PYTHON), program, section, "0", str(mebibytes), str(directory)]


def in_turns(ours: Team, other: Team, rounds: int) -> tuple[Times, Times]:
    """Seconds of stall and of loss of each save, after one that warms up."""
    stalls: Times = {ours.name: [], other.name: []}
    losses: Times = {ours.name: [], other.name: []}
    for team in (ours, other):
        team.wait_ready()
    for turn in range(rounds + 1):
        for team in (ours, other) if turn % 2 else (other, ours):
            answer = team.ask("save")
            if turn:
                stalls[team.name].append(answer["stall"])
                losses[team.name].append(answer["lost"])
    return stalls, losses


def of_memory(rounds: int, mebibytes: int) -> dict[str, Any]:
    """How long a trainer takes to be there again after every rank was killed, from memory, and how long from the disk."""
    seconds: Times = {"memory": [], "disk": []}
    cpu: Times = {"memory": [], "disk": []}

    def note(side: str, ranks: list[dict[str, Any]]) -> None:
        seconds[side].append(max(one["seconds"] for one in ranks))
        cpu[side].append(sum(one["cpu"] for one in ranks))

    for _ in range(rounds):
        with scratch() as directory:
            killed = trained(directory, "killed", mebibytes, BENCH_STEPS="4")
            if [one["step"] for one in killed[:4]] != [0, 0, 2, 2]:
                raise SideFailed(f"the ranks were not all replaced: {killed}")
            note("memory", killed[2:4])
            (runs,) = (directory / "runs").iterdir()
            for path in runs.rglob("step-*/*"):
                forget(path)
            again = trained(directory, "again", mebibytes, "--resume", str(runs), BENCH_STEPS="4")
            note("disk", again[:2])
            if again[-1]["digest"] != killed[-1]["digest"]:
                raise SideFailed("what was loaded is not what was saved")
    return {
        "ram_restore_over_disk_load": rounded(
            ratio(median(seconds["memory"]), median(seconds["disk"]))
        ),
        "ram_restore_cpu_over_disk_load": rounded(
            ratio(median(cpu["memory"]), median(cpu["disk"]))
        ),
        "ram_restore_seconds": spread(seconds["memory"]),
        "disk_restore_seconds": spread(seconds["disk"]),
    }


def trained(
    directory: Path, name: str, mebibytes: int, *words: str, **environment: str
) -> list[dict[str, Any]]:
    """What the two ranks of checkpoint_trainer.py wrote down, in time order."""
    record = directory / name
    if words:
        for rank in range(2):
            record.with_suffix(f".killed{rank}").touch()
    done = subprocess.run(
        [str(PYTHON), str(PROGRAMS / "checkpoint_trainer.py"), "-n", "2", *words],
        env=fair_environment(
            BENCH_FORM="memory",
            BENCH_MEBIBYTES=str(mebibytes),
            BENCH_RECORD=str(record),
            **environment,
        ),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise SideFailed(f"the trainer ended with {done.returncode}: {done.stderr[-500:]}")
    return [json.loads(line) for line in record.read_text().splitlines()]


def forget(path: Path) -> None:
    """Out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def of_sizes(result: dict[str, Any]) -> dict[str, Any]:
    """Bytes and memory."""
    return {
        "load_extra_mib": rounded(result["load_extra_mib"], 1),
        "quarter_shard_bytes_over_needed_dim0": rounded(result["quarter_dim0"], 3),
        "quarter_shard_bytes_over_needed_inner": rounded(result["quarter_inner"], 3),
        "incremental_bytes_over_changed": rounded(result["incremental"], 3),
        "hf_export_extra_mib": rounded(result["hf_export_extra_mib"], 1),
    }


def of_damage(result: dict[str, Any]) -> dict[str, Any]:
    """Bit flips, truncations, swapped and missing files."""
    return {
        "corruptions": result["trials"],
        "corruptions_detected": result["detected"],
        "fallbacks_good": result["fallbacks"],
        "corruptions_missed": result["missed"],
    }


def of_kills(result: dict[str, Any]) -> dict[str, Any]:
    """SIGKILL of the process that saves, commits, keeps two and collects."""
    return {
        "sigkill_trials": result["trials"],
        "committed_steps_lost": result["lost"],
        "torn_checkpoints": result["torn"],
        "sigkill_steps_saved": result["steps"],
    }


def trial(section: str, trials: int, mebibytes: int, seed: int) -> dict[str, Any]:
    """One section of checkpoint_trials.py."""
    with scratch() as directory:
        words = [section, str(trials), str(mebibytes), str(directory), str(seed)]
        return answer_of("checkpoint_trials.py", *words)


def measure(section: str, *, rounds: int, mebibytes: int) -> dict[str, Any]:
    """One section in a process of its own."""
    with scratch() as directory:
        words = [section, str(rounds), str(mebibytes), str(directory)]
        return answer_of("checkpoint_sides.py", *words)


def answer_of(program: str, *words: str) -> dict[str, Any]:
    """The JSON line that a program ends with."""
    done = subprocess.run(
        [str(PYTHON), str(PROGRAMS / program), *words],
        env=fair_environment(),
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise SideFailed(f"{words[0]} ended with {done.returncode}: {lines[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
