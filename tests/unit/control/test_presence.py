import asyncio
import os
import subprocess
import sys

import pytest

from argosy.control.presence import LifeWatch, take_lock
from argosy.errors import ClusterError


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path):
    path = str(tmp_path / "part.lock")
    code = (
        "import sys; from argosy.control.presence import take_lock; "
        f"take_lock({path!r}, 'part'); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ClusterError, match=f"another part \\(pid {holder.pid}\\)") as caught:
            take_lock(path, "part", patience_seconds=0.05)
        assert "ARGOSY_HOME" in caught.value.fix
    finally:
        holder.kill()
        holder.communicate()
    descriptor = take_lock(path, "part", patience_seconds=5)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def watch(pid, before):
    """Whether the watch on a process calls back."""

    async def body():
        died = asyncio.Event()
        LifeWatch(pid, died.set)
        before()
        await asyncio.wait_for(died.wait(), 20)

    asyncio.run(body())


def test_the_end_of_a_process_is_noticed():
    process = subprocess.Popen(["sleep", "1000"])
    watch(process.pid, process.kill)
    process.wait()


def test_a_process_that_is_gone_already_is_noticed_too():
    process = subprocess.Popen(["true"])
    process.wait()
    watch(process.pid, lambda: None)
