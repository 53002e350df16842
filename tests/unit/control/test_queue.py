from __future__ import annotations

from collections import Counter

from argosy.config.spec import RoleSpec, RunSpec
from argosy.control.placement import Placement
from argosy.control.queue import MOST_OVERTAKEN, Queue


class Bench:
    """A queue on one host, driven as the coordinator does."""

    def __init__(self, cpus=4):
        self.placement = Placement()
        self.placement.set_host("h", cpus, 1 << 30)
        self.queue = Queue(self.placement)
        self.specs = {}
        self.where = {}
        self.seq = 0

    def add(self, run, cpus=1.0, **more):
        role = RoleSpec(command=["x"], cpu_request=cpus)
        spec = RunSpec(name=run, roles={"a": role}, **{"queued": True, **more})
        self.specs[run] = spec
        self.seq += 1
        self.queue.add(run, spec, self.seq)

    def admit(self):
        admission = self.queue.next_admission()
        if admission is None:
            return None
        run, hosts = admission
        self.queue.admit(run, hosts)
        self.where[run] = hosts
        return run

    def admit_all(self):
        return list(iter(self.admit, None))

    def end(self, run):
        self.queue.release(run, self.specs[run], self.where.pop(run))


def test_runs_that_are_not_queued_start_at_once_and_before_all():
    bench = Bench(cpus=1)
    bench.add("queued", cpus=1.0)
    bench.add("now", cpus=9.0, queued=False)
    assert bench.admit_all()[0] == "now"


def test_higher_priority_first_then_the_oldest():
    bench = Bench(cpus=1)
    bench.add("a", share="s")
    bench.add("b", share="s", priority=5)
    bench.add("c", share="s")
    order = []
    while len(bench.queue):
        [run] = bench.admit_all()
        order.append(run)
        bench.end(run)
    assert order == ["b", "a", "c"]


def test_shares_take_turns_by_what_they_use():
    bench = Bench(cpus=4)
    for number in range(20):
        bench.add(f"greedy{number}", share="greedy")
    for number in range(4):
        bench.add(f"modest{number}", share="modest")
    first = bench.admit_all()
    assert Counter(run.rstrip("0123456789") for run in first) == {"greedy": 2, "modest": 2}


def test_a_large_run_is_overtaken_only_so_often():
    bench = Bench(cpus=4)
    bench.add("small", share="small")
    bench.admit_all()
    bench.add("large", cpus=4.0, share="large")
    running, overtaken = ["small"], 0
    for number in range(200):
        bench.add(f"small{number}", share=f"small{number}")
        for run in bench.admit_all():
            if run == "large":
                assert overtaken <= MOST_OVERTAKEN
                return
            overtaken += 1
            running.append(run)
        if len(running) > 1 or len(bench.queue) > 1:
            bench.end(running.pop(0))
    raise AssertionError("the large run starved")


def test_a_run_that_can_never_fit_blocks_nobody():
    bench = Bench(cpus=2)
    bench.add("impossible", cpus=3.0, priority=9, share="x")
    for number in range(100):
        bench.add(f"n{number}", share=f"s{number}")
    done = 0
    while runs := bench.admit_all():
        for run in runs:
            done += 1
            bench.end(run)
    assert done == 100
    assert "which is never free" in bench.queue.waiting("impossible")


def test_a_cancelled_run_leaves_the_queue():
    bench = Bench(cpus=1)
    bench.add("a", share="s")
    bench.add("b", share="s")
    bench.add("c", share="s")
    bench.queue.remove("b")
    bench.queue.remove("a")
    assert bench.admit_all() == ["c"]
    assert len(bench.queue) == 0


def test_a_waiting_run_says_why():
    bench = Bench(cpus=2)
    bench.add("a", cpus=1.5)
    bench.admit_all()
    bench.add("b", cpus=2.0)
    bench.add("c", cpus=2.0)
    assert bench.queue.waiting("c") == "queued: needs 2 CPUs, 0.5 free, 1 run ahead"


def test_a_run_that_no_host_can_hold_says_so():
    bench = Bench(cpus=2)
    bench.add("large", cpus=64.0)
    assert bench.queue.waiting("large") == (
        "queued: needs 64 CPUs, which is never free: the only host has 2 CPUs and 1.0 GiB"
    )


def test_every_run_of_thousands_is_admitted_once():
    bench = Bench(cpus=8)
    for number in range(3000):
        bench.add(f"n{number}", share=f"s{number % 70}", priority=number % 3)
    seen = []
    while runs := bench.admit_all():
        for run in runs:
            seen.append(run)
            bench.end(run)
    assert len(seen) == len(set(seen)) == 3000
    priorities = [int(run[1:]) % 3 for run in seen]
    assert priorities == sorted(priorities, reverse=True)


def test_shares_take_turns_when_only_one_run_fits_at_a_time():
    bench = Bench(cpus=1)
    for number in range(4):
        bench.add(f"many{number}", share="many")
    bench.add("few0", share="few")
    bench.add("few1", share="few")
    started = []
    while len(bench.queue):
        [run] = bench.admit_all()
        started.append(run)
        bench.end(run)
    assert started == ["many0", "few0", "many1", "few1", "many2", "many3"]


def test_turns_of_shares_that_are_gone_are_forgotten():
    bench = Bench(cpus=1)
    for number in range(1000):
        bench.add(f"r{number}")
        bench.end(bench.admit())
    assert len(bench.queue._turns) <= 80


def test_people_see_the_order_in_which_waiting_runs_start():
    bench = Bench(cpus=1)
    for run in ("a0", "a1", "a2"):
        bench.add(run, share="a")
    assert bench.admit_all() == ["a0"]
    bench.add("b0", share="b")
    bench.add("b1", share="b")
    bench.add("first", share="b", priority=1)
    shown = [entry.run for entry in bench.queue.in_order()]
    assert bench.queue.waiting("b0").endswith(", 1 run ahead")
    running, started = "a0", []
    while len(bench.queue):
        bench.end(running)
        [running] = bench.admit_all()
        started.append(running)
    assert shown[:1] == started[:1] == ["first"]
    assert sorted(shown) == sorted(started)
