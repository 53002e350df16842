"""Is this host fit to train: memory, disk, limits, clock, home, containment, stacks, name lookup.

Each check looks or tries the real thing and gives one `Check`: pure data with the mend beside it. `argosy doctor` prints them.
Nothing here needs a running cluster, changes the host, or leaves a file, process or cgroup behind; what may hang runs in a
child with a deadline. The checks that need torch are in torchchecks.py.
"""

from __future__ import annotations

import mmap
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from argosy.control import home
from argosy.control.keeper import containment, kernel
from argosy.errors import HomeError

State = Literal["ok", "warning", "broken"]

GIB = 1 << 30
_LEAST_MEMORY_BYTES = 2 * GIB
_LEAST_DISK_BYTES = 10 * GIB
_LEAST_NOFILE = 4096
_LEAST_NPROC = 1024
_SLOW_LOOKUP_SECONDS = 0.5
_LOOKUP_DEADLINE_SECONDS = 8.0
_DIRECT_BYTES = 1 << 20


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the doctor: what was looked at, how it is, and how to mend it."""

    name: str
    state: State
    detail: str
    mend: str = ""


def ok(name: str, detail: str) -> Check:
    """Nothing to do."""
    return Check(name=name, state="ok", detail=detail)


def warning(name: str, detail: str, mend: str) -> Check:
    """Works, but slower or with less than it could."""
    return Check(name=name, state="warning", detail=detail, mend=mend)


def broken(name: str, detail: str, mend: str) -> Check:
    """Training cannot work until this is mended."""
    return Check(name=name, state="broken", detail=detail, mend=mend)


def host_checks() -> list[tuple[str, Callable[[], Check]]]:
    """All checks of this module in the order in which they are shown."""
    return [
        ("memory", check_memory),
        ("shared memory", check_shared_memory),
        ("huge pages", check_huge_pages),
        ("home", check_home),
        ("disk", check_disk),
        ("limits", check_limits),
        ("clock", check_clock),
        ("processes", check_processes),
        ("containment", check_containment),
        ("memory limits", check_memory_limits),
        ("stacks", check_stacks),
        ("name lookup", check_name_lookup),
    ]


def check_memory() -> Check:
    """How much a run can use: what is free now, and what a cgroup allows."""
    values = _meminfo()
    total, free = values.get("MemTotal", 0), values.get("MemAvailable", 0)
    limit = _cgroup_memory_limit()
    swap = values.get("SwapTotal", 0)
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    if limit is not None and limit < total:
        detail += f", limited to {limit / GIB:.1f} GiB by the cgroup"
        free = min(free, limit)
    detail += f", swap {swap / GIB:.1f} GiB" if swap else ", no swap"
    if free < _LEAST_MEMORY_BYTES:
        return warning(
            "memory",
            detail,
            "end other programs or raise the limit: torch alone takes about 0.4 GiB a rank",
        )
    return ok("memory", detail)


def check_shared_memory() -> Check:
    """Arenas are memfds; torch's DataLoader workers also use /dev/shm."""
    try:
        descriptor = kernel.sealed_memfd("argosy-doctor", b"probe")
    except OSError as failure:
        return broken(
            "shared memory",
            f"memfd_create: {failure.strerror}",
            "use a kernel of 3.17 or newer, and a seccomp profile that allows memfd_create",
        )
    os.close(descriptor)
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return warning(
            "shared memory",
            "sealed memfds work; there is no /dev/shm",
            "mount a tmpfs at /dev/shm: DataLoader workers need it",
        )
    free = space.f_bavail * space.f_frsize
    detail = f"sealed memfds work; {free / GIB:.1f} GiB free in /dev/shm"
    if free < GIB:
        return warning("shared memory", detail, "mount -o remount,size=8G /dev/shm")
    return ok("shared memory", detail)


def check_huge_pages() -> Check:
    """Large weights gain from huge pages; `never` costs some speed, nothing else."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return ok("huge pages", "the kernel does not say")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return warning(
            "huge pages",
            "transparent huge pages are off",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return ok("huge pages", f"transparent: {chosen}")


def check_home() -> Check:
    """Writable, local, of our format: what every command needs first."""
    try:
        cluster = home.look_at_cluster()
        standing = home.nearest_directory(cluster.home)
        home.check_space(standing)
        if standing != cluster.home:
            # Permissions alone do not tell whether it could be made there.
            os.rmdir(tempfile.mkdtemp(prefix=".doctor-", dir=standing))
    except HomeError as failure:
        return broken("home", failure.what, failure.fix)
    except OSError as failure:
        return broken(
            "home",
            f"{failure.filename} cannot be made: {failure.strerror}",
            "set ARGOSY_HOME to a writable directory on a local disk",
        )
    return ok("home", f"{cluster.home}, format {home.FORMAT}; sockets in {cluster.runtime}")


def check_disk() -> Check:
    """Space, and whether the home's file system takes a real aligned O_DIRECT write."""
    try:
        where = home.nearest_directory(home.look_at_cluster().home)
    except HomeError as failure:
        return broken("disk", failure.what, failure.fix)
    free = shutil.disk_usage(where).free
    try:
        seconds = write_directly(where)
    except OSError as failure:
        return warning(
            "disk",
            f"{free / GIB:.0f} GiB free in {where}; O_DIRECT: {failure.strerror}",
            "put ARGOSY_HOME on a disk with ext4 or xfs: checkpoints are several times faster by O_DIRECT",
        )
    detail = f"{free / GIB:.0f} GiB free in {where}; O_DIRECT works (1 MiB durable in {seconds * 1000:.1f} ms)"
    if free < _LEAST_DISK_BYTES:
        return warning("disk", detail, "free some space, or set ARGOSY_HOME to a larger disk")
    return ok("disk", detail)


def write_directly(directory: str) -> float:
    """Write and read back 1 MiB by O_DIRECT; seconds of the durable write. OSError where that is impossible."""
    descriptor, path = tempfile.mkstemp(prefix=".doctor-", dir=directory)
    os.close(descriptor)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            # An anonymous mapping is page-aligned, as O_DIRECT wants its memory to be.
            with mmap.mmap(-1, _DIRECT_BYTES) as block, mmap.mmap(-1, _DIRECT_BYTES) as again:
                block.write(bytes(range(256)) * (_DIRECT_BYTES // 256))
                started = time.perf_counter()
                written = os.pwrite(descriptor, block, 0)
                os.fsync(descriptor)
                seconds = time.perf_counter() - started
                read = os.preadv(descriptor, [again], 0)
                if written != _DIRECT_BYTES or read != _DIRECT_BYTES or block[:] != again[:]:
                    raise OSError(5, f"wrote {written}, read {read} bytes, or other bytes")
        finally:
            os.close(descriptor)
    finally:
        os.unlink(path)
    return seconds


def check_limits() -> Check:
    """Descriptors and processes that a large gang needs; core files are said, not judged."""
    nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
    nproc = resource.getrlimit(resource.RLIMIT_NPROC)
    core = resource.getrlimit(resource.RLIMIT_CORE)[0]
    detail = (
        f"{_limit(nofile[0])} open files (hard {_limit(nofile[1])}), {_limit(nproc[0])} processes, "
        f"core files {'off' if core == 0 else _limit(core)}"
    )
    pids = _cgroup_number("pids", "pids.max", "pids.max")
    if pids is not None:
        detail += f", at most {pids} processes by the cgroup"
    # The runtime raises the soft limit of files up to the hard one by itself.
    if 0 <= nofile[1] < _LEAST_NOFILE:
        return warning("limits", detail, f"raise the hard limit: ulimit -Hn {4 * _LEAST_NOFILE}")
    if 0 <= nproc[0] < _LEAST_NPROC or (pids is not None and pids < _LEAST_NPROC):
        return warning("limits", detail, f"allow more processes: ulimit -u {4 * _LEAST_NPROC}")
    return ok("limits", detail)


def check_clock() -> Check:
    """A wall clock that jumps against the monotonic one would put events out of order."""
    try:
        base = "/sys/devices/system/clocksource/clocksource0"
        source = Path(f"{base}/current_clocksource").read_text().strip()
    except OSError:
        source = "unknown"
    offsets = []
    for _ in range(20):
        offsets.append(time.time() - time.monotonic())
        time.sleep(0.01)
    drift = max(offsets) - min(offsets)
    detail = f"source {source}; wall and monotonic clock differ by {drift * 1e6:.0f} µs over 0.2 s"
    if time.time() < 1_700_000_000:
        return warning("clock", f"{detail}; the wall clock is before 2023", "set the clock (ntp)")
    if drift > 0.01:
        return warning(
            "clock", detail, "let one time service slew the clock; event times may be off"
        )
    if source not in ("tsc", "kvm-clock", "arch_sys_counter", "unknown"):
        return warning(
            "clock", f"{detail}; reading it is slow", "boot with a reliable tsc (clocksource=tsc)"
        )
    return ok("clock", detail)


def check_processes() -> Check:
    """The kernel's tools for owning processes: pidfds, subreaper, death signal; tried in a child."""
    probe = (
        "import os, signal, sys\n"
        "from argosy.control.keeper import kernel\n"
        "kernel.become_subreaper(); kernel.set_death_signal(signal.SIGKILL)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.pause()\n"
        "fd = os.pidfd_open(pid)\n"
        "signal.pidfd_send_signal(fd, signal.SIGKILL)\n"
        "os.waitid(os.P_PIDFD, fd, os.WEXITED)\n"
    )
    code, _, error, _ = run_child([sys.executable, "-c", probe], timeout_seconds=20.0)
    if code != 0:
        return broken(
            "processes",
            f"pidfd, subreaper or death signal do not work: {_last_line(error)}",
            "use Linux 5.4 or newer, and a seccomp profile that allows pidfd_open",
        )
    return ok("processes", f"pidfd, subreaper, death signal work (Linux {platform.release()})")


def check_containment() -> Check:
    """Whether a process tree can be ended whole, whatever its members did."""
    found = containment.find_containment(f"argosy-doctor-{os.getpid()}")
    try:
        if found.method == "cgroup2":
            return ok("containment", "one cgroup (v2) per process: its tree ends by one write")
        why = "; ".join(found.reasons)
        if found.method == "freezer":
            return ok("containment", f"one freezer cgroup (v1) per process ({why})")
        return warning(
            "containment",
            f"no writable cgroup ({why}): trees are found by session, ancestry and mark",
            "delegate a cgroup v2 subtree to this user: a daemon with an emptied environment may escape otherwise",
        )
    finally:
        found.remove()


def check_memory_limits() -> Check:
    """Whether `memory_bytes` of a role can be held by the kernel; tried with a real, empty group."""
    found = containment.find_containment(f"argosy-doctor-{os.getpid()}")
    try:
        group = found.make_group("probe", "")
        limit = found.limit_memory(group, "probe", GIB)
    except OSError as failure:
        limit = str(failure.strerror)
    finally:
        found.remove()
    if isinstance(limit, str):
        return warning(
            "memory limits",
            f"a process's memory cannot be limited: {limit}",
            "delegate the cgroup memory controller, or leave memory_bytes out of specs",
        )
    return ok("memory limits", f"by cgroup {'v2' if limit.is_version_two else 'v1'}")


def check_stacks() -> Check:
    """Whether `argosy stacks` can look into a process of ours from outside."""
    program = shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")
    if program is None:
        return warning("stacks", "py-spy is not installed", "pip install py-spy")
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        code, output, error, seconds = run_child(
            [program, "dump", "--nonblocking", "--pid", str(child.pid)], timeout_seconds=20.0
        )
        child.kill()
    if code == 0 and "<module>" in output:
        return ok("stacks", f"py-spy reads a child's stack in {seconds * 1000:.0f} ms")
    return warning(
        "stacks",
        f"py-spy cannot look into a child: {_last_line(error or output)}",
        "sysctl kernel.yama.ptrace_scope=1 (or allow CAP_SYS_PTRACE in the container)",
    )


def check_name_lookup() -> Check:
    """torch's store looks up the name of ::ffff:127.0.0.1 for every connection; a slow resolver stalls every start."""
    # Eight at once, as eight ranks ask: a resolver that answers one query may drop some of several.
    probe = (
        "import socket, threading, time\n"
        "found = []\n"
        "def look():\n"
        "    start = time.perf_counter()\n"
        "    try:\n"
        "        name = socket.getnameinfo(('::ffff:127.0.0.1', 80, 0, 0), 0)[0]\n"
        "    except OSError as failure:\n"
        "        name = f'no name ({failure})'\n"
        "    found.append((time.perf_counter() - start, name))\n"
        "threads = [threading.Thread(target=look) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "print(*max(found))\n"
    )
    mend = "add the line `::ffff:127.0.0.1 localhost` to /etc/hosts (or set RES_OPTIONS='timeout:1 attempts:1')"
    command = [sys.executable, "-I", "-S", "-c", probe]
    slowest, name = 0.0, ""
    for _ in range(3):
        code, output, error, _ = run_child(command, timeout_seconds=_LOOKUP_DEADLINE_SECONDS)
        if code is None:
            return warning(
                "name lookup",
                f"::ffff:127.0.0.1 has no answer after {_LOOKUP_DEADLINE_SECONDS:g} s: gangs start late",
                mend,
            )
        if code != 0:
            return warning("name lookup", f"the probe failed: {_last_line(error)}", mend)
        seconds, _, name = output.strip().partition(" ")
        slowest = max(slowest, float(seconds))
        if slowest >= _SLOW_LOOKUP_SECONDS:
            break
    return judge_lookup(name, slowest, mend)


def judge_lookup(name: str, slowest: float, mend: str) -> Check:
    """Decide from the answer, which is the address itself where it has no name, and from how late the last of them was."""
    found = "has no name" if name == "::ffff:127.0.0.1" else f"is {name}"
    detail = f"::ffff:127.0.0.1 {found}, answered within {slowest * 1000:.1f} ms"
    if slowest >= _SLOW_LOOKUP_SECONDS:
        return warning("name lookup", f"{detail}: gangs start late", mend)
    return ok("name lookup", detail)


def run_child(
    command: list[str], *, timeout_seconds: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str, str, float]:
    """Run a probe in a session of its own: (code, or None when it was late; output; errors; seconds)."""
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=environment,
    ) as child:
        try:
            output, error = child.communicate(timeout=timeout_seconds)
            code: int | None = child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, error = child.communicate()
            code = None
        except BaseException:
            # Ctrl-C: the child is in a session of its own and would not see it.
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return code, output, error, time.perf_counter() - started


def _meminfo() -> dict[str, int]:
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            values[key] = int(rest.split()[0]) << 10
    return values


def _cgroup_memory_limit() -> int | None:
    return _cgroup_number("memory", "memory.limit_in_bytes", "memory.max")


def _cgroup_number(controller: str, file_v1: str, file_v2: str) -> int | None:
    """The smallest limit from this process's cgroup up to the root, in either hierarchy; None when there is none."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base, file = Path("/sys/fs/cgroup", controller), file_v1
        elif controllers == "":
            unified = Path("/sys/fs/cgroup/unified")
            base, file = (unified if unified.is_dir() else Path("/sys/fs/cgroup")), file_v2
        else:
            continue
        group = base / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(base):
                break
            try:
                found.append(int((directory / file).read_text()))
            except (OSError, ValueError):
                continue  # not in this hierarchy, or "max"
    # v1 writes "no limit" as a huge page-rounded number.
    return min((value for value in found if value < 1 << 60), default=None)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:300] if text.strip() else "no message"
