"""Commands beside a process, as the agent orders them of its keeper."""

import asyncio

from argosy.control.guests import Guests, exec_name, is_exec, is_probe
from argosy.control.identity import attempt_id, is_attempt
from argosy.control.launchenv import LaunchEnvironments
from argosy.native import isa
from argosy.protocol.messages import Launch


class Link:
    """A keeper that says yes to everything, and how a command ended once it is asked for."""

    def __init__(self):
        self.told, self.asked = [], []

    def tell(self, frame):
        self.told.append(frame)

    async def ask(self, frame, timeout_seconds):
        self.asked.append(frame)
        return {"ok": True}


def launch():
    return Launch(
        attempt="r1.train.0.0",
        run="r1",
        role="train",
        index=0,
        program={},
        python="python",
        env_blob="",
        env={"OWN": "1"},
        cwd="/work",
        umask=0o022,
        limits={},
        affinity=[1],
        stdout="",
        stderr="",
        nice=3,
    )


def make_guests():
    link = Link()
    return Guests(lambda: link, LaunchEnvironments(lambda name: None)), link


def test_a_role_may_be_called_like_a_guest():
    for role in ("probe-1", "exec-1", "train"):
        name = attempt_id("r1", role, 0, 0)
        assert is_attempt(name)
        assert (is_probe(name), is_exec(name)) == (False, False)
        guest = exec_name(name)
        assert (is_probe(guest), is_exec(guest), is_attempt(guest)) == (False, True, False)


def test_a_probe_has_what_its_process_has_and_ends_with_the_event_of_its_exit(monkeypatch):
    monkeypatch.setattr(isa, "environment", lambda given: {"CAPPED": "yes"})

    async def probe():
        guests, link = make_guests()
        asking = asyncio.create_task(guests.probe(launch(), ["check", "it"]))
        while not link.asked:
            await asyncio.sleep(0)
        (order,) = link.asked[0]["batch"]["attempts"]
        guests.listed([{"attempt": order["attempt"], "state": "running"}])
        guests.seen({"event": "started", "attempt": order["attempt"]})
        guests.seen({"event": "exited", "attempt": "r1.train.0.0", "code": 1})
        guests.seen({"event": "exited", "attempt": order["attempt"], "code": 7})
        return order, (await asking)["code"], link.told

    order, code, told = asyncio.run(probe())
    assert is_probe(order["attempt"])
    assert (code, told) == (7, [])
    assert order["env"] == {"OWN": "1", "CAPPED": "yes"}
    assert (order["join"], order["cwd"], order["nice"]) == ("r1.train.0.0", "/work", 3)
    assert order["affinity"] == [1]


def test_a_probe_that_is_cancelled_or_of_an_agent_before_is_killed():
    async def leave():
        guests, link = make_guests()
        asking = asyncio.create_task(guests.probe(launch(), ["check"]))
        while not link.asked:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        guests.listed(
            [
                {"attempt": "r1.train.0.0", "state": "running"},
                {"attempt": "r1.train.0.0.exec-1", "state": "running"},
                {"attempt": "r1.train.0.0.probe-1", "state": "running"},
                {"attempt": "r1.train.0.0.probe-2", "state": "exited"},
            ]
        )
        return link

    link = asyncio.run(leave())
    mine = link.asked[0]["batch"]["attempts"][0]["attempt"]
    assert [(frame["type"], frame["attempt"]) for frame in link.told] == [
        ("kill", mine),
        ("kill", "r1.train.0.0.probe-1"),
    ]
