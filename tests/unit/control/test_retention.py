"""Forgetting ended runs changes nothing for the others, and a log without their events is read to the same state."""

from __future__ import annotations

import collections
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.config.spec import Backoff, RoleSpec
from argosy.control.coordinator import PUT_ASIDE, Coordinator
from argosy.control.identity import counter_of, run_id
from argosy.control.retention import LEAST_ENDED, Retention
from argosy.errors import ForgottenError, InvariantError, NotFoundError
from argosy.protocol.facts import (
    CommandAccepted,
    CommandDone,
    Event,
    Note,
    RunsForgotten,
    RunSubmitted,
)
from argosy.testing.scripted import ScriptedHost

BACKOFF = Backoff(first_seconds=0.1, most_seconds=1.0)


def task(**more):
    return RoleSpec(command=["x"], backoff=BACKOFF, **more)


def run_through(host, count, **more):
    """So many runs from submission to end."""
    for _ in range(count):
        host.submit({"a": task()}, **more)
        host.start()
        host.exit("a.0.0", code=0)


def story(host):
    """All facts but the forgetting, with commands by order in the place of by number."""
    commands: dict[str, str] = {}

    def name(match):
        return commands.setdefault(match.group(), f"command {len(commands)}")

    kept = (e for e in host.log if not isinstance(e.fact, RunsForgotten))
    return [(e.at, re.sub(r"'c\d+'", name, repr(e.fact))) for e in kept]


def state(coordinator):
    """What a replay must bring back."""
    runs = {
        run: (s.roles, s.attempts, s.ports, s.stop, s.ended, s.commands)
        for run, s in coordinator.runs.items()
    }
    return runs, coordinator.pending, coordinator.counts, coordinator.placement.hosts


def check_replay(host):
    """The log, with and without the deleted events, leads to the coordinator that wrote it."""
    now = host.coordinator
    whole = Coordinator(runs_directory="/runs", keep_ended=host.coordinator.retention.keep_ended)
    for event in host.log:
        whole.replay(event)
    assert not [fact for fact in host.facts(Note) if fact.text.startswith(PUT_ASIDE)]
    for again in (whole, host.replayed()):
        assert not again.unreadable
        assert state(again) == state(now)
        assert again.seq == now.seq
        assert again.memory() == now.memory()


def test_the_oldest_ended_runs_are_forgotten_in_a_batch():
    host = ScriptedHost(keep_ended=20)
    run_through(host, 21)
    assert not host.facts(RunsForgotten)
    first = list(host.coordinator.runs)
    run_through(host, 1)
    [fact] = host.facts(RunsForgotten)
    assert fact.runs == first[:2]
    assert list(host.coordinator.runs)[:19] == first[2:]
    assert len(host.coordinator.runs) == 20
    assert host.coordinator.counts == {"queued": 0, "running": 0, "ended": 22}


def test_large_runs_are_forgotten_before_there_are_many_but_the_last_ones_never():
    host = ScriptedHost(keep_ended=100)
    host.coordinator.retention.keep_attempts = 10
    for _ in range(LEAST_ENDED + 3):
        host.submit({"a": task(count=4)})
        host.start()
        for index in range(4):
            host.exit(f"a.{index}.0", code=0)
    [fact] = host.facts(RunsForgotten)
    assert fact.runs == [each.run for each in host.facts(RunSubmitted)[:1]]
    check_replay(host)
    host.coordinator.retention.keep_attempts = 3
    run_through(host, 1)
    assert len(host.coordinator.runs) == LEAST_ENDED
    check_replay(host)


def end(retention, *runs):
    """These runs end, each with so many starts; what is forgotten meanwhile."""
    gone = []
    for run, num_attempts in runs:
        retention.end(run, num_attempts)
        chosen = retention.choose(lambda run: False)
        retention.forget(chosen)
        gone += chosen
    return gone


def test_a_very_large_run_drives_no_small_ones_out_and_goes_itself_when_newer_ones_have_ended():
    retention = Retention()
    assert not end(retention, *((f"small{number}", 30) for number in range(600)))
    assert not end(retention, ("large", 23_000))
    assert not end(retention, *((f"later{number}", 1) for number in range(LEAST_ENDED - 1)))
    assert end(retention, ("last", 1)) == ["large"]


def test_of_runs_of_about_one_size_the_oldest_are_forgotten():
    retention = Retention()
    runs = [(f"r{number}", 1100 + number) for number in range(32 + LEAST_ENDED)]
    gone = end(retention, ("little", 7), *runs)
    assert gone == [run for run, _ in runs[: len(gone)]]
    assert len(gone) > 1


def test_a_run_that_lives_or_waits_is_never_forgotten():
    host = ScriptedHost(keep_ended=3, cpus=2)
    service = host.submit({"a": task(restart="permanent")})
    host.start()
    busy = host.submit({"a": task(cpu_request=2.0)}, queued=True)
    host.start()
    waiting = host.submit({"a": task(cpu_request=2.0)}, queued=True)
    run_through(host, 50)
    assert {service, busy, waiting} <= set(host.coordinator.runs)
    assert len(host.coordinator.runs) == 6
    check_replay(host)


def test_a_run_that_is_watched_or_was_asked_for_stays_known():
    host = ScriptedHost(keep_ended=10)
    run_through(host, 10)
    watched, asked, other = list(host.coordinator.runs)[:3]
    with host.coordinator.retention.held(watched):
        host.coordinator.run_view(asked)
        run_through(host, 6)
        assert watched in host.coordinator.runs
        assert asked in host.coordinator.runs
        assert other not in host.coordinator.runs
    run_through(host, 2)
    assert watched not in host.coordinator.runs


def test_a_forgotten_run_is_told_from_one_that_never_was():
    host = ScriptedHost(keep_ended=3)
    run_through(host, 9)
    gone = host.facts(RunSubmitted)[0].run
    for coordinator in (host.coordinator, host.replayed()):
        with pytest.raises(ForgottenError, match="not known any more") as caught:
            coordinator.run_view(gone)
        assert f"/runs/{gone}" in caught.value.fix
        with pytest.raises(ForgottenError):
            coordinator.stop(1.0, gone, hard=False, reason="")
        for never in (run_id(999, ""), "train", "r", ""):
            with pytest.raises(NotFoundError) as refused:
                coordinator.run_view(never)
            assert not isinstance(refused.value, ForgottenError)


@given(st.integers(0, 1 << 40), st.text(max_size=5))
def test_the_counter_is_found_in_an_id(counter, seed):
    assert counter_of(run_id(counter, seed)) == counter


def test_ids_are_not_given_again_after_forgetting_and_a_restart():
    host = ScriptedHost(keep_ended=2)
    for _ in range(5):
        run_through(host, 7)
        host.rows.delete_some(10_000)
        host.restart_controller()
    runs = [fact.run for fact in host.facts(RunSubmitted)]
    assert len(set(runs)) == 35


def test_cursors_survive_their_events():
    host = ScriptedHost(keep_ended=2)
    run_through(host, 8)
    last = host._number
    host.rows.delete_some(10_000)
    assert max(event.source[1] for event in host.rows.replay() if event.source) == last
    run_through(host, 1)
    host.submit({"a": task()})
    host.stop(hard=True)
    run = host.run
    host.report("exited", "a.0.0", error="it was never started")
    run_through(host, 2)
    host.rows.delete_some(10_000)
    assert run not in host.coordinator.runs
    again = host.replayed()
    assert again.memory().cursors == {"k1": host._number}


def test_a_real_hole_in_the_log_is_refused():
    host = ScriptedHost(keep_ended=2)
    run_through(host, 8)
    host.submit({"a": task()})
    host.rows.delete_some(10_000)
    events = list(host.rows.replay())
    above = [event for event in events if event.seq > host.rows.mark]
    del events[events.index(above[len(above) // 2])]
    again = Coordinator(runs_directory="/runs", keep_ended=2, gaps_below=host.rows.mark)
    with pytest.raises(InvariantError, match="follows"):
        collections.deque(map(again.replay, events))
    with pytest.raises(InvariantError, match="follows"):
        again.replay(Event(seq=again.seq, at=0.0, fact=Note(text="twice")))


def test_commands_go_with_their_run():
    host = ScriptedHost(keep_ended=2)
    for _ in range(8):
        host.submit({"a": task()})
        host.start()
        host.stop(hard=True)
        host.exit("a.0.0", signal=9)
    host.rows.delete_some(10_000)
    left = list(host.rows.replay())
    num_known = len(host.coordinator.runs)
    for kind in (CommandAccepted, CommandDone):
        assert sum(isinstance(event.fact, kind) for event in left) == 2 * num_known
    assert len([event for event in left if isinstance(event.fact, RunsForgotten)]) == 1
    check_replay(host)


def test_an_old_log_with_very_many_runs_is_worked_off_at_its_first_start():
    host = ScriptedHost()
    run_through(host, 30)
    again = Coordinator(runs_directory="/runs", keep_ended=4)
    for event in host.log:
        again.replay(event)
    outputs = again.tick(host.now)
    [fact] = [e.fact for e in outputs.events if isinstance(e.fact, RunsForgotten)]
    assert len(fact.runs) == 26
    assert len(again.runs) == 4


def test_one_fact_holds_a_bounded_number_of_runs():
    retention = Retention(keep_ended=10)
    for number in range(2500):
        retention.end(f"r{number}", 1)
    sizes = []
    while chosen := retention.choose(lambda run: False):
        retention.forget(chosen)
        sizes.append(len(chosen))
    assert sizes == [1000, 1000, 490]


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from("xyz")),
    st.tuples(st.just("exit"), st.integers(0, 5), st.sampled_from([0, 0, 1])),
    st.tuples(st.just("stop"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("restart"), st.integers(0, 60), st.just(0)),
    st.tuples(st.just("keeper"), st.just(0), st.just(0)),
    st.tuples(st.just("time"), st.just(0), st.just(0)),
)


def act(host, action):
    kind, first, second = action
    alive = [run for run, s in host.coordinator.runs.items() if s.ended is None]
    if kind == "submit":
        role = task(cpu_request=first, restart="transient")
        host.submit({"a": role}, queued=first > 0, share=second)
    elif kind == "exit":
        for run in alive[first : first + 2]:
            host.run = run
            host.start()
            for name in sorted(host.started - host.exited):
                if name.startswith(f"{run}."):
                    host.exit(name.removeprefix(f"{run}."), code=second)
    elif kind == "stop" and first < len(alive):
        host.run = alive[first]
        host.stop(hard=second)
        for name in host.wanted("term") + host.wanted("kill"):
            host.exit(name, signal=9)
    elif kind == "restart":
        host.rows.delete_some(first)
        host.restart_controller()
    elif kind == "keeper" and int(host.keeper[1:]) < 3:
        host.replace_keeper()
    elif kind == "time":
        host.advance(2.0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, min_size=20, max_size=60))
def test_decisions_are_the_same_with_and_without_forgetting(actions):
    forgetful, thorough = ScriptedHost(keep_ended=2, cpus=2), ScriptedHost(cpus=2)
    for action in actions:
        for host in (forgetful, thorough):
            act(host, action)
        assert story(forgetful) == story(thorough)
    check_replay(forgetful)
    alive = {run for run, s in thorough.coordinator.runs.items() if s.ended is None}
    for run in alive:
        assert forgetful.coordinator.run_view(run) == thorough.coordinator.run_view(run)
    assert forgetful.coordinator.queue_view() == thorough.coordinator.queue_view()
    assert forgetful.coordinator.hosts_view() == thorough.coordinator.hosts_view()


def test_a_restart_that_was_due_for_a_forgotten_run_is_no_trouble():
    host = ScriptedHost(keep_ended=2)
    host.submit(
        {
            "a": RoleSpec(
                command=["x"],
                restart="transient",
                backoff=Backoff(first_seconds=9.0, most_seconds=9.0),
            )
        }
    )
    host.start()
    host.exit("a.0.0", code=1)
    run = host.run
    host.stop()
    run_through(host, 5)
    assert run not in host.coordinator.runs
    host.advance(20.0)
    assert not host.wanted()
