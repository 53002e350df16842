"""What the deciders cannot take ends one run, with its story in the log, and never the cluster."""

from __future__ import annotations

import msgspec
import pytest

from argosy.config.spec import RoleSpec
from argosy.control import launching, runstate
from argosy.control.coordinator import Coordinator
from argosy.control.placement import Placement
from argosy.control.queue import Queue
from argosy.control.supervisor import Supervisor
from argosy.control.tally import Tally
from argosy.errors import InvariantError
from argosy.protocol.facts import (
    AttemptExited,
    AttemptPlanned,
    CommandAccepted,
    CommandDone,
    Note,
    RunAdmitted,
    RunEnded,
    RunSubmitted,
)
from argosy.protocol.messages import Acknowledge
from argosy.testing.scripted import ScriptedHost


def task(**more):
    return RoleSpec(command=["x"], **more)


def replayed(log):
    coordinator = Coordinator(runs_directory="/runs")
    for event in log:
        coordinator.replay(event)
    return coordinator


def with_neighbour():
    """A host with a run that goes on, and one that is to break."""
    host = ScriptedHost()
    neighbour = host.submit({"a": task()})
    host.start()
    run = host.submit({"a": task(count=2, gang=True)}, queued=True)
    host.start()
    return host, neighbour, run


def check_put_aside(host, run, neighbour):
    supervisor = host.coordinator.runs[run]
    assert (supervisor.ended.outcome, supervisor.ended.exit_code) == ("failed", 70)
    assert "put aside" in supervisor.ended.reason
    assert {want.state for name, want in host.wants.items() if name.startswith(run)} == {"gone"}
    assert not host.coordinator.pending
    host.run = neighbour
    host.exit("a.0.0", code=0)
    assert host.ended.outcome == "succeeded"
    for capacity in host.coordinator.placement.hosts.values():
        assert capacity.used_cpus == 0
    again = replayed(host.log)
    assert not again.unreadable
    assert again.runs[run].ended == supervisor.ended
    assert again.runs[run].roles == supervisor.roles
    assert again.memory() == host.coordinator.memory()


def test_an_observation_that_cannot_be_taken_ends_its_run_and_is_not_sent_again():
    host, neighbour, run = with_neighbour()
    outputs = host.report("joined", "a.0.0", generation="many")
    [note] = [event for event in outputs.events if isinstance(event.fact, Note)]
    assert note.fact.run == run
    assert "many" in note.fact.text
    assert note.source == ("k1", host._number)
    acknowledged = [m for _, m in outputs.messages if isinstance(m, Acknowledge)]
    assert acknowledged == [Acknowledge(keeper="k1", number=host._number)]
    check_put_aside(host, run, neighbour)


def test_an_impossible_fact_ends_its_run_with_the_story(monkeypatch):
    host, neighbour, run = with_neighbour()
    twice = next(
        e.fact for e in host.log if isinstance(e.fact, AttemptPlanned) and e.fact.run == run
    )
    monkeypatch.setattr("argosy.control.coordinator.facts_of", lambda *_: [twice])
    outputs = host.report("ready", "a.0.0")
    monkeypatch.undo()
    [note] = [event for event in outputs.events if isinstance(event.fact, Note)]
    assert "is not reaped" in note.fact.text
    assert "RunSubmitted" in note.fact.text
    check_put_aside(host, run, neighbour)


def test_a_decision_that_fails_ends_its_run_only(monkeypatch):
    host, neighbour, run = with_neighbour()
    decide = Supervisor.decide

    def fail(self, now):
        if self.run == run:
            raise KeyError("a bug")
        return decide(self, now)

    monkeypatch.setattr(Supervisor, "decide", fail)
    outputs = host.report("exited", "a.0.0", code=1)
    kinds = [type(event.fact) for event in outputs.events]
    assert kinds == [AttemptExited, Note, AttemptExited, RunEnded]
    check_put_aside(host, run, neighbour)


def test_commands_of_a_run_that_is_put_aside_have_an_outcome(monkeypatch):
    host, neighbour, run = with_neighbour()
    host.stop()
    assert host.coordinator.pending

    def fail(self, now):
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "decide", fail)
        host.exit("a.0.0", code=1)
    done = {fact.command for fact in host.facts(CommandDone)}
    assert done == {fact.command for fact in host.facts(CommandAccepted)}
    check_put_aside(host, run, neighbour)


@pytest.mark.parametrize("missing", [RunSubmitted, AttemptPlanned, AttemptExited])
def test_an_ended_run_that_cannot_be_read_back_is_left_out_alone(missing):
    host = ScriptedHost()
    neighbour = host.submit({"a": task(cpu_request=1.0)}, queued=True)
    host.start()
    run = host.submit({"a": task(cpu_request=1.0)}, queued=True)
    host.start()
    host.exit("a.0.0", code=3)
    # As the log gives a row that it cannot decode.
    log = [
        msgspec.structs.replace(event, fact=Note(run=run, text="unreadable"))
        if isinstance(event.fact, missing) and event.fact.run == run
        else event
        for event in host.log
    ]
    again = replayed(log)
    assert list(again.unreadable) == [run]
    assert not again.tick(host.now).events
    assert again.runs[neighbour].roles == host.coordinator.runs[neighbour].roles
    if missing is not RunSubmitted:
        assert again.runs[run].ended.exit_code == 3
    assert again.counts["running"] == 1
    assert [c.used_cpus for c in again.placement.hosts.values()] == [1.0]
    host.coordinator = again
    host.hello(alive=[f"{neighbour}.a.0.0"])
    next_run = host.submit({"a": task()})
    assert next_run not in (run, neighbour)


def test_a_live_run_that_cannot_be_read_back_is_ended_at_the_first_input():
    host, neighbour, run = with_neighbour()
    log = [
        msgspec.structs.replace(event, fact=Note(run=run, text="unreadable"))
        if isinstance(event.fact, AttemptPlanned) and event.fact.attempt == f"{run}.a.1.0"
        else event
        for event in host.log
    ]
    host.coordinator = again = replayed(log)
    assert list(again.unreadable) == [run]
    host.hello()
    assert again.runs[run].ended.outcome == "failed"
    assert {want.state for name, want in host.wants.items() if name.startswith(run)} == {"gone"}
    assert again.runs[neighbour].ended is None
    # What was added is enough for the next controller, which meets the same trouble.
    third = replayed(log + host.log[len(log) :])
    assert third.runs[run].ended == again.runs[run].ended
    assert not third.tick(host.now).events


def test_a_hole_in_the_log_is_not_taken_for_the_trouble_of_a_run():
    host, _neighbour, run = with_neighbour()
    log = [e for e in host.log if not (isinstance(e.fact, RunAdmitted) and e.fact.run == run)]
    with pytest.raises(InvariantError, match="follows"):
        replayed(log)


def unreadable(log, kind, run):
    """The log as it is read when the first fact of this kind of the run cannot be decoded."""
    place = next(i for i, e in enumerate(log) if isinstance(e.fact, kind) and e.fact.run == run)
    note = Note(run=run, text="unreadable")
    return [*log[:place], msgspec.structs.replace(log[place], fact=note), *log[place + 1 :]]


def test_a_live_run_whose_submission_cannot_be_read_ends_for_everybody():
    host, neighbour, run = with_neighbour()
    log = unreadable(host.log, RunSubmitted, run)
    host.coordinator = again = replayed(log)
    outputs = again.tick(host.now)
    ends = [event.fact for event in outputs.events if isinstance(event.fact, RunEnded)]
    assert [(end.run, end.outcome, end.exit_code) for end in ends] == [(run, "failed", 70)]
    assert again.counts == {"queued": 0, "running": 1, "ended": 1}
    tally = Tally()
    for event in (*log, *outputs.events):
        tally.apply(event)
    assert tally.alive == {neighbour}
    assert tally.num_ended == again.counts["ended"]
    host.hello(alive=[f"{neighbour}.a.0.0", f"{run}.a.0.0"])
    assert host.wants[f"{run}.a.0.0"].state == "gone"
    third = replayed([*log, *outputs.events])
    assert third.counts == again.counts
    assert not third.tick(host.now).events


def test_runs_whose_submission_cannot_be_read_are_forgotten_in_their_turn():
    host = ScriptedHost()
    runs = []
    for _ in range(5):
        runs.append(host.submit({"a": task()}))
        host.start()
        host.exit("a.0.0", code=0)
    log = unreadable(host.log, RunSubmitted, runs[0])
    again = Coordinator(runs_directory="/runs", keep_ended=2)
    for event in log:
        again.replay(event)
    [forgotten] = again.tick(host.now).events
    assert forgotten.fact.runs == runs[:3]
    assert not again.unreadable


def test_a_command_on_a_live_run_that_cannot_be_read_has_an_outcome():
    host, _neighbour, run = with_neighbour()
    command = host.stop("a", 0)
    again = replayed(unreadable(host.log, AttemptPlanned, run))
    assert list(again.unreadable) == [run]
    assert command in again.pending
    done = [e.fact for e in again.tick(host.now).events if isinstance(e.fact, CommandDone)]
    assert [fact.command for fact in done] == [command]
    assert not again.pending


def test_the_number_of_a_run_whose_submission_cannot_be_read_is_not_given_again():
    host = ScriptedHost(cpus=1)
    _running, waiting, _last = (
        host.submit({"a": task(cpu_request=1.0)}, queued=True) for _ in range(3)
    )
    again = replayed(unreadable(host.log, RunSubmitted, waiting))
    assert again.retention.num_submitted == 3


def test_a_run_of_which_no_launch_can_be_made_is_put_aside(monkeypatch):
    host = ScriptedHost()
    neighbour = host.submit({"a": task()})
    host.start()
    launch_of = launching.launch_of

    def fail(supervisor, attempt, runs_directory):
        if supervisor.run != neighbour:
            raise IndexError("a bug")
        return launch_of(supervisor, attempt, runs_directory)

    monkeypatch.setattr(launching, "launch_of", fail)
    run = host.submit({"a": task(count=2, gang=True)}, queued=True)
    assert "a bug" in host.coordinator.runs[run].ended.reason
    check_put_aside(host, run, neighbour)


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_run_that_cannot_be_placed_or_admitted_is_put_aside_and_the_others_start(
    monkeypatch, is_queued
):
    host = ScriptedHost()
    neighbour = host.submit({"a": task()})
    host.start()
    place, admit = Placement.place, Queue.admit

    def fail_to_place(self, spec, *, is_accounted):
        if spec.name == "bad":
            raise ArithmeticError("a bug")
        return place(self, spec, is_accounted=is_accounted)

    def fail_to_admit(self, run, hosts):
        if self.entries[run].spec.name == "worse":
            raise LookupError("another bug")
        admit(self, run, hosts)

    monkeypatch.setattr(Placement, "place", fail_to_place)
    monkeypatch.setattr(Queue, "admit", fail_to_admit)
    bad = host.submit({"a": task()}, name="bad", queued=is_queued)
    worse = host.submit({"a": task()}, name="worse", queued=is_queued)
    good = host.submit({"a": task()}, queued=is_queued)
    assert "cannot be placed: ArithmeticError" in host.coordinator.runs[bad].ended.reason
    assert "cannot be admitted: LookupError" in host.coordinator.runs[worse].ended.reason
    assert host.coordinator.runs[good].admitted is not None
    assert host.coordinator.counts == {"queued": 0, "running": 2, "ended": 2}
    assert not host.coordinator.queue.entries
    host.start()
    host.exit("a.0.0", code=0)
    monkeypatch.undo()
    for run in (bad, worse):
        again = replayed(host.log)
        assert again.runs[run].ended == host.coordinator.runs[run].ended
        assert again.runs[run].roles == host.coordinator.runs[run].roles
    host.run = neighbour
    host.exit("a.0.0", code=0)
    assert replayed(host.log).memory() == host.coordinator.memory()
    assert all(c.used_cpus == 0 for c in host.coordinator.placement.hosts.values())


def test_a_run_whose_very_end_cannot_be_folded_is_closed_and_its_processes_are_ended(monkeypatch):
    host, neighbour, run = with_neighbour()

    def fail(self, event, fact):
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setitem(runstate._FOLDS, AttemptExited, fail)
        host.report("exited", "a.0.0", code=1)
    supervisor = host.coordinator.runs[run]
    assert "a bug" in supervisor.ended.reason
    assert {want.state for name, want in host.wants.items() if name.startswith(run)} == {"gone"}
    assert replayed(host.log).runs[run].ended == supervisor.ended
    host.run = neighbour
    host.exit("a.0.0", code=0)
    assert host.ended.outcome == "succeeded"
    assert all(c.used_cpus == 0 for c in host.coordinator.placement.hosts.values())


def test_a_start_with_more_runs_than_rounds_settles(monkeypatch):
    host = ScriptedHost()
    for _ in range(30):
        host.submit({"a": task()})
        host.start()
        host.exit("a.0.0", code=0)
    monkeypatch.setattr("argosy.control.coordinator.MOST_ROUNDS", 20)
    assert not replayed(host.log).tick(host.now).events
