import asyncio
import functools
import socket
import sys
import time

import pytest

from argosy.control.probes import Probes
from argosy.errors import ClusterError
from argosy.protocol.messages import Launch


def in_loop(test):
    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 30))

    return run


def launch(tmp_path, **ports):
    return Launch(
        attempt="r.a.0.0",
        run="r",
        role="a",
        index=0,
        program={},
        python=sys.executable,
        env_blob="",
        env={},
        cwd=str(tmp_path),
        umask=0o022,
        limits={},
        affinity=[],
        stdout="",
        stderr="",
        ports=ports,
    )


async def refuse(launch, argv):
    raise ClusterError(f"nobody runs {argv} beside {launch.attempt} here")


async def answer(probe, launch, run_command=refuse, meanwhile=None, **more):
    """What one probe says in the end."""
    told = asyncio.get_running_loop().create_future()
    probes = Probes(lambda attempt, ready, why: told.set_result((attempt, ready, why)), run_command)
    probes.begin("r.a.0.0", {"every_seconds": 0.01, **probe}, launch, **more)
    if meanwhile is not None:
        await asyncio.sleep(0.05)
        assert not told.done()
        meanwhile()
    return await told


@in_loop
async def test_a_port_is_ready_when_it_accepts(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        found = await answer({"port": "web"}, launch(tmp_path, web=port), meanwhile=sock.listen)
    assert found == ("r.a.0.0", True, "")


@in_loop
async def test_http_is_ready_when_it_answers_well(tmp_path):
    state = {"status": b"503 Busy"}
    asked = []

    async def serve(reader, writer):
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 " + state["status"] + b"\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found = await answer(
        {"http": "web/health?x=1"},
        launch(tmp_path, web=port),
        meanwhile=lambda: state.update(status=b"204 Fine"),
    )
    server.close()
    assert found[1]
    assert asked[0] == b"GET /health?x=1 HTTP/1.1\r\n"


@in_loop
async def test_a_file_is_ready_when_it_exists_in_the_process_directory(tmp_path):
    found = await answer({"file": "ready"}, launch(tmp_path), meanwhile=(tmp_path / "ready").touch)
    assert found[1]


@in_loop
async def test_a_file_that_an_earlier_start_has_left_does_not_count_until_it_is_made_anew(tmp_path):
    (tmp_path / "ready").touch()
    found = await answer(
        {"file": "ready", "timeout_seconds": 0.05}, launch(tmp_path), began=time.time() + 5
    )
    assert (found[1], "older than the process" in found[2]) == (False, True)
    found = await answer(
        {"file": "ready"},
        launch(tmp_path),
        began=time.time() + 5,
        meanwhile=(tmp_path / "ready").touch,
    )
    assert found[1], "whatever the clock of the disk says"
    assert (await answer({"file": "ready"}, launch(tmp_path), began=time.time() - 5))[1]


@in_loop
async def test_who_has_not_answered_when_the_time_is_over_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = launch(tmp_path, web=silent.getsockname()[1])
        found = await answer({"http": "web/health", "timeout_seconds": 0.05}, ports)
    assert found == ("r.a.0.0", False, "not ready after 0.05 s: web/health has not answered")

    async def hang(launch, argv):
        await asyncio.Event().wait()

    found = await answer({"command": ["check"], "timeout_seconds": 0.05}, launch(tmp_path), hang)
    assert found[2] == "not ready after 0.05 s: check has not ended"


@in_loop
async def test_a_command_is_ready_when_it_exits_well(tmp_path):
    asked = []

    async def run(launch, argv):
        asked.append((launch.attempt, argv))
        return {"code": 0 if (tmp_path / "flag").exists() else 1, "signal": None, "error": ""}

    found = await answer(
        {"command": ["test", "-e", "flag"]},
        launch(tmp_path),
        run,
        meanwhile=(tmp_path / "flag").touch,
    )
    assert found[1]
    assert asked[0] == ("r.a.0.0", ["test", "-e", "flag"])


@in_loop
@pytest.mark.parametrize(
    ("end", "why"),
    [
        ({"code": 3, "signal": None, "error": ""}, "check exited with 3"),
        ({"code": None, "signal": 9, "error": ""}, "check was ended by signal 9"),
        ({"code": None, "signal": None, "error": "not found: check"}, "not found: check"),
    ],
)
async def test_a_command_that_fails_is_told_with_how_it_ended(tmp_path, end, why):
    async def run(launch, argv):
        return end

    found = await answer({"command": ["check"], "timeout_seconds": 0.05}, launch(tmp_path), run)
    assert found == ("r.a.0.0", False, f"not ready after 0.05 s: {why}")


@in_loop
async def test_a_cancelled_probe_says_nothing_and_cancels_its_command(tmp_path):
    told, ends = [], []
    begun = asyncio.Event()

    async def run(launch, argv):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ends.append(argv)

    probes = Probes(lambda *what: told.append(what), run)
    probes.begin("r.a.0.0", {"command": ["check"]}, launch(tmp_path))
    await begun.wait()
    probes.cancel("r.a.0.0")
    await asyncio.sleep(0)
    assert (told, ends) == ([], [["check"]])


@in_loop
async def test_what_is_never_ready_is_told_with_the_last_reason(tmp_path):
    found = await answer({"file": "never", "timeout_seconds": 0.05}, launch(tmp_path))
    assert found[:2] == ("r.a.0.0", False)
    assert "never" in found[2]
    found = await answer({"command": ["check"], "timeout_seconds": 0.05}, launch(tmp_path))
    assert not found[1]
    assert "nobody runs ['check'] beside r.a.0.0 here" in found[2]
