"""Submission: from a spec to a run, starting the cluster if there is none.

Called by `argosy run`, `argosy queue add` and by Python (`argosy.submit`). The command line's way through here is counted in
milliseconds: specs are plain objects, and msgspec is imported only for those that come as a RunSpec or a file. It never
decides anything about a run; the controller checks every spec again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext

from argosy.config.warmth import DEFAULT_PRELOAD
from argosy.control import locks
from argosy.control.asking import RETURN_SECONDS, ControllerClient, out_of_reach
from argosy.control.home import Cluster, check_space, open_cluster, prepare_cluster
from argosy.control.programs import check_programs, working_directory
from argosy.errors import (
    ClusterError,
    ConfigError,
    NotFoundError,
    ProtocolError,
    RunFailed,
)
from argosy.protocol import shells
from argosy.protocol.httpclient import SILENCE_SECONDS, unreachable

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any

    from argosy.config.spec import RunSpec

    Spec = RunSpec | dict[str, Any] | str | os.PathLike[str]

UP_SECONDS = 30.0
"""How long a new cluster may take until its controller answers."""


class RunHandle:
    """A submitted run: look at it, wait for it, stop it."""

    def __init__(self, run: str, name: str, client: ControllerClient) -> None:
        self.run = run
        self.name = name
        self._client = client

    def __repr__(self) -> str:
        return f"RunHandle({self.run!r}, name={self.name!r})"

    def view(self) -> dict[str, Any]:
        """The run as `GET /v1/runs/{run}` shows it."""
        client = self._client
        view: dict[str, Any] = client.reach(
            lambda: client.get(f"/v1/runs/{self.run}"), is_reading=True
        )
        return view

    def stop(self, *, hard: bool = False, reason: str = "") -> None:
        """End it: gracefully, or at once."""
        body = {"hard": hard, "reason": reason}
        self._client.reach(lambda: self._client.post(f"/v1/runs/{self.run}/stop", body))

    def wait(
        self,
        timeout_seconds: float | None = None,
        *,
        hear: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Wait for the end and return the view; TimeoutError when it does not come in time. `hear` is told each fact of the run meanwhile."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        after = 0
        while True:
            view = self.view()
            if view["state"] == "ended":
                return view
            after = self._await_end(after, deadline, hear)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"run {self.run} has not ended after {timeout_seconds} s")

    def _await_end(
        self,
        after: int,
        deadline: float | None,
        hear: Callable[[dict[str, Any]], None] | None,
    ) -> int:
        """Follow the events until the run has ended, the stream breaks or time is up; returns the last number seen."""
        target = f"/v1/events?run={self.run}&follow=1&after={after}"
        try:
            with self._client.stream(target) as stream:
                while not stream.is_closed:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return after
                    events = stream.wait(min(left or SILENCE_SECONDS, SILENCE_SECONDS))[0]
                    if not events:
                        self._client.on_silence()
                    for event in events:
                        seen = event.json()
                        after = max(after, int(seen["seq"]))
                        if hear is not None:
                            hear(seen["fact"])
                        if seen["fact"]["kind"] == "run.ended":
                            return after
        except OSError:
            # The controller is being restarted: `view` reports it if it does not come back.
            time.sleep(0.05)
        return after


def submit(
    spec: Spec, wait: bool = False, *, secrets: Mapping[str, str] | None = None
) -> RunHandle:
    """Start a run from a RunSpec, plain objects, or the path of a TOML file; the cluster is started on demand.

    `secrets` has the values of those that roles name. With `wait` it returns after the end, and raises RunFailed when the run did not succeed.
    """
    document = _read_spec(spec)
    if document.get("array"):
        fix = "argosy.submit_array(spec) returns a handle for each"
        raise ConfigError(f"array = {document['array']} makes that many runs", fix=fix)
    return _submit(document, wait, secrets or {})[0]


def submit_array(
    spec: Spec, wait: bool = False, *, secrets: Mapping[str, str] | None = None
) -> list[RunHandle]:
    """As `submit`, for a spec with `array`: all its runs, in order. With `wait` RunFailed is about the first that did not succeed."""
    return _submit(_read_spec(spec), wait, secrets or {})


def _read_spec(spec: Spec) -> dict[str, Any]:
    """As plain objects, checked; objects of our classes too, which anybody can make with anything in them."""
    import msgspec

    from argosy.config.checks import check_spec
    from argosy.config.files import load_spec, make_spec
    from argosy.config.spec import RunSpec

    if isinstance(spec, str | os.PathLike):
        checked = load_spec(os.fspath(spec))
    elif isinstance(spec, RunSpec | dict):
        try:
            plain = msgspec.to_builtins(spec)
        except (TypeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"the spec cannot be read: {error}", fix="use texts, numbers and lists"
            )
        checked = make_spec(plain)
        check_spec(checked)
    else:
        fix = "give a RunSpec, a dict, or the path of a TOML file"
        raise ConfigError(f"a spec cannot be made of {spec!r}", fix=fix)
    document: dict[str, Any] = msgspec.to_builtins(checked)
    return document


def _submit(document: dict[str, Any], wait: bool, secrets: Mapping[str, str]) -> list[RunHandle]:
    _check_given(document, secrets)
    check_programs(document, working_directory(), os.environ)
    submission = describe_shell(document)
    if secrets:
        submission["secrets"] = dict(secrets)
    handles = send(open_cluster(), submission)
    if wait:
        ends = [handle.wait() for handle in handles]
        for view in ends:
            _check_success(view)
    return handles


def _check_given(document: dict[str, Any], secrets: Mapping[str, str]) -> None:
    named = {name for role in document["roles"].values() for name in role.get("secrets", ())}
    for name, value in secrets.items():
        if not isinstance(value, str):
            raise ConfigError(f"the secret {name!r} is {type(value).__name__}", fix="give a text")
        if name not in named:
            fix = f"add it to a role: RoleSpec(…, secrets=[{name!r}])"
            raise ConfigError(f"no role names the secret {name!r}", fix=fix)
    if missing := sorted(named - set(secrets)):
        fix = f"argosy.submit(spec, secrets={{{missing[0]!r}: …}})"
        raise ConfigError(f"the secret {missing[0]!r} was not given", fix=fix)


def _check_success(view: dict[str, Any]) -> None:
    if view["outcome"] != "succeeded":
        raise RunFailed(
            f"run {view['run']} {view['outcome']}: {view['reason']}",
            fix=f"argosy why {view['run']}",
            exit_code=view["exit_code"] or 1,
        )


def send(
    cluster: Cluster,
    submission: dict[str, Any],
    *,
    shield: AbstractContextManager[object] | None = None,
    on_start: Callable[[], object] = lambda: None,
) -> list[RunHandle]:
    """Hand a submission to the controller, bringing the cluster up first if it does not answer.

    `shield` is entered around the question that makes the run; `on_start` is called when there is no cluster yet.
    """
    check_space(cluster.home)
    client = ControllerClient(cluster)

    def post() -> Any:
        with shield or nullcontext():
            return client.post("/v1/runs", submission)

    try:
        answer = post()
    except (FileNotFoundError, ConnectionRefusedError):
        on_start()
        bring_up(cluster, warm=warm_parent(submission))
        answer = client.reach(post)
    except OSError as error:
        raise unreachable(error, cluster.http_socket)
    except (ConfigError, NotFoundError, ProtocolError) as error:
        raise client.blame_version(error)
    return [RunHandle(run["run"], run["name"], client) for run in answer["runs"]]


def bring_up(cluster: Cluster, *, warm: dict[str, Any] | None = None) -> bool:
    """Make sure that this cluster runs; True when it had to be started.

    Leftovers of a dead keeper are swept first. `warm` names a zygote that the keeper begins to make at once.
    """
    # A controller that is dying still accepts: only with a living keeper will somebody answer.
    if _answers(cluster.keeper_socket) and _answers(cluster.http_socket):
        return False
    check_space(cluster.home)
    from argosy.control.keeper.sweep import start_keeper, sweep_dead_keeper

    with _locked(cluster):
        _await_living(cluster)
        if _answers(cluster.keeper_socket):
            is_new = False
        else:
            sweep_dead_keeper(cluster.directory, cluster.runtime)
            start_keeper(cluster.directory, cluster.runtime, warm=warm)
            is_new = True
    await_controller(cluster)
    return is_new


def _await_living(cluster: Cluster) -> None:
    """Until the keeper that lives listens, or has ended; ClusterError when it does neither: its runs go on, and nobody else may keep them."""
    from argosy.control.keeper.sweep import living_keeper
    from argosy.control.stalled import is_succeeding

    deadline = time.monotonic() + RETURN_SECONDS
    while not _answers(cluster.keeper_socket) and living_keeper(cluster.directory):
        if time.monotonic() > deadline or not is_succeeding(cluster):
            raise out_of_reach(cluster.keeper_socket)
        time.sleep(0.01)


def sweep_leftovers(cluster: Cluster) -> None:
    """End what a dead keeper left behind, and remove its sockets and locks; a living cluster is not touched."""
    from argosy.control.keeper.sweep import sweep_dead_keeper

    with _locked(cluster):
        if _answers(cluster.keeper_socket):
            return
        sweep_dead_keeper(cluster.directory, cluster.runtime)
        for path in (cluster.http_socket, cluster.keeper_socket, cluster.control_socket):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
        _remove_locks(cluster)


def _remove_locks(cluster: Cluster) -> None:
    """The lock files, for the holder of `up`; not while a part is still dying. One that just starts finds that its file is gone, and makes another."""
    for part in ("keeper", "controller", "agent"):
        try:
            descriptor = os.open(cluster.lock(part), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(cluster.lock(part))
        except BlockingIOError:
            return
        finally:
            os.close(descriptor)
    os.unlink(cluster.lock("up"))
    try:
        os.rmdir(cluster.runtime)
    except OSError:
        pass  # something else is in it, and stays


def await_controller(cluster: Cluster, *, with_host: bool = False) -> dict[str, Any]:
    """Wait until the controller answers, and with `with_host` until this host's agent has come to it; its status."""
    client = ControllerClient(cluster)
    deadline = time.monotonic() + UP_SECONDS
    while True:
        try:
            status: dict[str, Any] = client.get("/v1/status")
            if status["keeper"] or not with_host:
                return status
            missing = "no agent has come to the controller"
        except OSError as error:
            missing = str(error)
        if time.monotonic() > deadline:
            logs = ("keeper", "controller", "agent") if with_host else ("keeper", "controller")
            raise ClusterError(
                f"the cluster did not come up within {UP_SECONDS:.0f} s ({missing})",
                fix=f"see {', '.join(str(cluster.log(part)) for part in logs)}",
            )
        # The keeper binds the sockets a moment after it is started; nothing announces that to strangers.
        time.sleep(0.01)


def warm_parent(submission: dict[str, Any]) -> dict[str, Any] | None:
    """The zygote that this run will want first, so that a new cluster begins to import while it starts."""
    from argosy.control.loadtime import load_time, own_load_time
    from argosy.native import isa

    for role in submission["spec"]["roles"].values():
        if (role.get("script") or role.get("module")) and role.get("warm", True):
            environment = {**submission["env"], **role.get("env", {})}
            added = isa.environment(environment)
            return {
                "python": role.get("python") or submission["python"],
                "preload": role.get("preload", list(DEFAULT_PRELOAD)),
                "env": {**load_time(environment), **own_load_time(added)},
            }
    return None


def describe_shell(spec: dict[str, Any], *, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The submission of a spec from the shell that this process was typed in, with variables of its own added."""
    environment = {**os.environ, **(env or {})}
    return shells.describe(spec, env=environment, cwd=working_directory())


def _answers(path: str) -> bool:
    """Somebody accepts connections there: a socket file alone may be all that is left of a dead process."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            raise unreachable(error, path)
    return True


@contextmanager
def _locked(cluster: Cluster) -> Iterator[None]:
    """One client at a time brings a cluster up or takes its rest away; the lock dies with its holder."""
    descriptor = _take_lock(cluster)
    try:
        yield
    finally:
        os.close(descriptor)


def _take_lock(cluster: Cluster) -> int:
    descriptor = None
    while descriptor is None:
        try:
            descriptor = locks.take(cluster.lock("up"), should_wait=True)
        except FileNotFoundError:
            # The directory went with a cluster that was taken down meanwhile.
            prepare_cluster(cluster)
    return descriptor
