"""The HTTP API without sockets: a run stays known as long as somebody follows it, by whatever stream."""

from __future__ import annotations

import asyncio

import pytest

from argosy.config.spec import RoleSpec, RunSpec, Submission
from argosy.control.conductor import Conductor
from argosy.control.eventlog import EventLog
from argosy.control.home import Cluster
from argosy.control.http import HttpApi
from argosy.control.shutdown import Shutdown


def with_run(tmp_path, test):
    """`test(conductor, application, run)` with a run that waits for a host."""

    async def run():
        log = EventLog(str(tmp_path / "events.sqlite"))
        conductor = Conductor(Cluster(str(tmp_path), str(tmp_path)), log)
        shutdown = Shutdown(conductor)
        application = HttpApi(conductor, shutdown, http_port=None).application()
        spec = RunSpec(roles={"a": RoleSpec(command=["x"])})
        [name], outputs = conductor.coordinator.submit(
            1.0, Submission(spec=spec, python="/python"), env_blob="", secret_blobs={}
        )
        await conductor.apply(outputs)
        try:
            await asyncio.wait_for(test(conductor, application, name), 30)
        finally:
            conductor.failed.cancel()
            shutdown.close()
            conductor.close()
            log.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/v1/runs/{}/stream", ""),
        ("/v1/runs/{}/logs", "follow=1"),
        ("/v1/events", "follow=1&run={}"),
    ],
)
def test_a_run_is_held_while_it_is_followed_and_not_longer(tmp_path, path, query):
    async def test(conductor, application, run):
        has_left = asyncio.Event()

        async def receive():
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "GET",
            "path": path.format(run),
            "query_string": query.format(run).encode(),
            "headers": [],
        }
        held = conductor.coordinator.retention._held
        following = asyncio.create_task(application(scope, receive, send))
        while not held:
            await asyncio.sleep(0.01)
        assert held == {run: 1}
        has_left.set()
        await following
        assert not held

    with_run(tmp_path, test)


def test_a_fault_that_cannot_be_carried_out_is_said_to_the_client_and_in_the_log(tmp_path):
    async def test(conductor, application, run):
        answers = []
        body = b'{"faults": [{"fault": "kill", "part": "keeper"}]}'

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            answers.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": f"/v1/runs/{run}/faults",
            "query_string": b"",
            "headers": [],
        }
        await application(scope, receive, send)
        assert answers[0]["status"] == 404
        assert b"no keeper" in answers[1]["body"]
        await conductor.wait_durable()
        texts = [getattr(e.fact, "text", "") for e in await conductor.log.read(0, run, 100)]
        assert any("was not carried out: there is no keeper" in text for text in texts)

    with_run(tmp_path, test)
