import asyncio
import functools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from argosy.control.probes import Probes
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


async def answer(probe, launch, environment=None, meanwhile=None):
    """What one probe says in the end."""
    told = asyncio.get_running_loop().create_future()
    probes = Probes(lambda attempt, ready, why: told.set_result((attempt, ready, why)))
    probes.begin(
        "r.a.0.0", {"every_seconds": 0.01, **probe}, launch, environment or dict(os.environ)
    )
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
async def test_a_command_is_ready_when_it_exits_well_in_the_process_environment(tmp_path):
    environment = {**os.environ, "WANT": str(tmp_path / "flag")}
    found = await answer(
        {"command": ["sh", "-c", 'test -e "$WANT"']},
        launch(tmp_path),
        environment,
        meanwhile=(tmp_path / "flag").touch,
    )
    assert found[1]


@in_loop
async def test_what_is_never_ready_is_told_with_the_last_reason(tmp_path):
    found = await answer({"file": "never", "timeout_seconds": 0.05}, launch(tmp_path))
    assert found[:2] == ("r.a.0.0", False)
    assert "never" in found[2]
    found = await answer(
        {"command": ["/no/such/program"], "timeout_seconds": 0.05}, launch(tmp_path)
    )
    assert not found[1]
    assert "/no/such/program" in found[2]


@in_loop
async def test_a_cancelled_probe_says_nothing_and_leaves_no_process(tmp_path):
    told = []
    probes = Probes(lambda *what: told.append(what))
    script = f"echo $$ > {tmp_path}/pid; sleep 1000; true"
    probe = {"command": ["sh", "-c", script]}
    probes.begin("r.a.0.0", probe, launch(tmp_path), dict(os.environ))
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    probes.cancel("r.a.0.0")
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert told == []


def test_the_command_of_a_probe_dies_with_the_agent(tmp_path):
    script = """
import asyncio, sys
from argosy.control import probes
asyncio.run(probes._check_command(["sh", "-c", "echo $$ > pid; exec sleep 1000"], sys.argv[1], {}))
"""
    agent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    deadline = time.monotonic() + 20
    try:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        agent.kill()
        agent.wait()
    status = f"/proc/{(tmp_path / 'pid').read_text().strip()}/status"
    while os.path.exists(status) and "State:\tZ" not in Path(status).read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
