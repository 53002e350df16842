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
