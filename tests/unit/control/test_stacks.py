import asyncio
import faulthandler
import os
import subprocess
import sys
import time

from argosy.control import stacks
from argosy.control.stacks import STACK_SIGNAL, Target, is_armed, parse_faulthandler, take_stacks


def test_a_dump_of_faulthandler_is_read(tmp_path):
    path = tmp_path / "dump"
    with open(path, "w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
    threads = parse_faulthandler("noise\n" + path.read_text())
    current = [thread for thread in threads if thread["active"]]
    assert current[0]["frames"][0]["function"] == "test_a_dump_of_faulthandler_is_read"
    assert current[0]["frames"][0]["file"] == __file__


def test_a_process_without_a_handler_is_never_signalled(tmp_path):
    process = subprocess.Popen(["sleep", "1000"])
    try:
        assert not is_armed(process.pid)
        (stack,) = asyncio.run(take_stacks([Target("a", process.pid, str(tmp_path / "none"))]))
        assert stack["error"] == "it is no Python process"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_where_py_spy_fails_the_armed_handler_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "_find_py_spy", lambda: "/bin/false")
    code = (
        "import faulthandler, time\n"
        f"faulthandler.register({int(STACK_SIGNAL)}, file=2, all_threads=True)\n"
        "def inner():\n    print('up', flush=True)\n    time.sleep(1000)\ninner()\n"
    )
    errors = tmp_path / "err"
    with open(errors, "ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr
        )
    try:
        assert process.stdout.readline() == b"up\n"
        assert is_armed(process.pid)
        (stack,) = asyncio.run(take_stacks([Target("a", process.pid, str(errors))]))
        assert stack["source"] == "faulthandler"
        assert "inner" in [frame["function"] for frame in stack["threads"][0]["frames"]]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_is_gone_is_said_to_be():
    process = subprocess.Popen(["true"])
    process.wait()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{process.pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    (stack,) = asyncio.run(take_stacks([Target("a", process.pid, "")]))
    assert stack["state"] == "gone"
    assert stack["error"]
