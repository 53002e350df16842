"""Room on a host: can it hold so many more processes? Asked by the controller, through the agent, before a large run is accepted.

Looks at what the kernel counts: process numbers, limits of cgroups and of the user, the keeper's descriptors, memory. It guesses in favour
of the run: what is refused here would fail for certain, what is not may still. Changes nothing.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import NamedTuple

from argosy.control.keeper.containment import process_limits

_SPARE = 64
"""Left for everything else."""
_COMMAND_BYTES = 256 << 10
"""The least that any process costs, most of it in the kernel."""
_PYTHON_BYTES = 8 << 20
"""The least of its own that an interpreter has, forked or not."""


class Shortage(NamedTuple):
    """Why there is no room."""

    what: str
    fix: str


class _Limit(NamedTuple):
    most: int
    used: int
    what: str
    fix: str

    @property
    def free(self) -> int:
        return max(0, self.most - self.used - _SPARE)


def find_shortage(num_commands: int, num_pythons: int, keeper_pid: int) -> Shortage | None:
    """What so many more processes would lack here; None: nothing that can be seen."""
    count = num_commands + num_pythons
    limit = min(_limits(keeper_pid), key=lambda limit: limit.free)
    if limit.free < count:
        what = f"there is room for {limit.free} more: {limit.what} is {limit.most}, {limit.used} in use"
        return Shortage(what, limit.fix)
    needed, free = num_commands * _COMMAND_BYTES + num_pythons * _PYTHON_BYTES, _free_memory()
    if needed > free:
        what = f"they need at least {_gib(needed)} of memory, {_gib(free)} are available"
        return Shortage(what, f"use at most {count * free // needed} processes")
    return None


def find_unusable(cpus: list[int]) -> list[int]:
    """Which of these CPUs no process may be pinned to here. Tried with the thread that asks, which is then where it was before."""
    before = os.sched_getaffinity(0)
    unusable = []
    for cpu in cpus:
        try:
            os.sched_setaffinity(0, [cpu])
        except (OSError, OverflowError):
            unusable.append(cpu)
    os.sched_setaffinity(0, before)
    return unusable


def _limits(keeper_pid: int) -> Iterator[_Limit]:
    tasks = _num_tasks()
    for name in ("pid_max", "threads-max"):
        fix = f"use fewer processes, or raise it: sysctl kernel.{name}"
        yield _Limit(_read_number(f"/proc/sys/kernel/{name}"), tasks, f"kernel.{name}", fix)
    for path, most, used in process_limits():
        yield _Limit(most, used, path, "use fewer processes, or raise that limit of the cgroup")
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:
        fix = (
            "use fewer processes, or raise it (ulimit -u) and start the cluster again: argosy down"
        )
        yield _Limit(soft, _num_own_tasks(), "the limit of processes of this user", fix)
    # One descriptor is certain for each process. One that joins has a link besides, and nobody knows yet whether it will.
    fix = "use fewer processes, or raise it (ulimit -Hn) and start the cluster again: argosy down"
    yield _Limit(*_descriptors(keeper_pid), "the keeper's limit of open files", fix)


def _num_tasks() -> int:
    """Processes and threads of the whole machine."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])


def _num_own_tasks() -> int:
    """Processes and threads of this user, which is what the kernel counts."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # ended meanwhile, or not ours to look into
    return count


def _descriptors(pid: int) -> tuple[int, int]:
    """(limit, in use) of a process's descriptors."""
    try:
        most = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        most, used = resource.RLIM_INFINITY, 0
    return (1 << 40 if most == resource.RLIM_INFINITY else most), used


def _free_memory() -> int:
    """Memory that can be had, and swap."""
    with open("/proc/meminfo") as file:
        sizes = dict(line.split()[:2] for line in file)
    if "MemAvailable:" not in sizes:
        return 1 << 60
    return int(sizes["MemAvailable:"]) + int(sizes.get("SwapFree:", 0)) << 10


def _read_number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
