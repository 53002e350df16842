"""A misspelt word is answered with the one that was meant, and a strange one with nothing."""

import pytest

from argosy.cli.unknown import unknown_verb
from argosy.cli.verbs import RUN_OPTIONS, VERBS
from argosy.config.nearest import did_you_mean, nearest
from argosy.config.spec import RoleSpec

OPTIONS = [option.flag for option in RUN_OPTIONS]
KEYS = RoleSpec.__struct_fields__


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("stauts", "status"), ("sotp", "stop"), ("lgos", "logs"), ("log", "logs"), ("pss", "ps"),
        ("QUEUE", "queue"), ("qeueu", "queue"), ("statsu", "status"), ("stat", "status"), ("evnts", "events"),
        ("docter", "doctor"), ("chekpoint", "checkpoint"), ("wyh", "why"), ("atach", "attach"), ("runn", "run"),
    ],
)  # fmt: skip
def test_a_slip_in_a_verb(typed, meant):
    assert nearest(typed, {verb.name.split()[0] for verb in VERBS}) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--thread", "--threads"), ("--detatch", "--detach"), ("--mem", "--memory"), ("--prio", "--priority"),
        ("--Name", "--name"), ("-name", "--name"), ("--no_warm", "--no-warm"), ("--secrets", "--secret"),
        ("--warm", "--no-warm"), ("--restarts", "--restart"), ("--queue", "--queued"), ("--evn", "--env"),
    ],
)  # fmt: skip
def test_a_slip_in_an_option(typed, meant):
    assert nearest(typed, OPTIONS) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cuont", "count"), ("comand", "command"), ("Count", "count"), ("memory", "memory_bytes"),
        ("stop-signal", "stop_signal"), ("grace", "grace_seconds"), ("hang", "hang_seconds"), ("arg", "arguments"),
        ("cpu", "cpus"), ("gangs", "gang"),
    ],
)  # fmt: skip
def test_a_slip_in_a_key(typed, meant):
    assert nearest(typed, KEYS) == meant


@pytest.mark.parametrize("typed", ["--verbose", "--xyzzy", "--", "-q", "--gpu"])
def test_what_is_like_nothing_is_not_guessed(typed):
    assert nearest(typed, OPTIONS) == ""


@pytest.mark.parametrize("typed", ["--seed", "--user", "--data", "--test", "--port", "--timeout"])
def test_what_is_only_a_little_alike_is_not_guessed(typed):
    assert nearest(typed, OPTIONS) == ""


@pytest.mark.parametrize(
    "typed",
    ["restart", "resume", "pause", "remove", "reset", "clean", "dump", "dashboard", "monitor", "login", "step", "slop", "doen"],
)  # fmt: skip
def test_another_verb_is_not_taken_for_one_of_ours(typed):
    fix = unknown_verb([typed]).fix
    assert fix == "`argosy help` lists the verbs"


def test_two_letters_may_be_swapped_too():
    assert "`argosy ps`" in unknown_verb(["sp"]).fix


def test_what_ends_runs_is_named_only_after_a_sure_slip():
    for typed, meant in (("sotp", "stop"), ("stopp", "stop"), ("kil", "kill"), ("dwon", "down")):
        assert f"`argosy {meant}`" in unknown_verb([typed]).fix
    assert nearest("step", ["stop"]) == "stop"
    assert nearest("step", ["stop"], grave=["stop"]) == ""


def test_what_others_call_it_is_understood_where_it_is_known():
    meant = {"cmd": "command", "image": "nothing-here"}
    assert nearest("cmd", KEYS, meant=meant) == "command"
    assert nearest("image", KEYS, meant=meant) == ""
    assert did_you_mean("Cmd", ["command"], meant=meant) == "did you mean `command`?"


def test_without_a_near_one_all_are_named():
    assert did_you_mean("zzz", ["b", "a"]) == "known are: a, b"
