"""What is deleted of runs that ended long ago, and what is not."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from argosy.control.expiry import Expiry, boot_time, expire_clusters, expire_runs, keep_days
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
    age(directory, LONG_AGO)
    os.utime(directory / "end.json", (ended_at, ended_at))
    return directory


def age(directory, at):
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.utime(path, (at, at), follow_symlinks=False)


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


def test_a_run_that_was_cut_off_is_as_young_as_its_last_output(tmp_path):
    cut = make_run(tmp_path, "r1aaaa")
    (cut / "end.json").unlink()
    os.utime(cut / "logs" / "train.0.0.out", (LIMIT + 1, LIMIT + 1))
    assert expire_runs(str(tmp_path), LIMIT, lambda run: False) == 0
    assert (cut / "logs" / "train.0.0.out").exists()


def make_cluster(path, *files):
    make_run(path / "runs", "r1aaaa", files=files)
    for name in ("events.sqlite", "events.sqlite-wal"):
        (path / name).write_text("")
    age(path, LONG_AGO)
    return path


def test_clusters_of_earlier_boots_go_when_nothing_of_their_runs_is_left(tmp_path):
    clusters = tmp_path / "clusters"
    own, empty, full, alive = (clusters / (12 * digit) for digit in "0123")
    for path in (own, empty, full, alive):
        make_cluster(path, *(["saves/a"] if path is full else []))
    os.utime(alive / "events.sqlite-wal", (LIMIT + 1, LIMIT + 1))
    assert expire_clusters(Cluster(str(own), ""), LIMIT) == 2
    assert sorted(os.listdir(clusters)) == [own.name, full.name, alive.name]
    assert sorted(os.listdir(full / "runs" / "r1aaaa")) == ["end.json", "saves", "spec.json"]
    assert (alive / "runs" / "r1aaaa" / "logs").exists()
    assert (own / "runs" / "r1aaaa" / "logs").exists()


def test_what_is_no_cluster_or_is_marked_or_cannot_be_looked_at_stays(tmp_path):
    clusters = tmp_path / "clusters"
    own = clusters / (12 * "0")
    own.mkdir(parents=True)
    foreign = make_cluster(clusters / "kept-by-hand")
    marked = make_cluster(clusters / (12 * "1"))
    (marked / "keep").write_text("")
    away = make_cluster(clusters / (12 * "2"))
    (away / "runs").rename(tmp_path / "runs")
    (away / "runs").symlink_to(tmp_path / "disk that is not mounted")
    for path in (foreign, marked, away):
        age(path, LONG_AGO)
    assert expire_clusters(Cluster(str(own), ""), LIMIT) == 0
    assert all((path / "events.sqlite").exists() for path in (foreign, marked, away))
    assert (foreign / "runs" / "r1aaaa" / "logs").exists()
    assert (marked / "runs" / "r1aaaa" / "logs").exists()


@pytest.mark.parametrize(("text", "days"), [("", 30.0), ("7", 7.0), ("0", 0.0), ("soon", 0.0)])
def test_how_long_is_a_setting_and_nonsense_deletes_nothing(monkeypatch, text, days):
    monkeypatch.setenv("ARGOSY_KEEP_DAYS", text)
    assert keep_days() == days


def test_a_look_goes_by_the_clock_that_does_not_jump(tmp_path, monkeypatch):
    monkeypatch.setenv("ARGOSY_KEEP_DAYS", "1")
    own = Cluster(str(tmp_path / "clusters" / (12 * "0")), "")
    now = time.time()
    run = make_run(tmp_path / "clusters" / own.key / "runs", "r1aaaa", ended_at=now - 3600)

    async def look(seconds):
        expiry = Expiry(own, lambda run: False, lambda: now + seconds)
        expiry.look()
        await expiry._looking

    monkeypatch.setattr(time, "time", lambda: now + 1e9)
    asyncio.run(look(0.0))
    assert run.exists()
    asyncio.run(look(86_400.0))
    assert not run.exists()


def test_this_machine_was_started_in_the_past():
    assert 0 < boot_time() < time.time()
