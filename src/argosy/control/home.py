"""Where a cluster keeps its things: the home, the cluster's directory, the runtime directory with the sockets.

Every part of the runtime and every command asks here for paths. What starts something creates the directories; what only looks
leaves no trace. Standard library alone and quick to import, since each command pays for it. It never starts, stops or connects.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Mapping

from argosy.errors import HomeError

FORMAT = 1
"""Format number of the home, in HOME/VERSION."""
LEAST_FREE_BYTES = 8 << 20
"""Below this the home counts as full: the event log could not take a run's story."""
MOST_SOCKET_PATH_BYTES = 107
_KEY_DIGITS = 12
_MOST_RECORD_BYTES = 64 << 10
_NETWORK_FILE_SYSTEMS = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "afs",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "glusterfs",
        "fuse.glusterfs",
        "fuse.sshfs",
    ]
)


class Cluster:
    """The paths of one cluster; see docs/reference/home.md."""

    __slots__ = ("directory", "runtime")

    def __init__(self, directory: str, runtime: str) -> None:
        self.directory = directory
        self.runtime = runtime

    def __repr__(self) -> str:
        return f"Cluster({self.directory!r}, {self.runtime!r})"

    @property
    def key(self) -> str:
        """Twelve hex digits that tell this cluster from others."""
        return os.path.basename(self.directory)

    @property
    def home(self) -> str:
        """The home this cluster belongs to."""
        return os.path.dirname(os.path.dirname(self.directory))

    @property
    def events(self) -> str:
        """The event log."""
        return os.path.join(self.directory, "events.sqlite")

    @property
    def keeper_json(self) -> str:
        """The keeper's id and pid."""
        return os.path.join(self.directory, "keeper.json")

    @property
    def token(self) -> str:
        """The bearer token of the HTTP server on loopback TCP."""
        return os.path.join(self.directory, "token")

    @property
    def http_json(self) -> str:
        """The port of the HTTP server on loopback TCP."""
        return os.path.join(self.directory, "http.json")

    @property
    def runs(self) -> str:
        """Parent of the runs' directories."""
        return os.path.join(self.directory, "runs")

    @property
    def keeper_socket(self) -> str:
        """Where the keeper listens."""
        return os.path.join(self.runtime, "keeper.sock")

    @property
    def control_socket(self) -> str:
        """Where the controller listens for agents."""
        return os.path.join(self.runtime, "control.sock")

    @property
    def http_socket(self) -> str:
        """Where the controller listens for commands."""
        return os.path.join(self.runtime, "http.sock")

    def lock(self, part: str) -> str:
        """The lock file of `keeper`, `controller` or `agent`."""
        return os.path.join(self.runtime, f"{part}.lock")

    def log(self, part: str) -> str:
        """The log file of `keeper`, `controller` or `agent`."""
        return os.path.join(self.directory, f"{part}.log")


def open_cluster(environ: Mapping[str, str] | None = None) -> Cluster:
    """This machine's cluster in the user's home, its directories made and checked."""
    environ = os.environ if environ is None else environ
    home = find_home(environ)
    _check_version(home)
    cluster = locate_cluster(home, environ)
    prepare_cluster(cluster)
    return cluster


def look_at_cluster(environ: Mapping[str, str] | None = None) -> Cluster:
    """What `open_cluster` would open, with what is there checked and nothing made or changed."""
    environ = os.environ if environ is None else environ
    home = _choose_home(environ, lambda home: _look_at_choice(home, environ))
    if _is_used(home):
        _check_version(home)
    cluster = locate_cluster(home, environ)
    for path in (cluster.directory, cluster.runtime):
        if os.path.lexists(path):
            _check_own(path)
    return cluster


def find_home(environ: Mapping[str, str] | None = None) -> str:
    """The first usable directory of those in docs/reference/home.md, created if absent; HomeError when there is none.

    A directory that the user named (ARGOSY_HOME) is taken or refused, never passed over in silence.
    """
    return _choose_home(os.environ if environ is None else environ, _prepare_home)


def _choose_home(environ: Mapping[str, str], try_home: Callable[[str], None]) -> str:
    named = environ.get("ARGOSY_HOME")
    if named:
        home = os.path.abspath(os.path.expanduser(named))
        try_home(home)
        return home
    refusals = []
    for candidate in _candidates(environ):
        try:
            try_home(candidate)
        except HomeError as error:
            refusals.append(error.what)
            continue
        return candidate
    raise HomeError(
        "no directory can serve as Argosy's home: " + "; ".join(refusals),
        fix="set ARGOSY_HOME to a writable directory on a local disk",
    )


def locate_cluster(home: str, environ: Mapping[str, str] | None = None) -> Cluster:
    """The paths of this machine's cluster in that home; touches nothing.

    One that runs is where it was started: another shell may have another runtime directory, or none.
    """
    environ = os.environ if environ is None else environ
    key = cluster_key(home)
    directory = os.path.join(home, "clusters", key)
    chosen = Cluster(directory, _choose_runtime(key, environ))
    recorded = _recorded_runtime(chosen)
    return Cluster(directory, recorded) if recorded else chosen


def _recorded_runtime(chosen: Cluster) -> str:
    """Where the sockets of a cluster are that runs with another runtime directory than would be chosen now; else empty."""
    try:
        with open(chosen.keeper_json, "rb") as file:
            text = file.read(_MOST_RECORD_BYTES)
    except OSError:
        return ""
    import json

    try:
        found = json.loads(text)
        runtime, pid, start = found["runtime"], int(found["pid"]), int(found["start"])
    except (ValueError, KeyError, TypeError):
        return ""
    if not isinstance(runtime, str) or runtime == chosen.runtime:
        return ""
    from argosy.control.keeper.census import is_same_alive

    return runtime if is_same_alive(pid, start) else ""


def _choose_runtime(key: str, environ: Mapping[str, str]) -> str:
    fallback = f"/tmp/argosy-{os.getuid()}-{key}"
    base = environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isabs(base) and os.path.isdir(base) and os.access(base, os.W_OK):
        runtime = os.path.join(base, f"argosy-{key}")
        longest = os.path.join(runtime, "control.sock")
        if len(os.fsencode(longest)) <= MOST_SOCKET_PATH_BYTES:
            return runtime
    return fallback


def cluster_key(home: str) -> str:
    """Twelve hex digits of (home, host name, boot id, pid namespace): what was started before a reboot is not here now."""
    parts = [os.path.realpath(home), os.uname().nodename, _boot_id(), _pid_namespace()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_DIGITS]


def is_key(name: str) -> bool:
    """Whether a directory's name is a cluster's key, and not something that a person has put beside them."""
    return len(name) == _KEY_DIGITS and set(name) <= set("0123456789abcdef")


def prepare_cluster(cluster: Cluster) -> None:
    """Make the cluster's directories with mode 0700; refuse a runtime directory that belongs to somebody else."""
    _make_private(os.path.dirname(cluster.directory))
    _make_private(cluster.directory)
    _make_private(cluster.runs)
    _make_private(cluster.runtime)


def _candidates(environ: Mapping[str, str]) -> list[str]:
    candidates = []
    state = environ.get("XDG_STATE_HOME")
    if state and os.path.isabs(state):
        candidates.append(os.path.join(state, "argosy"))
    user_home = os.path.expanduser("~")
    if os.path.isabs(user_home) and os.path.isdir(user_home):
        candidates.append(os.path.join(user_home, ".local", "state", "argosy"))
    candidates.append(f"/var/tmp/argosy-{os.getuid()}")
    return candidates


def _prepare_home(home: str) -> None:
    try:
        os.makedirs(os.path.dirname(home) or "/", exist_ok=True)
    except OSError as error:
        raise _refusal(home, error) from None
    _make_private(home)
    _check_local(home, home)
    version = os.path.join(home, "VERSION")
    if not os.path.exists(version):
        # A home in use is never passed over because it filled up: its cluster must stay within reach.
        check_space(home)
        _write_version(home, version)
    elif not os.access(home, os.W_OK | os.X_OK):
        raise _refusal(home, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _look_at_home(home: str) -> None:
    """Refuses what `_prepare_home` would, as far as that shows without making anything."""
    standing = nearest_directory(home)
    if standing == home:
        _check_own(home)
    _check_local(home, standing)
    if not _is_used(home):
        check_space(standing)
    if not os.access(standing, os.W_OK | os.X_OK):
        raise _refusal(home, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _look_at_choice(home: str, environ: Mapping[str, str]) -> None:
    """As `_look_at_home`; and where another one has been in use, that this one can be made is tried: permissions and space alone do not tell."""
    _look_at_home(home)
    if environ.get("ARGOSY_HOME") or _is_used(home) or not any(map(_is_used, _candidates(environ))):
        return
    trial = os.path.join(nearest_directory(home), f".argosy-{os.getpid()}")
    try:
        os.mkdir(trial, 0o700)
        os.rmdir(trial)
    except OSError as error:
        raise _refusal(home, error) from None


def _is_used(home: str) -> bool:
    return os.path.exists(os.path.join(home, "VERSION"))


def nearest_directory(path: str) -> str:
    """The path itself if something is there, else the directory above it in which it would be made; HomeError below a file."""
    standing = path
    while not os.path.lexists(standing):
        standing = os.path.dirname(standing)
    if standing != path and not os.path.isdir(standing):
        raise _refusal(path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    return standing


def _check_local(home: str, standing: str) -> None:
    kind = _file_system(standing)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise HomeError(
            f"{home} is on a network file system ({kind}); the event log needs a local disk",
            fix="set ARGOSY_HOME to a directory on a local disk",
        )


def check_space(home: str) -> None:
    """HomeError when so little space is left that the event log could not grow: asked before anything is started."""
    space = os.statvfs(home)
    free = space.f_bavail * space.f_frsize
    if free < LEAST_FREE_BYTES:
        raise HomeError(
            f"the disk of {home} is full: {free >> 20} MiB left, {LEAST_FREE_BYTES >> 20} needed",
            fix="free some space there, or set ARGOSY_HOME to another disk",
        )


def _write_version(home: str, version: str) -> None:
    # Written aside and linked, so that two first commands at once cannot see half a file.
    draft = f"{version}.{os.getpid()}"
    try:
        with open(draft, "w", encoding="ascii") as file:
            file.write(f"{FORMAT}\n")
        try:
            os.link(draft, version)
        except FileExistsError:
            pass
        except OSError:
            os.replace(draft, version)
    except OSError as error:
        raise _refusal(home, error) from None
    finally:
        try:
            os.unlink(draft)
        except OSError:
            pass


def _check_version(home: str) -> None:
    path = os.path.join(home, "VERSION")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(64).strip()
    except OSError as error:
        raise _refusal(home, error) from None
    if text != str(FORMAT):
        raise HomeError(
            f"{home} has format {text!r}, this Argosy reads {FORMAT}",
            fix="use the Argosy that made it, or set ARGOSY_HOME to a new directory",
        )


def _make_private(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _refusal(path, error) from None
    if stat.S_IMODE(_check_own(path).st_mode) & 0o077:
        try:
            os.chmod(path, 0o700)
        except OSError as error:
            raise _refusal(path, error) from None


def _check_own(path: str) -> os.stat_result:
    """A directory of this user, or a link of theirs to one."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) and status.st_uid == os.getuid():
            status = os.stat(path)
    except OSError as error:
        raise _refusal(path, error) from None
    if not stat.S_ISDIR(status.st_mode):
        raise HomeError(f"{path} is not a directory", fix=f"move it away: mv {path} {path}.old")
    if status.st_uid != os.getuid():
        raise HomeError(
            f"{path} belongs to user {status.st_uid}, not to {os.getuid()}",
            fix="set ARGOSY_HOME to a directory of your own",
        )
    return status


def _refusal(path: str, error: OSError) -> HomeError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HomeError(
            f"the disk of {path} is full: {error.strerror}",
            fix="free some space there, or set ARGOSY_HOME to another disk",
        )
    return HomeError(
        f"{path} cannot be used: {error.strerror}",
        fix="make it writable, or set ARGOSY_HOME to a writable directory on a local disk",
    )


def _file_system(path: str) -> str:
    """Kind of the file system that holds a path; empty when the kernel does not say."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                if left.split(" ", 3)[2] == wanted:
                    return right.split(" ", 1)[0]
    except OSError:
        pass
    return ""


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
