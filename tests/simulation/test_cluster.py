from __future__ import annotations

import pytest

from argosy.control import hostside, membership
from argosy.control.hostside import HostSide
from argosy.errors import InvariantError
from argosy.testing.cluster import SimulatedCluster, simulate

SMALL = {"num_hosts": 12, "num_runs": 30, "num_faults": 15}


def test_the_same_seed_gives_the_same_history_and_another_seed_another():
    first, second = simulate(7, **SMALL), simulate(7, **SMALL)
    assert first == second
    assert first["digest"] != simulate(8, **SMALL)["digest"]


@pytest.mark.parametrize("seed", range(8))
def test_small_stories_break_nothing(seed):
    result = simulate(seed, **SMALL)
    assert result["num_faults"] == 15
    assert result["num_facts"] > 200


def _breaks(num_seeds=12):
    for seed in range(num_seeds):
        try:
            simulate(seed, **SMALL)
        except (InvariantError, AssertionError, KeyError):
            return True
    return False


def test_sending_before_the_log_is_durable_would_be_noticed(monkeypatch):
    original = SimulatedCluster.carry_out

    def too_early(self, outputs, then=None):
        for host, message in outputs.messages:
            if self.hosts[host].is_linked:
                self.hosts[host].from_controller(message)
        original(self, outputs, then)

    monkeypatch.setattr(SimulatedCluster, "carry_out", too_early)
    assert _breaks()


def test_forming_a_generation_before_the_last_is_reaped_would_be_noticed(monkeypatch):
    original = membership._heal

    def hasty(role, broken, run):
        decision = original(role, broken, run)
        if decision.stop or (decision.members is None and not decision.give_up):
            return membership.Decision(members=list(role.members), reason="hasty")
        return decision

    monkeypatch.setattr(membership, "_heal", hasty)
    monkeypatch.setattr(membership, "why_impossible", lambda role, fact: "")
    assert _breaks()


def test_an_agent_that_forgets_which_keeper_wants_are_for_would_be_noticed(monkeypatch):
    def keep(self, keeper):
        self.keeper = keeper
        self._outboxes.setdefault(keeper, hostside.Outbox(keeper))

    monkeypatch.setattr(HostSide, "_change_keeper", keep)
    assert _breaks()


def test_an_agent_that_sends_each_report_only_once_would_be_noticed(monkeypatch):
    original = hostside.Outbox.take

    def forgetful(self, now):
        observed = original(self, now)
        self._entries.clear()
        return observed

    monkeypatch.setattr(hostside.Outbox, "take", forgetful)
    assert _breaks()
