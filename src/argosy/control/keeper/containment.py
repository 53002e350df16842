"""Groups of processes that can be ended whole: cgroup v2 first, the v1 freezer second, else a scan of /proc.

The keeper gives each attempt one `Group`; sweeps after a keeper's death use the same code by name. A scan ends what it
can prove by session, ancestry or mark; what it cannot prove is never killed.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, fields
from typing import Any

from argosy.control.keeper.census import (
    Lookout,
    Seen,
    is_same_alive,
    kill_seen,
    look_at,
    read_once,
    safe_name,
)

METHODS = ("cgroup2", "freezer", "scan")


class Group:
    """The processes of one attempt. This class finds them by scan; the cgroup kinds override it."""

    method = "scan"

    def __init__(self, path: str, mark: str, lookout: Lookout | None = None) -> None:
        self.path = path
        self.mark = mark
        self.lookout = lookout or Lookout()
        self.leader = 0
        self.known: dict[int, int] = {}
        """pid -> start time of members proven earlier, while their ancestry could still be seen"""

    @property
    def entry(self) -> str | None:
        """The file into which a process writes `0` to join, if there is one."""
        return None

    @property
    def wake_path(self) -> str | None:
        """A file that becomes urgent-readable when the group may have become empty."""
        return None

    def add(self, pid: int) -> None:
        """Make the process a member."""
        self.leader = pid

    def take_census(self) -> None:
        """Remember today's descendants: after the leader's end its children hang under the keeper."""
        for member in self.members():
            self.known[member.pid] = member.start

    def members(self) -> list[Seen]:
        """Live members except the leader."""
        if self.leader <= 1:
            return []
        census = self.lookout.look()
        everybody = census.everybody
        roots = {pid for pid, start in self.known.items() if _is(everybody, pid, start)}
        roots.update((self.leader, *census.of_session(self.leader), *census.of_mark(self.mark)))
        found = census.with_descendants(roots) - {self.leader, os.getpid()}
        return [everybody[pid] for pid in found if pid in everybody and everybody[pid].is_alive]

    def kill(self) -> list[int]:
        """SIGKILL to every member except the leader; who was found."""
        found = self.members()
        for process in found:
            kill_seen(process)
        return [process.pid for process in found]

    def is_empty(self) -> bool:
        """No live member except perhaps the leader."""
        return not self.members()

    def remove(self) -> bool:
        """Remove the empty group; False when the kernel still finds it busy."""
        return True

    def part(self, mark: str, leader: int) -> Group:
        """The tree of a guest in this group: of its members those that session, ancestry or mark prove to be the guest's."""
        lookout = self.lookout if self.entry is None else Lookout(self._look_inside)
        guest = Group("", mark, lookout)
        guest.leader = leader
        return guest

    def _look_inside(self) -> dict[int, Seen]:
        return {seen.pid: seen for seen in processes_in(self.path)}


class CgroupTwo(Group):
    """A cgroup of the v2 hierarchy: ended by one write, whatever its members did."""

    method = "cgroup2"

    @property
    def entry(self) -> str | None:
        """See Group."""
        return f"{self.path}/cgroup.procs"

    @property
    def wake_path(self) -> str | None:
        """See Group."""
        return f"{self.path}/cgroup.events"

    def add(self, pid: int) -> None:
        """See Group."""
        self.leader = pid
        _write(f"{self.path}/cgroup.procs", str(pid))

    def take_census(self) -> None:
        """Membership cannot be left: nothing to remember."""

    def members(self) -> list[Seen]:
        """See Group."""
        return _members_of_tree(self.path, self.leader)

    def kill(self) -> list[int]:
        """See Group. The leader is ended by its pidfd beside this; here it may be hit too."""
        if self.is_empty():
            return []
        found = [process.pid for process in self.members()]
        try:
            _write(f"{self.path}/cgroup.kill", "1")
        except OSError:
            for process in self.members():
                kill_seen(process)
        return found

    def is_empty(self) -> bool:
        """See Group."""
        if not _is_populated(self.path):
            return True
        return self.leader != 0 and not self.members()

    def remove(self) -> bool:
        """See Group."""
        return remove_tree(self.path)


class Freezer(Group):
    """A cgroup of the v1 freezer hierarchy: frozen, so that nobody forks meanwhile, then ended one by one."""

    method = "freezer"

    @property
    def entry(self) -> str | None:
        """See Group."""
        return f"{self.path}/cgroup.procs"

    def add(self, pid: int) -> None:
        """See Group."""
        self.leader = pid
        _write(f"{self.path}/cgroup.procs", str(pid))

    def take_census(self) -> None:
        """Membership cannot be left: nothing to remember."""

    def members(self) -> list[Seen]:
        """See Group."""
        return _members_of_tree(self.path, self.leader)

    def kill(self) -> list[int]:
        """See Group."""
        found: dict[int, Seen] = {process.pid: process for process in self.members()}
        if not found:
            return []
        with contextlib.suppress(OSError):
            _write(f"{self.path}/freezer.state", "FROZEN")
        try:
            for process in self.members():
                found[process.pid] = process
                kill_seen(process)
        finally:
            with contextlib.suppress(OSError):
                _write(f"{self.path}/freezer.state", "THAWED")
        return list(found)

    def remove(self) -> bool:
        """See Group."""
        return remove_tree(self.path)


@dataclass
class MemoryGroup:
    """The memory limit of one attempt in a cgroup, and whether it was hit."""

    path: str
    is_version_two: bool

    @property
    def entry(self) -> str:
        """The file into which a process writes `0` to join."""
        return f"{self.path}/cgroup.procs"

    def oom_kills(self) -> int:
        """How often the kernel killed a member because of the limit."""
        name = "memory.events" if self.is_version_two else "memory.oom_control"
        try:
            with open(f"{self.path}/{name}") as file:
                for line in file:
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        except (OSError, ValueError):
            pass
        return 0


@dataclass
class Containment:
    """The method in use and where its groups are; `name` is unique per keeper."""

    method: str
    name: str
    root: str = ""
    memory_root: str = ""
    is_memory_in_root: bool = False
    reasons: list[str] = field(default_factory=list)
    """Why better methods could not be used."""

    def __post_init__(self) -> None:
        self.lookout = Lookout()

    def make_group(self, attempt: str, mark: str) -> Group:
        """A new, empty group; raises OSError when the kernel refuses."""
        if self.method == "scan":
            return Group("", mark, self.lookout)
        path = f"{self.root}/{safe_name(attempt)}"
        try:
            os.mkdir(path)
        except FileExistsError:
            pass
        except FileNotFoundError:
            # An idle keeper's empty group was tidied away by somebody.
            os.makedirs(path, exist_ok=True)
        return self.group_at(path, mark)

    def group_at(self, path: str, mark: str) -> Group:
        """The group of an existing path, for a successor or a sweep."""
        if self.method == "cgroup2":
            return CgroupTwo(path, mark)
        if self.method == "freezer":
            return Freezer(path, mark)
        return Group("", mark, self.lookout)

    def to_state(self) -> dict[str, Any]:
        """For a successor program."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def limit_memory(self, group: Group, attempt: str, limit_bytes: int) -> MemoryGroup | str:
        """Set the limit; the group to join, or the reason why there is none."""
        try:
            if self.is_memory_in_root:
                _write(f"{group.path}/memory.max", str(limit_bytes))
                with contextlib.suppress(OSError):
                    _write(f"{group.path}/memory.swap.max", "0")
                    _write(f"{group.path}/memory.oom.group", "1")
                return MemoryGroup(group.path, True)
            if not self.memory_root:
                return "no memory controller is writable"
            path = f"{self.memory_root}/{safe_name(attempt)}"
            os.makedirs(path, exist_ok=True)
            _write(f"{path}/memory.limit_in_bytes", str(limit_bytes))
            with contextlib.suppress(OSError):
                _write(f"{path}/memory.memsw.limit_in_bytes", str(limit_bytes))
            return MemoryGroup(path, False)
        except OSError as error:
            return f"memory limit of {limit_bytes} bytes: {error.strerror}"

    def remove(self) -> None:
        """Remove the keeper's own directories; what is not empty stays."""
        for path in (self.root, self.memory_root):
            if path:
                remove_tree(path)


def find_containment(name: str, wanted: str = "auto") -> Containment:
    """The best method that works here, tried for real; `wanted` names one instead of `auto`."""
    reasons: list[str] = []
    memory_root = ""
    memory = _controller_directory("memory")
    if memory is not None and os.access(memory, os.W_OK):
        memory_root = f"{memory}/{name}"
    for method in METHODS if wanted == "auto" else (wanted,):
        if method == "scan":
            return Containment("scan", name, "", memory_root, False, reasons)
        parent = _unified_directory() if method == "cgroup2" else _controller_directory("freezer")
        if parent is None:
            reasons.append(f"{method}: not mounted")
            continue
        try:
            return _try_cgroup(method, f"{parent}/{name}", memory_root, reasons)
        except OSError as error:
            reasons.append(f"{method}: {error.strerror} ({parent})")
    if wanted != "auto":
        raise OSError(f"containment {wanted} cannot be used: {'; '.join(reasons)}")
    return Containment("scan", name, "", memory_root, False, reasons)


def _try_cgroup(method: str, root: str, memory_root: str, reasons: list[str]) -> Containment:
    os.makedirs(root, exist_ok=True)
    needed = "cgroup.kill" if method == "cgroup2" else "freezer.state"
    if not os.access(f"{root}/{needed}", os.W_OK) or not os.access(f"{root}/cgroup.procs", os.W_OK):
        with contextlib.suppress(OSError):
            os.rmdir(root)
        raise OSError(1, f"no writable {needed}")
    has_memory = False
    if method == "cgroup2":
        # Enabled for our children only; works when the kernel delegated the controller to us.
        for path in (os.path.dirname(root), root):
            with contextlib.suppress(OSError):
                _write(f"{path}/cgroup.subtree_control", "+memory")
        try:
            with open(f"{root}/cgroup.subtree_control") as file:
                has_memory = "memory" in file.read().split()
        except OSError:
            pass
    return Containment(method, root.rsplit("/", 1)[1], root, memory_root, has_memory, reasons)


def roots_of_cluster(cluster: str) -> list[tuple[str, str]]:
    """(method, path) of every cgroup that keepers of this cluster left, in any hierarchy."""
    found = []
    for method, parent in (
        ("cgroup2", _unified_directory()),
        ("freezer", _controller_directory("freezer")),
        ("memory", _controller_directory("memory")),
    ):
        if parent is None:
            continue
        with contextlib.suppress(OSError):
            found += [
                (method, f"{parent}/{entry}")
                for entry in os.listdir(parent)
                if entry.startswith(f"argosy-{cluster}-")
            ]
    return found


def process_limits() -> list[tuple[str, int, int]]:
    """(file, limit, in use) of every cgroup around this process that limits the number of processes."""
    found = []
    for directory in (_unified_directory(), _controller_directory("pids")):
        path = directory
        while path is not None and os.path.exists(f"{path}/cgroup.procs"):
            with contextlib.suppress(OSError, ValueError):  # no limit here, or the word `max`
                limit = int(read_once(f"{path}/pids.max", 64))
                found.append(
                    (f"{path}/pids.max", limit, int(read_once(f"{path}/pids.current", 64)))
                )
            path = os.path.dirname(path)
    return found


def processes_in(path: str) -> list[Seen]:
    """Live processes of a cgroup and all below it."""
    return _members_of_tree(path, 0)


def remove_tree(path: str) -> bool:
    """Remove a cgroup and those below it; True when it is gone."""
    with contextlib.suppress(OSError):
        os.rmdir(path)  # few have any below them
        return True
    for directory, _, _ in os.walk(path, topdown=False):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            pass
        except OSError:
            return False
    return True


def _unified_directory() -> str | None:
    return _own_directory("cgroup2", "", "")


def _controller_directory(controller: str) -> str | None:
    return _own_directory("cgroup", controller, controller)


def _own_directory(kind: str, option: str, controller: str) -> str | None:
    """This process's directory in a hierarchy, seen through the mount that shows it."""
    own = _own_path(controller)
    if own is None:
        return None
    try:
        with open("/proc/self/mountinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or len(rest) < 3 or rest[0] != kind:
            continue
        if option and option not in rest[2].split(","):
            continue
        root, mount = fields[3], fields[4].replace("\\040", " ")
        # The mount may show only a part of the hierarchy (containers).
        inside = own if root == "/" else own.removeprefix(root)
        path = os.path.normpath(f"{mount}/{inside}")
        return path if os.path.isdir(path) else mount
    return None


def _own_path(controller: str) -> str | None:
    try:
        with open("/proc/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" if not controller else controller in controllers.split(","):
            return path
    return None


def _members_of_tree(path: str, leader: int) -> list[Seen]:
    found = []
    for directory, _, _ in os.walk(path):
        try:
            with open(f"{directory}/cgroup.procs") as file:
                pids = [int(word) for word in file.read().split()]
        except OSError:
            continue
        for pid in pids:
            process = look_at(pid) if pid != leader else None
            if process is not None and process.is_alive:
                found.append(process)
    return found


def _is_populated(path: str) -> bool:
    try:
        return b"populated 1" in read_once(f"{path}/cgroup.events", 4096)
    except OSError:
        return False


def _is(everybody: dict[int, Seen], pid: int, start: int) -> bool:
    return pid in everybody and everybody[pid].start == start and is_same_alive(pid, start)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
