"""Faults on request: when they are met, and that this is said before anything breaks."""

from types import SimpleNamespace

import pytest
import torch

from argosy.train import injection
from argosy.train.injection import InjectedError, Injector
from argosy.worker.gang import Fault


class Gang:
    """Tells faults once, and notes what was met."""

    def __init__(self, *faults):
        self.told = list(faults)
        self.story = []

    def faults(self):
        told, self.told = self.told, []
        return told

    def met(self, number):
        self.story.append(number)


def test_a_fault_is_met_once_at_its_step_and_point():
    gang = Gang(Fault(kind="nan", step=3, point="lane", number=7))
    injector, slot = Injector(gang), torch.zeros(4)
    injector.pass_by("lane", 2, slot)
    injector.pass_by("vote", 3, slot)
    assert gang.story == []
    injector.pass_by("lane", 3)
    assert gang.story == [], "there is nothing to spoil yet"
    injector.pass_by("lane", 3, slot)
    injector.pass_by("lane", 3, slot)
    assert gang.story == [7]
    assert slot.isnan().any()


def test_what_ends_a_process_is_said_before_it_does(monkeypatch):
    gang = Gang(Fault(kind="kill", step=1, number=7), Fault(kind="raise", step=2, number=8))
    dying = SimpleNamespace(getpid=lambda: 5, kill=lambda pid, number: gang.story.append("killed"))
    monkeypatch.setattr(injection, "os", dying)
    injector = Injector(gang)
    injector.pass_by("lane", 1)
    assert gang.story == [7, "killed"]
    with pytest.raises(InjectedError):
        injector.pass_by("lane", 2)
    assert gang.story[-1] == 8
