"""Processes that work for the ranks and outlive them: how they are started, and how their errors come back. No torch.

Alone, a module is run that forks what goes on. In a cluster whatever a rank has started ends with it, whole tree: there the process is a run of its own,
which the controller is asked for, and which `argosy ps` shows.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import argosy
from argosy import errors
from argosy.checkpoint import sockets
from argosy.errors import ArgosyError, ClusterError
from argosy.protocol import shells
from argosy.protocol.httpclient import Client

_LOG = logging.getLogger("argosy.checkpoint")
_LOOK_SECONDS = 0.01
# It ends by itself once nobody needs it; who stops it earlier waits for what it has been given.
_GRACE_SECONDS = 600.0


@dataclass(frozen=True)
class Helper:
    """A process that ranks have in common, and the socket by which they find it."""

    name: str
    module: str
    """Listens under `socket` in `directory`, or ends with 0 when another one does. In the background, or with `--stay` where it was started."""
    arguments: tuple[str, ...]
    directory: Path
    socket: str

    def answers(self) -> bool:
        """Whether somebody listens."""
        return sockets.answers_in(self.directory, self.socket)


def environment() -> dict[str, str]:
    """In which a Python of this installation finds the package that runs here."""
    own = str(Path(argosy.__file__).parents[1])
    paths = [own, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start(helper: Helper, *, seconds: float) -> str:
    """Have a helper that listens; why there is none, for people. Of several ranks that ask at once one starts it."""
    deadline = time.monotonic() + seconds
    with _one_at_a_time(helper, deadline):
        if helper.answers():
            return ""
        controller = controller_socket()
        if controller:
            why = _start_as_run(helper, controller, deadline)
            if not why:
                return ""
            _LOG.warning("the %s ends with this process, as it is no run%s", helper.name, why)
        return _start_beside(helper, max(1.0, deadline - time.monotonic()))


def controller_socket() -> str:
    """Of the cluster that this process belongs to; empty outside one, where nobody ends what this process leaves behind."""
    keeper = os.environ.get("ARGOSY_KEEPER_SOCKET") if "ARGOSY_ATTEMPT" in os.environ else None
    path = os.path.join(os.path.dirname(keeper), "http.sock") if keeper else ""
    return path if path and os.path.exists(path) else ""


def _start_as_run(helper: Helper, controller: str, deadline: float) -> str:
    """Ask the controller for it and wait until it listens; why it does not."""
    command = [sys.executable, "-m", helper.module, *helper.arguments, "--stay"]
    spec = {
        "name": helper.name,
        "helps": os.environ.get("ARGOSY_RUN", ""),
        "roles": {helper.name: {"command": command, "grace_seconds": _GRACE_SECONDS}},
    }
    # A rank's CPUs are its own: the helper runs where the cluster does.
    submission = shells.describe(spec, env=environment(), cwd="/") | {"affinity": []}
    try:
        client = Client(controller, timeout_seconds=max(1.0, deadline - time.monotonic()))
        run = client.post("/v1/runs", submission)["runs"][0]["run"]
        while not helper.answers():
            view = client.get(f"/v1/runs/{run}")
            if view["state"] == "ended" and not helper.answers():
                return f": run {run} {view['outcome']}, see `argosy why {run}`"
            if time.monotonic() > deadline:
                return f": run {run} does not listen"
            time.sleep(_LOOK_SECONDS)
    except (OSError, ArgosyError) as failure:
        return f": {failure}"
    return ""


def _start_beside(helper: Helper, seconds: float) -> str:
    """Run the module, which returns when its fork listens; why it could not."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", helper.module, *helper.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=seconds,
            start_new_session=True,
            cwd="/",
            env=environment(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return f": {failure}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    why = lines[-1] if lines else f"exit code {done.returncode}"
    return f": {why}" if done.returncode else ""


@contextlib.contextmanager
def _one_at_a_time(helper: Helper, deadline: float) -> Iterator[None]:
    """Hold the directory, as long as others may be waited for and its file system knows locks."""
    try:
        directory = os.open(helper.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # the helper says what is wrong with it
        return
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if helper.answers():
                    break
                time.sleep(_LOOK_SECONDS)
            except OSError:
                break
        yield
    finally:
        os.close(directory)


def error_named(kind: str, what: str, fix: str) -> ArgosyError:
    """The error that such a process met, as this one raises it; a ClusterError when its name is none of ours."""
    found = getattr(errors, kind, None) if kind else None
    if isinstance(found, type) and issubclass(found, ArgosyError):
        return found(what, fix=fix)
    return ClusterError(what, fix=fix)


def leave_terminal() -> None:
    """What was started reads and writes nothing; for the fork that goes on."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for standard in range(3):
            os.dup2(nothing.fileno(), standard)
