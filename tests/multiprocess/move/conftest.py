"""Ranks of the tests beside this file: forks of the test's own process, which has imported torch already."""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback

import pytest

from argosy.errors import ArgosyError

DEADLINE_SECONDS = 90


@pytest.fixture
def forked(tmp_path):
    """Run `body(rank, prepare(rank, directory))` in forks; what each returned or raised, or how it ended.

    `prepare` makes what ranks have anyway: what it opens is not counted as leaked by the body.
    """

    def run(size, body, prepare, name="job"):
        directory = tmp_path / name
        directory.mkdir()
        pids = [_fork(rank, body, prepare, directory) for rank in range(size)]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        results = []
        for rank, status in enumerate(statuses):
            path = directory / f"{rank}.json"
            results.append(json.loads(path.read_text()) if path.exists() else {"status": status})
        return results

    return run


def _fork(rank, body, prepare, directory):
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        signal.alarm(DEADLINE_SECONDS)
        prepared = prepare(rank, directory)
        before = set(os.listdir("/proc/self/fd"))
        try:
            result = {"result": body(rank, prepared)}
        except ArgosyError as error:
            result = {"error": type(error).__name__, "text": str(error)}
        result["threads"] = threading.active_count()
        result["leaked"] = len(set(os.listdir("/proc/self/fd")) - before)
        (directory / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
