import asyncio

import pytest

from argosy.control.conductor import Conductor
from argosy.control.eventlog import EventLog
from argosy.control.home import Cluster
from argosy.errors import ClusterError, InvariantError, NotFoundError
from argosy.protocol.facts import Note


def with_conductor(tmp_path, test):
    async def run():
        log = EventLog(str(tmp_path / "events.sqlite"))
        conductor = Conductor(Cluster(str(tmp_path), str(tmp_path)), log)
        try:
            await asyncio.wait_for(test(conductor), 30)
        finally:
            conductor.close()
            log.close()

    asyncio.run(run())


def test_nothing_is_decided_any_more_after_a_decision_broke_off(tmp_path):
    async def test(conductor):
        await conductor.apply(conductor.coordinator.note(1.0, Note(text="whole")))

        def break_off(now):
            conductor.coordinator.seq += 1  # as a fold does before it finds the fact impossible
            raise InvariantError("impossible")

        conductor.coordinator.tick = break_off
        with pytest.raises(InvariantError):
            conductor._tick()
        assert isinstance(conductor.failed.exception(), InvariantError)
        with pytest.raises(ClusterError, match="restarted"):
            conductor.note(Note(text="after a gap"))
        assert [event.fact.text for event in conductor.log.replay()] == ["whole"]

    with_conductor(tmp_path, test)


def test_a_refusal_is_no_failure(tmp_path):
    async def test(conductor):
        with pytest.raises(NotFoundError):
            await conductor.stop("none", hard=False, reason="")
        assert not conductor.failed.done()
        conductor.note(Note(text="goes on"))
        conductor.failed.cancel()

    with_conductor(tmp_path, test)
