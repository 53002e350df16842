import asyncio
import gc

import pytest

from argosy.config.spec import RoleSpec, RunSpec, Submission
from argosy.control.conductor import Conductor
from argosy.control.eventlog import EventLog
from argosy.control.faults import FaultOrder
from argosy.control.home import Cluster
from argosy.control.shutdown import Shutdown
from argosy.errors import ClusterError, ConfigError, InvariantError, NotFoundError
from argosy.protocol.facts import Note
from argosy.protocol.messages import PROTOCOL_VERSION, Hello
from argosy.testing.scripted import ScriptedHost


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


async def give_host(conductor):
    """Let it have the host `h`, as if an agent had connected."""

    async def is_there():
        pass

    conductor.wait_for_agent = is_there
    hello = Hello(
        version=PROTOCOL_VERSION,
        host="h",
        keeper="k",
        pid=1,
        cpus=2,
        memory_bytes=1 << 30,
        alive=[],
    )
    await conductor.apply(conductor.coordinator.receive(1.0, "h", hello))


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


def test_a_run_that_no_host_could_ever_hold_is_not_accepted(tmp_path):
    async def test(conductor):
        await give_host(conductor)
        role = RoleSpec(command=["true"], cpu_request=64.0)
        with pytest.raises(ConfigError, match="needs 64 CPUs, and the only host has 2 CPUs"):
            await conductor.submit(Submission(spec=RunSpec(roles={"a": role}, queued=True)))
        await conductor.submit(Submission(spec=RunSpec(roles={"a": role})))

    with_conductor(tmp_path, test)


@pytest.mark.parametrize("when", ["before it is decided", "while it is made durable", "never"])
def test_a_run_whose_client_has_left_before_it_heard_of_it_does_not_stay(tmp_path, when):
    async def test(conductor):
        await give_host(conductor)
        answers = {"before it is decided": [True], "while it is made durable": [False, True]}

        async def has_left():
            return answers[when].pop(0) if answers.get(when) else False

        submission = Submission(spec=RunSpec(roles={"a": RoleSpec(command=["true"])}))
        if when == "before it is decided":
            with pytest.raises(ClusterError, match="has left"):
                await conductor.submit(submission, has_left=has_left)
            assert conductor.coordinator.runs_view(include_ended=True, limit=9) == []
            return
        (run,) = await conductor.submit(submission, has_left=has_left)
        stop = conductor.coordinator.runs[run["run"]].stop
        assert (stop is not None) == (when != "never")

    with_conductor(tmp_path, test)


def test_a_run_with_more_processes_than_a_host_can_hold_is_refused_at_once(tmp_path):
    async def test(conductor):
        asked = []

        async def answer(host, verb, data):
            if verb == "room":
                asked.append(data)
                return {"what": "there is room for 100 more", "fix": "use fewer"}
            return {}

        async def is_there():
            pass

        conductor.wait_for_agent = is_there
        conductor.links.hosts = lambda: ["h"]
        conductor.links.ask = answer
        roles = {
            "a": RoleSpec(command=["true"], count=9000),
            "b": RoleSpec(script="b.py", count=500, gang=True, spares=4),
        }
        with pytest.raises(
            ConfigError, match="9504 processes are too many; there is room"
        ) as error:
            await conductor.submit(Submission(spec=RunSpec(roles=roles)))
        assert error.value.fix == "use fewer"
        assert asked == [{"commands": 9000, "pythons": 504}]
        assert conductor.coordinator.runs == {}
        small = {"a": RoleSpec(command=["true"], count=4, gang=True)}
        [submitted] = await conductor.submit(Submission(spec=RunSpec(roles=small)))
        assert len(asked) == 1
        with pytest.raises(ConfigError, match="4000 processes are too many"):
            await conductor.scale(submitted["run"], 4000, role=None, may_restart=False)

    with_conductor(tmp_path, test)


def test_a_fault_at_a_step_that_is_over_is_refused_by_what_the_agents_have_heard(tmp_path):
    async def test(conductor):
        async def answer(host, verb, data):
            steps = {"train.0.0": 7, "train.1.0": 8, "evaluate.0.0": 10_000}
            told = {name: steps[name.partition(".")[2]] for name in data.get("attempts", [])}
            return {"steps": told} if verb == "steps" else {}

        await give_host(conductor)
        conductor.links.ask = answer
        roles = {
            "train": RoleSpec(command=["true"], count=2, gang=True),
            "evaluate": RoleSpec(command=["true"], gang=True),
        }
        [submitted] = await conductor.submit(Submission(spec=RunSpec(roles=roles)))
        conductor.links.hosts = lambda: ["h"]

        async def inject(**where):
            await conductor.inject(submitted["run"], [FaultOrder(fault="kill", rank=0, **where)])

        with pytest.raises(ConfigError, match="step 7 is over: the run is at step 8"):
            await inject(step=7, role="train")
        with pytest.raises(ConfigError, match="step 60 is over: the run is at step 10000"):
            await inject(step=60, role="evaluate")
        with pytest.raises(ConfigError, match="several gangs"):
            await inject(step=60)
        with pytest.raises(NotFoundError, match="no live rank 0"):  # that is all that is missing
            await inject(step=60, role="train")

    with_conductor(tmp_path, test)


def test_a_start_after_five_thousand_runs_reads_the_events_of_the_last_ones_only(tmp_path):
    host = ScriptedHost()
    roles = {"a": RoleSpec(command=["true"])}
    gc.disable()
    for _ in range(5000):
        host.submit(roles)
        host.start("a.0.0")
        host.exit("a.0.0", code=0)
    gc.enable()
    assert len(host.log) > 35_000
    per_run = 8

    async def write():
        log = EventLog(str(tmp_path / "events.sqlite"))
        for first in range(0, len(host.log), 5000):
            await log.append(host.log[first : first + 5000])
        while log._num_doomed:
            await asyncio.sleep(0.01)
        log.close()

    async def test(conductor):
        count = conductor.replay()
        assert count <= 1100 * per_run + 10
        assert conductor.coordinator.seq == host.coordinator.seq
        assert conductor.coordinator.memory() == host.coordinator.memory()
        assert conductor.tally.num_ended == 5000
        assert list(conductor.coordinator.runs) == list(host.coordinator.runs)
        conductor.failed.cancel()

    asyncio.run(asyncio.wait_for(write(), 60))
    with_conductor(tmp_path, test)


def test_a_shutdown_does_not_wait_for_an_event_that_never_comes(tmp_path):
    async def test(conductor):
        # What is pending here is a message's turn in the order of the log, without an event.
        conductor.log.append([])
        shutdown = Shutdown(conductor)
        shutdown.begin("asked")
        async with asyncio.timeout(4):
            while shutdown.is_begun:
                await asyncio.sleep(0.01)
        shutdown.close()

    with_conductor(tmp_path, test)


def test_how_a_run_ended_is_in_its_directory_also_when_the_controller_died_before_it_was(tmp_path):
    def ends():
        return sorted(path.parent.name for path in tmp_path.glob("runs/*/end.json"))

    async def until(count):
        while len(ends()) < count:
            await asyncio.sleep(0.01)

    runs = []

    async def live(conductor):
        submission = Submission(spec=RunSpec(roles={"a": RoleSpec(command=["x"])}), python="/p")
        for _ in range(3):
            [run], outputs = conductor.coordinator.submit(
                1.0, submission, env_blob="", secret_blobs={}
            )
            await conductor.apply(outputs)
            await conductor.stop(run, hard=True, reason="enough")
            runs.append(run)
        await until(3)
        conductor.failed.cancel()

    async def again(conductor):
        conductor.replay()
        await until(3)
        conductor.failed.cancel()

    with_conductor(tmp_path, live)
    (tmp_path / "runs" / runs[1] / "end.json").unlink()
    with_conductor(tmp_path, again)
    assert ends() == sorted(runs)
