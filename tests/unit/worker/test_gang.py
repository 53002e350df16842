import json
import os
import signal
import subprocess
import sys

import pytest

from argosy.worker import stops
from argosy.worker.gang import Fault, Gang, Place


class Recorder:
    """A link that remembers what was said."""

    def __init__(self):
        self.said = []

    def say(self, message, *, stand=""):
        self.said.append(message)


@pytest.fixture
def member(monkeypatch):
    places = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "ARGOSY_GENERATION": "2"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    return Gang(Recorder())


def peer(rank, generation=2, *, code=None, number=None, places=()):
    frame = {"type": "peer", "attempt": f"a{rank}", "rank": rank, "generation": generation}
    return {**frame, "code": code, "signal": number, "places": [list(place) for place in places]}


def told(**message):
    return {"type": "told", "message": message}


def reform(generation, rank=1, world_size=4):
    return told(tell="reform", generation=generation, rank=rank, world_size=world_size)


def test_every_end_of_this_generation_is_a_loss_and_only_a_death_is_a_change(member):
    heard = []
    member.on_change(lambda gang: heard.append(gang.lost()))
    member._hear(peer(3, code=0))
    assert member.lost() == {3}
    assert not member.changed
    member._hear(peer(0, generation=1, number=9))
    member._hear(peer(2, number=9))
    assert member.lost() == {2, 3}
    assert member.changed
    member._hear(peer(2, number=9))
    assert heard == [{3}, {2, 3}]


def test_a_member_that_was_told_a_newer_generation_is_lost_in_this_one(member):
    member._hear(reform(3))
    member._hear(peer(0, generation=3, number=9, places=[(1, 0), (2, 3), (3, 0)]))
    assert member.lost() == {3}
    assert member.reason == "rank 3 of generation 2 died (signal 9)"
    member.take()
    assert member.lost() == {0}


def test_taking_a_place_forgets_older_losses_and_keeps_those_of_the_new_generation(member):
    assert member.coming() is None
    member.take()
    assert member.generation == 2
    member._hear(peer(0, number=9))
    member._hear(reform(3))
    member._hear(peer(2, generation=4, number=9))
    member._hear(reform(4, rank=0, world_size=3))
    member._hear(reform(3))
    assert member.coming() == Place(4, 0, 3)
    member.take()
    assert (member.generation, member.rank, member.world_size) == (4, 0, 3)
    assert member.coming() is None
    assert member.lost() == {2}
    assert os.environ["WORLD_SIZE"] == "3"
    assert member._link.said == [{"say": "join", "generation": 4}]


def test_suspicion_and_failure_are_said_with_their_reasons(member):
    member.suspect(3, "no lane for 2 s")
    member.fail("x" * 100_000)
    suspicion, failure = member._link.said
    assert suspicion == {
        "say": "suspect",
        "rank": 3,
        "generation": 2,
        "reason": "no lane for 2 s",
    }
    assert failure["say"] == "fail"
    assert len(json.dumps(failure)) < 64 << 10


def test_a_save_that_goes_on_is_told_once_this_process_is_to_leave(member, monkeypatch):
    member.saving(7, 1, 3)
    assert member._link.said == []
    monkeypatch.setattr(stops, "_is_asked", True)
    member.saving(7, 2, 3)
    advance = {"step": 7, "num_bytes": 2, "total_bytes": 3, "what": "written"}
    assert member._link.said == [{"say": "saving", **advance}]


def test_each_fault_is_handed_out_once(member):
    frame = told(tell="fault", kind="kill", step=40, point="vote", seconds=0, number=7)
    member._hear(frame)
    member._hear(frame)
    member._hear(told(tell="fault", kind="slow", step=None, point=None, seconds=0.5, number=8))
    first, second = member.faults()
    assert first == Fault("kill", 40, "vote", 0.0, 7)
    assert second == Fault("slow", None, None, 0.5, 8)
    assert member.faults() == []
    assert not member.changed


STOPS = """
import os, signal, sys
from argosy.worker import stops
stops.watch(interrupts=True)
if "polled" in sys.argv:
    assert not stops.is_asked()
number = int(sys.argv[1])
os.kill(os.getpid(), number)
print("asked" if stops.is_asked() else "not asked", flush=True)
os.kill(os.getpid(), number)
print("again", flush=True)
"""


@pytest.mark.parametrize(
    ("arguments", "output", "code"),
    [
        ([signal.SIGTERM, "polled"], "asked\nagain\n", 0),
        ([signal.SIGTERM], "", -signal.SIGTERM),
        ([signal.SIGINT, "polled"], "asked\n", -signal.SIGINT),
        ([signal.SIGINT], "", -signal.SIGINT),
    ],
)
def test_a_signal_is_remembered_only_for_those_who_look(arguments, output, code):
    words = [str(int(arguments[0])), *arguments[1:]]
    done = subprocess.run(
        [sys.executable, "-c", STOPS, *words], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == (output, code)


def test_ctrl_c_with_nobody_reading_what_is_said_is_remembered_all_the_same():
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-c", STOPS, str(int(signal.SIGINT)), "polled"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=writing, text=True, check=False)
    os.close(writing)
    assert (done.stdout, done.returncode) == ("asked\n", -signal.SIGINT)
