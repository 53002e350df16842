"""What an agent has seen pass by, and what it answers from that."""

import asyncio
import os
import time

import psutil

from argosy.control.errands import Errands, Roster
from argosy.protocol.messages import Ask


def said(attempt, **message):
    return {"event": "link", "attempt": attempt, "message": message}


def test_an_agent_knows_the_step_each_living_process_is_at():
    roster = Roster()
    for number in range(2):
        roster.seen({"event": "started", "attempt": f"r1.train.{number}.0", "pid": 10 + number})
    roster.seen(said("r1.train.0.0", say="step", step=4))
    roster.seen(said("r1.train.0.0", say="step", step=5))
    roster.seen(said("r1.train.0.0", say="ready"))
    roster.seen(said("r1.train.0.0", say="step", step="half"))
    roster.seen(said("r1.train.9.0", say="step", step=9))
    errands = Errands(lambda: None, roster, None, None, dict)

    def steps():
        attempts = ["r1.train.0.0", "r1.train.1.0", "r1.train.9.0"]
        ask = Ask(id=1, verb="steps", data={"attempts": attempts})
        return asyncio.run(errands.answer(ask)).data["steps"]

    assert steps() == {"r1.train.0.0": 5}
    roster.seen({"event": "exited", "attempt": "r1.train.0.0", "code": 0})
    assert steps() == {}


def test_a_process_began_when_the_kernel_says():
    roster = Roster()
    roster.seen({"event": "started", "attempt": "a", "pid": os.getpid()})
    # psutil knows the time of the boot in whole seconds.
    assert abs(roster.began("a") - psutil.Process().create_time()) < 2.0
    assert roster.began("a") < time.time() <= roster.began("nobody") + 60.0
