"""`argosy up`, `argosy down`, `argosy status`: the local cluster."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from argosy import __version__
from argosy.cli.arguments import Arguments
from argosy.cli.connection import Controller, connect
from argosy.cli.paint import Paint, duration, size
from argosy.cli.progress import Progress
from argosy.control.home import open_cluster
from argosy.control.submission import await_controller, bring_up, sweep_leftovers
from argosy.errors import ArgosyError, ClusterError, HomeError

if TYPE_CHECKING:
    from argosy.cli.farewell import Ended, Farewell

NOT_RUNNING = 3
DOWN_SECONDS = 60.0


def up(arguments: Arguments) -> int:
    """Start the cluster if it does not run, and say where it is."""
    controller = Controller(open_cluster())
    with Progress().during("starting the cluster"):
        is_new = bring_up(controller.cluster)
        status = await_controller(controller.cluster, with_host=True)
    if arguments.get("json"):
        print(json.dumps({"running": True, **status, "is_new": is_new}))
        return 0
    print("cluster started" if is_new else "the cluster is already up")
    sys.stdout.write(render_status(status, controller, Paint(sys.stdout)))
    return 0


def status(arguments: Arguments) -> int:
    """Show the cluster; exit code 3 when there is none."""
    controller = connect()
    with Progress().during("asking the controller"):
        found = controller.client.status()
    if arguments.get("json"):
        home = {"running": False, "home": controller.cluster.home}
        print(json.dumps({"running": True, **found} if found else home))
        return 0 if found else NOT_RUNNING
    if found is None:
        print(f"no cluster is running here (home {controller.cluster.home})")
        print("  start one with `argosy up`; `argosy run` does it by itself")
        return NOT_RUNNING
    sys.stdout.write(render_status(found, controller, Paint(sys.stdout)))
    return 0


def down(arguments: Arguments) -> int:
    """Stop the cluster with everything in it; refuses while runs are alive unless forced."""
    controller = connect()
    places = (controller.cluster.directory, controller.cluster.runtime)
    if not any(map(os.path.exists, places)):
        return _say(arguments, "no cluster was running")
    is_forced = bool(arguments.get("force"))
    if is_forced and _end_if_silent(controller):
        sweep_leftovers(controller.cluster)
        return _say(arguments, "cluster ended by force")
    found = controller.client.status()
    if found is None:
        sweep_leftovers(controller.cluster)
        return _say(arguments, "no cluster was running")
    with Progress().during("stopping the cluster"):
        farewell = _farewell(controller) if is_forced else None
        controller.post("/v1/down", {"force": is_forced})
        _await_end(controller, list(_pids(found)))
        sweep_leftovers(controller.cluster)
    return _say(arguments, "cluster stopped", farewell.ended() if farewell else [])


def _farewell(controller: Controller) -> Farewell | None:
    """What the runs leave behind is good to know; that it cannot be told keeps nothing from ending."""
    from argosy.cli.farewell import Farewell

    try:
        return Farewell(controller)
    except ArgosyError:
        return None


def _end_if_silent(controller: Controller) -> bool:
    """Let stopped parts of the cluster go on; end it, and say so, if it does not answer then, or only that it cannot serve."""
    from argosy.control.stalled import end_parts, resume_parts

    resume_parts(controller.cluster)
    try:
        controller.client.status()
    except (ClusterError, HomeError):
        with Progress().during("ending a cluster that does not answer"):
            end_parts(controller.cluster)
        return True
    return False


def render_status(status: dict[str, Any], controller: Controller, paint: Paint) -> str:
    """The status for people."""
    runs = status.get("runs", {})
    parts = [f"{name} {pid}" for name, pid in (status.get("pids") or {}).items()]
    lines = [
        ("version", _version(status)),
        ("up for", duration(float(status.get("uptime_seconds", 0)))),
        ("home", str(status.get("home") or controller.cluster.home)),
        ("directory", controller.cluster.directory),
        ("pids", ", ".join(parts)),
        (
            "runs",
            ", ".join(f"{runs.get(kind, 0)} {kind}" for kind in ("running", "queued", "ended")),
        ),
    ]
    for host in status.get("hosts") or []:
        if isinstance(host, dict):
            memory = size(host.get("memory_bytes", 0))
            lines.append(
                ("host", f"{host.get('host', '?')}: {host.get('cpus', '?')} CPUs, {memory}")
            )
        else:
            lines.append(("host", str(host)))
    if status.get("http_port"):
        lines.append(
            ("http", f"http://127.0.0.1:{status['http_port']} (token: {controller.cluster.token})")
        )
    if status.get("trouble"):
        lines.append(("trouble", paint(str(status["trouble"]), "red")))
    return "".join(f"  {paint(key.ljust(10), 'dim')}{value}\n" for key, value in lines if value)


def _version(status: dict[str, Any]) -> str:
    version = str(status.get("version", "?"))
    is_other = version != __version__
    return (
        f"{version} (this command is {__version__}: `argosy down` before using it)"
        if is_other
        else version
    )


def _say(arguments: Arguments, text: str, runs: list[Ended] | None = None) -> int:
    """With the runs that ended with the cluster."""
    runs = runs or []
    if arguments.get("json"):
        ended = [run.as_json() for run in runs]
        print(json.dumps({"running": False, "said": text, "runs": ended}))
        return 0
    if runs:
        from argosy.cli.farewell import told

        print("\n".join(told(runs)))
    print(text)
    return 0


def _pids(status: dict[str, Any]) -> list[int]:
    return [int(pid) for pid in (status.get("pids") or {}).values() if pid]


def _await_end(controller: Controller, pids: list[int]) -> None:
    deadline = time.monotonic() + DOWN_SECONDS
    while any(_is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            left = ", ".join(str(pid) for pid in pids if _is_alive(pid))
            raise ClusterError(
                f"the cluster has not ended after {DOWN_SECONDS:.0f} s (pids {left})",
                fix=f"see {controller.cluster.log('keeper')}",
            )
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
