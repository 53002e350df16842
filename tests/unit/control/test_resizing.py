"""A gang gets another number of members while it runs."""

from __future__ import annotations

import pytest

from argosy.config.spec import Backoff, Budget, RoleSpec
from argosy.control.coordinator import Coordinator
from argosy.errors import ConfigError, NotFoundError
from argosy.protocol.facts import CommandDone, GangResized, GenerationFormed
from argosy.testing.scripted import ScriptedHost

AT_ONCE = Backoff(first_seconds=0.0, jitter=0.0)


def begin(*, count=4, joined=True, run=None, **more):
    host = ScriptedHost()
    role = RoleSpec(command=["x"], gang=True, count=count, backoff=AT_ONCE, **more)
    host.submit({"train": role}, **(run or {}))
    host.start()
    if joined:
        for index in range(count):
            host.report("joined", f"train.{index}.0", generation=1)
    return host


def scale(host, size, **more):
    command, outputs = host.coordinator.scale(host.now, host.run, size, **more)
    host.take(outputs)
    return command


def members(host):
    return host.facts(GenerationFormed)[-1].members


def outcomes(host):
    return {fact.command: fact.outcome for fact in host.facts(CommandDone)}


def start_joined(host):
    """Newcomers start, and everybody joins the newest generation."""
    host.start()
    generation = host.facts(GenerationFormed)[-1].generation
    for name in host.wanted():
        host.report("joined", name, generation=generation)


def test_growing_forms_a_generation_with_new_members_and_leaves_the_others_alone():
    host = begin()
    command = scale(host, 6)
    assert members(host) == [0, 1, 2, 3, 4, 5]
    assert host.waiting() == ["train.4.0", "train.5.0"]
    assert host.wanted("term") == host.wanted("kill") == []
    assert host.want("train.0.0").reform == {"generation": 2, "rank": 0, "world_size": 6}
    launch = host.want("train.5.0").launch
    assert (launch.env["RANK"], launch.env["WORLD_SIZE"]) == ("5", "6")
    assert command not in outcomes(host)
    host.start()
    assert outcomes(host)[command] == "ok"
    assert host.coordinator.run_view(host.run).roles[0].count == 6


def test_shrinking_kills_the_highest_ranks_and_forms_the_next_generation_when_they_are_reaped():
    host = begin()
    command = scale(host, 2)
    assert sorted(host.wanted("kill")) == ["train.2.0", "train.3.0"]
    assert host.wanted("term") == []
    host.exit("train.3.0", signal=9)
    assert members(host) == [0, 1, 2, 3], "one of those that leave is not reaped"
    host.exit("train.2.0", signal=9)
    assert members(host) == [0, 1]
    assert outcomes(host)[command] == "ok"
    states = [process.state for process in host.coordinator.run_view(host.run).roles[0].processes]
    assert states == ["running", "running", "removed", "removed"]


def test_members_removed_on_purpose_are_no_failures():
    host = begin(budget=Budget(user=0, host=0))
    scale(host, 2)
    for name in host.wanted("kill"):
        host.exit(name, signal=9)
    role = host.coordinator.runs[host.run].roles["train"]
    assert role.history.failures == {}
    for index in (0, 1):
        host.exit(f"train.{index}.0", code=0)
    assert host.ended.outcome == "succeeded"


def test_a_gang_that_grows_again_takes_back_the_indices_that_left():
    host = begin()
    for size in (2, 3, 8):
        scale(host, size)
        for name in host.wanted("kill"):
            host.exit(name, signal=9)
        start_joined(host)
    assert [len(fact.members) for fact in host.facts(GenerationFormed)] == [4, 2, 3, 8]
    assert members(host) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert set(outcomes(host).values()) == {"ok"}


def test_of_two_resizes_in_a_row_the_later_one_counts():
    host = begin()
    first = scale(host, 2)
    second = scale(host, 5)
    assert outcomes(host)[first] == "replaced by a later one"
    for name in host.wanted("kill"):
        host.exit(name, signal=9)
    start_joined(host)
    assert len(members(host)) == 5
    assert outcomes(host)[second] == "ok"


def test_back_to_the_present_size_before_anything_happened_needs_no_generation():
    host = begin()
    scale(host, 2)
    for name in host.wanted("kill"):
        host.exit(name, signal=9)
    assert len(host.facts(GenerationFormed)) == 2
    command = scale(host, 2)
    assert outcomes(host)[command] == "ok"
    assert len(host.facts(GenerationFormed)) == 2


def test_a_death_while_a_resize_waits_is_healed_in_the_same_generation():
    host = begin()
    scale(host, 3)
    host.exit("train.0.0", signal=9)
    host.exit("train.3.0", signal=9)
    assert members(host) == [0, 1, 2]
    assert len(host.facts(GenerationFormed)) == 2
    assert host.waiting() == ["train.0.1"]


def test_a_death_of_a_newcomer_is_an_ordinary_death():
    host = begin()
    scale(host, 5)
    host.start()
    host.exit("train.4.0", signal=9)
    assert members(host) == [0, 1, 2, 3, 4]
    assert host.waiting() == ["train.4.1"]
    assert host.wanted("term") == []


def test_newcomers_that_have_not_joined_yet_stay_when_another_member_dies():
    host = begin()
    host.exit("train.1.0", signal=9)
    host.start()
    host.exit("train.2.0", signal=9)
    assert host.wanted("term") == []
    assert host.want("train.1.1").reform == {"generation": 3, "rank": 1, "world_size": 4}
    assert host.waiting() == ["train.2.1"]


def test_all_ranks_may_die_at_once():
    host = begin()
    for index in range(4):
        host.exit(f"train.{index}.0", signal=9)
    assert max(host.waiting()).endswith(".1")
    host.start()
    assert members(host) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("size", "more", "what"),
    [
        (0, {}, "does no work"),
        (1, {"min": 2}, "--min 2"),
        (5000, {}, "too many"),
        (3, {"ports": {"http": 0}}, "hold ports"),
        (3, {"joined": False}, "have not joined"),
    ],
)
def test_sizes_that_cannot_be_are_refused_and_nothing_has_changed(size, more, what):
    host = begin(**more)
    if "ports" in more:
        ports = {f"train/{index}/http": 5000 + index for index in range(4)}
        host.report("ports", ports=ports)
        host.start()
    before = len(host.log)
    with pytest.raises(ConfigError, match=what):
        scale(host, size)
    assert len(host.log) == before


def test_a_program_that_cannot_reform_is_restarted_when_that_is_wanted():
    host = begin(joined=False)
    with pytest.raises(ConfigError) as refused:
        scale(host, 2)
    assert "--restart" in refused.value.fix
    assert "a plain script never does" in refused.value.fix
    command = scale(host, 2, may_restart=True)
    assert sorted(host.wanted("kill")) == ["train.2.0", "train.3.0"]
    assert sorted(host.wanted("term")) == ["train.0.0", "train.1.0"]
    for name in host.wanted("kill") + host.wanted("term"):
        host.exit(name, signal=9)
    assert members(host) == [0, 1]
    assert host.waiting() == ["train.0.1", "train.1.1"]
    host.start()
    assert outcomes(host)[command] == "ok"


def test_a_gang_that_is_never_restarted_is_not_resized_by_a_restart():
    host = begin(joined=False, budget=Budget(user=0))
    with pytest.raises(ConfigError, match="not to be restarted"):
        scale(host, 2, may_restart=True)


def test_only_gangs_of_runs_that_live_are_resized():
    host = ScriptedHost()
    host.submit({"web": RoleSpec(command=["x"])})
    with pytest.raises(ConfigError, match="no gang"):
        scale(host, 2)
    with pytest.raises(ConfigError, match="not a gang"):
        scale(host, 2, role="web")
    with pytest.raises(NotFoundError, match="no role"):
        scale(host, 2, role="db")
    host.start()
    host.exit("web.0.0", code=0)
    with pytest.raises(NotFoundError, match="has succeeded"):
        scale(host, 2, role="web")


def test_a_gang_whose_members_finish_is_not_resized():
    host = begin()
    host.exit("train.0.0", code=0)
    with pytest.raises(ConfigError, match="about to end"):
        scale(host, 2)


def test_a_resize_that_meets_the_end_has_an_outcome():
    host = begin()
    command = scale(host, 3)
    host.exit("train.0.0", code=0)
    assert outcomes(host)[command] == "the gang was about to end"
    for index in (1, 2):
        host.exit(f"train.{index}.0", code=0)
    host.exit("train.3.0", signal=9)
    host.advance(1.0)
    assert host.ended is None or host.ended.outcome == "succeeded"


def test_a_resize_survives_the_controller():
    host = begin()
    command = scale(host, 6)
    host.restart_controller()
    host.start()
    assert outcomes(host)[command] == "ok"
    assert len(members(host)) == 6


def test_a_command_whose_resize_did_not_become_durable_says_so():
    host = begin()
    before = len(host.log)
    command = scale(host, 6)
    host.cut_log(before + 1)
    host.restart_controller()
    host.advance(0.1)
    assert "interrupted" in outcomes(host)[command]
    assert host.facts(GangResized) == []


def test_processes_that_are_added_are_accounted_and_given_back():
    host = begin(count=2, cpu_request=1.0, run={"queued": True})
    scale(host, 4)
    assert host.coordinator.placement.hosts["h"].used_cpus == 4.0
    start_joined(host)
    with pytest.raises(ConfigError, match="no room for 1 more"):
        scale(host, 5)
    again = Coordinator(runs_directory="/runs")
    for event in host.log:
        again.replay(event)
    assert again.placement.hosts == host.coordinator.placement.hosts
    for index in range(4):
        host.exit(f"train.{index}.0", code=0)
    assert host.ended.outcome == "succeeded"
    assert host.coordinator.placement.hosts["h"].used_cpus == 0.0


def test_a_gang_with_spares_keeps_them_when_it_grows():
    host = begin(spares=1)
    host.start()
    scale(host, 5)
    assert members(host) == [0, 1, 2, 3, 5]
    assert host.want("train.4.0").launch.parked
