"""What is deleted of runs that ended long ago, and what is not."""

from __future__ import annotations

import os
import time

import pytest

from argosy.control.expiry import boot_time, expire_clusters, expire_runs, keep_days
from argosy.control.home import Cluster

LONG_AGO, LIMIT = 1_000.0, 2_000.0


def make_run(runs, name, *, ended_at=LONG_AGO, files=()):
    directory = runs / name
    for folder in ("logs", "errors", "exec", "stacks"):
        (directory / folder).mkdir(parents=True)
        (directory / folder / "train.0.0.out").write_text("text")
    for path in ("spec.json", "end.json", *files):
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text("{}")
    os.utime(directory / "spec.json", (LONG_AGO, LONG_AGO))
    os.utime(directory / "end.json", (ended_at, ended_at))
    return directory


def test_only_old_runs_that_are_not_known_are_deleted(tmp_path):
    old = make_run(tmp_path, "r1aaaa")
    known = make_run(tmp_path, "r2aaaa")
    young = make_run(tmp_path, "r3aaaa", ended_at=LIMIT + 1)
    foreign = make_run(tmp_path, "notes")
    linked = tmp_path / "r4aaaa"
    linked.symlink_to(known)
    unended = make_run(tmp_path, "r5aaaa")
    (unended / "end.json").unlink()
    assert expire_runs(str(tmp_path), LIMIT, lambda run: run == "r2aaaa") == 2
    assert not old.exists()
    assert not unended.exists()
    assert all((path / "logs" / "train.0.0.out").exists() for path in (known, young, foreign))
    assert linked.is_symlink()


def test_files_of_the_program_stay_and_a_mark_keeps_everything(tmp_path):
    saved = make_run(tmp_path, "r1aaaa", files=["saves/step-1", "metrics.jsonl"])
    kept = make_run(tmp_path, "r2aaaa", files=["keep"])
    assert expire_runs(str(tmp_path), LIMIT, lambda run: False) == 1
    assert sorted(os.listdir(saved)) == ["end.json", "metrics.jsonl", "saves", "spec.json"]
    assert (saved / "saves" / "step-1").exists()
    assert (kept / "logs" / "train.0.0.out").exists()
    assert expire_runs(str(tmp_path), LIMIT, lambda run: False) == 0


def test_clusters_of_earlier_boots_go_when_nothing_of_their_runs_is_left(tmp_path):
    clusters = tmp_path / "clusters"
    own, empty, full, alive = (clusters / name for name in ("own", "empty", "full", "alive"))
    for path in (own, empty, full, alive):
        make_run(path / "runs", "r1aaaa", files=["saves/a"] if path is full else ())
        (path / "events.sqlite").write_text("")
        (path / "events.sqlite-wal").write_text("")
        os.utime(path / "events.sqlite-wal", (LONG_AGO, LONG_AGO))
        os.utime(path / "events.sqlite", (LONG_AGO, LONG_AGO))
        os.utime(path, (LONG_AGO, LONG_AGO))
    os.utime(alive / "events.sqlite-wal", (LIMIT + 1, LIMIT + 1))
    assert expire_clusters(Cluster(str(own), ""), LIMIT) == 2
    assert sorted(os.listdir(clusters)) == ["alive", "full", "own"]
    assert sorted(os.listdir(full / "runs" / "r1aaaa")) == ["end.json", "saves", "spec.json"]
    assert (alive / "runs" / "r1aaaa" / "logs").exists()
    assert (own / "runs" / "r1aaaa" / "logs").exists()


@pytest.mark.parametrize(("text", "days"), [("", 30.0), ("7", 7.0), ("0", 0.0), ("soon", 0.0)])
def test_how_long_is_a_setting_and_nonsense_deletes_nothing(monkeypatch, text, days):
    monkeypatch.setenv("ARGOSY_KEEP_DAYS", text)
    assert keep_days() == days


def test_this_machine_was_started_in_the_past():
    assert 0 < boot_time() < time.time()
