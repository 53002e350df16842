"""Ranks that die, never come, call something else, abort or are interrupted in collectives: typed errors, nothing left, no hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent.parent / "multiprocess" / "programs" / "doomed_rank.py"
SIZE, VICTIM = 3, 1
SPLITS = {
    "a rank of another host": {"DOOMED_RANK": "1", "DOOMED_SPLIT_AT": "2"},
    "the only rank of another host": {"DOOMED_RANK": "2", "DOOMED_SPLIT_AT": "2"},
    "the first rank of a host": {"DOOMED_RANK": "0", "DOOMED_SPLIT_AT": "2"},
}
DEATHS = (
    "killed_in_the_middle",
    "killed_before_it_comes",
    "killed_while_others_wait_in_the_background",
    "killed_before_its_message",
    "killed_before_it_takes_a_message",
    "killed_in_the_middle_of_a_message",
    "killed_in_a_batch_of_messages",
    "killed_while_gloo_does_the_work",
    "killed_in_a_group_of_some",
    "killed_while_a_child_of_it_lives",
    "killed_before_its_message_while_a_child_of_it_lives",
)
MISMATCHES = {
    "different_operations": (
        "all_gather of 3 x float32",
        "all_reduce(sum) of 21 x float32, shape (7, 3)",
    ),
    "different_sizes": ("of 8 x float32", "of 4 x float32"),
    "different_dtypes_in_the_background": ("of 4 x float64", "of 4 x float32"),
    "different_splits": ("all_to_all of float32", "all_to_all of float32"),
    "one_goes_to_gloo": ("all_reduce(bor)", "all_reduce(sum)"),
}
OTHERS = (
    "killed_under_ddp",
    "killed_under_fsdp",
    "stopped_rank",
    "killed_before_a_group_is_made",
    "absent_when_a_group_is_made",
    "aborted",
    "aborted_from_another_thread",
    "interrupted",
    "interrupted_early",
)


@pytest.fixture(scope="module", params=["native", "torch operations"])
def outcomes(request, tmp_path_factory):
    native = "1" if request.param == "native" else "0"
    stores = tmp_path_factory.mktemp("stores")
    return run([*DEATHS, *MISMATCHES, *OTHERS], stores, ARGOSY_NATIVE=native)


@pytest.fixture(scope="module", params=SPLITS)
def split(request, tmp_path_factory):
    """(the victim, outcomes) where the ranks count as being on two hosts."""
    chosen = SPLITS[request.param]
    fates = [*DEATHS, *MISMATCHES, "stopped_rank", "aborted"]
    return int(chosen["DOOMED_RANK"]), run(fates, tmp_path_factory.mktemp("stores"), **chosen)


def run(fates, stores, **more):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(SIZE), str(stores), *fates],
        env=os.environ
        | {
            "GLOO_SOCKET_IFNAME": "lo",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "OMP_NUM_THREADS": "1",
        }
        | more,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)  # which ranks still ran, and where
    found, ranks = {}, []
    for line in done.stdout.splitlines():
        record = json.loads(line)
        if "fate" in record:
            found[record["fate"]] = {entry["rank"]: entry for entry in ranks}
            ranks = []
        else:
            ranks.append(record)
    return found


@pytest.mark.parametrize("fate", DEATHS)
def test_all_others_learn_who_was_killed(outcomes, fate):
    survivors = outcomes[fate]
    assert sorted(survivors) == [0, 2]
    for said in survivors.values():
        assert (said["error"], said["lost"]) == ("PeerLost", VICTIM), said
        assert said["again"] == "PeerLost"  # a broken group stays broken
        assert said["left"] == []


@pytest.mark.parametrize("fate", MISMATCHES)
def test_a_mismatch_names_both_ranks_calls_and_call_sites(outcomes, fate):
    theirs, ours = MISMATCHES[fate]
    everybody = outcomes[fate]
    assert sorted(everybody) == [0, 1, 2]
    for rank, said in everybody.items():
        assert said["error"] == "MismatchError", said
        assert "doomed_rank.py" in said["text"], said["text"]
        assert said["left"] == []
        if rank != VICTIM:
            assert f"rank {VICTIM}: " in said["text"]
            assert theirs in said["text"], said["text"]
            assert ours in said["text"], said["text"]


@pytest.mark.parametrize("fate", DEATHS)
def test_all_hosts_learn_who_was_killed(split, fate):
    victim, outcomes = split
    survivors = outcomes[fate]
    assert sorted(survivors) == [rank for rank in range(SIZE) if rank != victim]
    for said in survivors.values():
        assert (said["error"], said["lost"]) == ("PeerLost", victim), said
        assert said["again"] == "PeerLost"
        assert said["left"] == []


@pytest.mark.parametrize("fate", MISMATCHES)
def test_a_mismatch_between_hosts_names_both_ranks_calls_and_call_sites(split, fate):
    victim, outcomes = split
    theirs, ours = MISMATCHES[fate]
    everybody = outcomes[fate]
    assert sorted(everybody) == [0, 1, 2]
    for rank, said in everybody.items():
        assert said["error"] == "MismatchError", said
        assert said["text"].count("doomed_rank.py") >= 2, said["text"]
        assert f"rank {rank}: " in said["text"]
        assert said["left"] == []
        if rank != victim:
            assert f"rank {victim}: " in said["text"]
            assert theirs in said["text"], said["text"]
            assert ours in said["text"], said["text"]


def test_all_hosts_learn_who_never_came_and_who_aborted(split):
    victim, outcomes = split
    for rank in range(SIZE):
        if rank != victim:
            late, aborted = outcomes["stopped_rank"][rank], outcomes["aborted"][rank]
            assert late["error"] == "TimedOut", late
            assert f"rank {victim} did not come in time" in late["text"]
            assert aborted["error"] in ("ConfigError", "PeerLost"), aborted
            assert f"rank {victim} has" in aborted["text"]
            assert late["left"] == aborted["left"] == []


def test_a_rank_that_never_comes_is_named_with_its_last_call(outcomes):
    survivors = outcomes["stopped_rank"]
    for rank in (0, 2):
        said = survivors[rank]
        assert said["error"] == "TimedOut", said
        assert f"rank {VICTIM} did not come in time" in said["text"]
        assert "last call here: call 1, barrier" in said["text"]
        assert said["left"] == []


def test_a_death_under_ddp_is_an_error_of_backward_and_then_typed(outcomes):
    survivors = outcomes["killed_under_ddp"]
    assert sorted(survivors) == [0, 2]
    for said in survivors.values():
        assert said["error"] == "RuntimeError", said
        assert f"rank {VICTIM} has ended" in said["text"]
        assert said["again"] == "PeerLost"


def test_a_rank_that_cannot_come_or_does_not_come_to_a_new_group_is_named(outcomes):
    for rank in (0, 2):
        killed = outcomes["killed_before_a_group_is_made"][rank]
        assert (killed["error"], killed["lost"]) == ("PeerLost", VICTIM), killed
        assert "during the making of group 1" in killed["text"]
        absent = outcomes["absent_when_a_group_is_made"][rank]
        assert absent["error"] == "TimedOut", absent
        assert f"ranks {VICTIM} did not come in time" in absent["text"]


def test_a_death_under_fsdp_names_its_call_and_not_the_meeting(outcomes):
    for rank in (0, 2):
        said = outcomes["killed_under_fsdp"][rank]
        assert (said["error"], said["lost"]) == ("PeerLost", VICTIM), said
        assert "during FSDP's all_gather of 2601 x float32" in said["text"], said


def test_an_abort_ends_everybodys_waits(outcomes):
    for rank in (0, 2):
        said = outcomes["aborted"][rank]
        assert said["error"] in ("ConfigError", "PeerLost"), said
        assert f"rank {VICTIM} has" in said["text"]
    assert outcomes["aborted"][VICTIM]["error"] is None
    assert all(said["left"] == [] for said in outcomes["aborted"].values())


def test_an_abort_from_another_thread_ends_the_call_and_nothing_else(outcomes):
    for rank in (VICTIM, 2):
        said = outcomes["aborted_from_another_thread"][rank]
        assert said["error"] == "ConfigError", said
        assert f"rank {VICTIM} has aborted it" in said["text"]
        assert said["left"] == []


def test_a_signal_handler_that_raises_ends_the_wait_and_tells_the_others(outcomes):
    assert outcomes["interrupted"][VICTIM]["error"] == "KeyboardInterrupt"
    said = outcomes["interrupted"][2]
    assert said["error"] == "ConfigError", said
    assert f"rank {VICTIM} has aborted it" in said["text"]


def test_a_call_repeated_after_a_signals_exception_is_never_taken_for_the_next_one(outcomes):
    everybody = outcomes["interrupted_early"]
    assert sorted(everybody) == [0, 1, 2]
    for said in everybody.values():
        assert said["error"] == "ConfigError", said
        assert f"rank {VICTIM} has aborted it" in said["text"]
