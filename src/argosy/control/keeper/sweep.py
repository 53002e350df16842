"""Before and after a keeper: end what a dead one left, and start a new one.

Used by the agent, the controller and the `argosy` command; imports little. A sweep takes the keeper's lock, so it never
touches the processes of a live keeper; it kills by cgroup name, by recorded pid and start time, and by mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from typing import Any

from argosy.control import locks
from argosy.control.keeper.census import (
    Census,
    Seen,
    ancestors,
    cluster_key,
    describe,
    is_same_alive,
    kill_seen,
    look_at_all,
    marks_of,
)
from argosy.control.keeper.containment import processes_in, remove_tree, roots_of_cluster
from argosy.control.keeper.records import Records
from argosy.errors import ClusterError

_SWEEP_SECONDS = 10.0
_START_SECONDS = 20.0
_TAIL_BYTES = 4000


def sweep_dead_keeper(directory: str, runtime: str) -> list[str]:
    """End all that is left of this cluster's dead keeper; what was killed. A live keeper: nothing is done."""
    lock = take_lock(runtime)
    if lock is None:
        return []
    try:
        return [] if living_keeper(directory) else sweep_leftovers(directory)
    finally:
        os.close(lock)


def living_keeper(directory: str) -> int:
    """The pid of the keeper that keeps this cluster; 0 when it has died. Its lock may be out of sight: elsewhere, or removed."""
    who = Records(directory).read_keeper()
    pid = int(who.get("pid", 0))
    return pid if is_same_alive(pid, int(who.get("start", 0))) else 0


def sweep_leftovers(directory: str) -> list[str]:
    """As above, for the holder of the lock. Waits until the processes are gone."""
    records = Records(directory)
    attempts = records.read_attempts()
    cluster = cluster_key(directory)
    if not records.read_keeper() and not attempts and not roots_of_cluster(cluster):
        return []
    killed: dict[tuple[int, int], str] = {}
    deadline = time.monotonic() + _SWEEP_SECONDS
    pause = 0.001
    while True:
        left = _find_left(cluster, attempts)
        if not left or time.monotonic() > deadline:
            break
        for seen in left:
            killed.setdefault((seen.pid, seen.start), describe(seen.pid))
            kill_seen(seen)
        _kill_groups(cluster)
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    for _, path in roots_of_cluster(cluster):
        _remove(path)
    records.remove_attempts()
    return list(killed.values())


def _find_left(cluster: str, attempts: list[dict[str, Any]]) -> list[Seen]:
    census = Census()
    everybody = census.everybody
    own = ancestors(os.getpid(), everybody)
    found: dict[int, Seen] = {}
    for _, path in roots_of_cluster(cluster):
        found.update({seen.pid: seen for seen in processes_in(path)})
    roots = set()
    for record in attempts:
        pid, start = record.get("pid"), record.get("start")
        if not isinstance(pid, int) or pid <= 1:
            continue
        if pid in everybody and everybody[pid].start == start:
            roots.add(pid)
            roots.update(census.of_session(pid))
    marks = marks_of(everybody)
    roots |= {pid for pid, mark in marks.items() if mark.startswith(f"{cluster}.")}
    for pid in census.with_descendants(roots - own):
        if pid in everybody and everybody[pid].is_alive:
            found[pid] = everybody[pid]
    return [seen for pid, seen in found.items() if pid not in own]


def _kill_groups(cluster: str) -> None:
    own = ancestors(os.getpid(), look_at_all())
    for method, path in roots_of_cluster(cluster):
        if method == "cgroup2" and not any(seen.pid in own for seen in processes_in(path)):
            with contextlib.suppress(OSError), open(f"{path}/cgroup.kill", "w") as file:
                file.write("1")


def _remove(path: str) -> None:
    for _ in range(50):
        if remove_tree(path):
            return
        time.sleep(0.01)


def take_lock(runtime: str) -> int | None:
    """The keeper's lock, close-on-exec; None when somebody holds it. Raises OSError."""
    while True:
        os.makedirs(runtime, mode=0o700, exist_ok=True)
        try:
            return locks.take(f"{runtime}/keeper.lock")
        except FileNotFoundError:
            pass  # the directory went with a cluster that was taken down meanwhile


def wait_for_lock(directory: str, runtime: str, seconds: float = 15.0) -> int | None:
    """The lock; waits while a sweep holds it, not while a live keeper does."""
    deadline = time.monotonic() + seconds
    while True:
        lock = take_lock(runtime)
        if lock is not None:
            return lock
        if living_keeper(directory) or time.monotonic() > deadline:
            return None
        time.sleep(0.01)


def start_keeper(
    directory: str,
    runtime: str,
    *,
    inherit_fd: int | None = None,
    warm: dict[str, Any] | None = None,
    options: list[str] | None = None,
) -> None:
    """Start a keeper as a daemon and wait until it listens; fine when one is running. Raises ClusterError."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    log_path = f"{directory}/keeper.log"
    ready_read, ready_write = os.pipe()
    passed = {"--ready-fd": ready_write}
    if inherit_fd is not None:
        passed["--inherit"] = inherit_fd
    if warm is not None:
        # Not on the command line: it holds values of the environment, and everybody may read that.
        passed["--warm-fd"] = os.memfd_create("argosy:warm", os.MFD_CLOEXEC)
        os.write(passed["--warm-fd"], json.dumps(warm).encode())
    # The child's numbers lie above every source, so that no copy overwrites another.
    first = max(passed.values()) + 1
    command = [sys.executable, "-m", "argosy.control.keeper"]
    command += ["--directory", directory, "--runtime", runtime]
    for number, option in enumerate(passed, first):
        command += [option, str(number)]
    command += options or []
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log_path, flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    actions += [
        (os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(passed.values(), first)
    ]
    env = {name: value for name, value in os.environ.items() if name != "ARGOSY_MARK"}
    try:
        # The shell backgrounds it and exits: the keeper is nobody's child, and no fork of this
        # process (which may have threads) is needed.
        shell = ["/bin/sh", "-c", '"$@" &', "sh", *command]
        pid = os.posix_spawn("/bin/sh", shell, env, file_actions=actions, setsid=True)
        os.waitpid(pid, 0)
    except OSError as error:
        os.close(ready_read)
        raise ClusterError(
            f"the keeper could not be started: {error}", fix=f"look at {log_path}"
        ) from None
    finally:
        os.close(ready_write)
        if warm is not None:
            os.close(passed["--warm-fd"])
    try:
        _wait_ready(ready_read, runtime, log_path)
    finally:
        os.close(ready_read)


def _wait_ready(ready: int, runtime: str, log_path: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    said = b""
    while not said.endswith(b"\n"):
        readable, _, _ = select.select([ready], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(ready, 64) if readable else b""
        if not part:
            what = "ended at once" if readable else f"is not ready after {_START_SECONDS:.0f} s"
            raise ClusterError(
                f"the keeper {what}; the end of {log_path}:\n{_tail(log_path)}",
                fix="mend what the log names, then run the command again",
            )
        said += part
    if said == b"ready\n":
        return
    # Somebody else's keeper was faster: wait until it listens.
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(f"{runtime}/keeper.sock")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{runtime}/keeper.lock is held, but nobody answers on keeper.sock",
                        fix="end the process that holds the lock (fuser names it)",
                    ) from None
        time.sleep(0.01)


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip()
    except OSError as error:
        return f"({error.strerror})"
