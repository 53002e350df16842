"""`argosy run`: submit a program and follow it to its end.

The way from here to a submitted run imports no asyncio, msgspec, rich, argparse or http.client; what is only needed for a
file, a terminal or a failure is imported when it is.
"""

from __future__ import annotations

import json
import sys

from argosy.cli.announce import announce_start, announce_success, warn_of_input
from argosy.cli.arguments import Arguments
from argosy.cli.program import Program, read_program
from argosy.cli.progress import Progress
from argosy.cli.shield import Shield
from argosy.control.asking import ControllerClient
from argosy.control.home import Cluster, open_cluster
from argosy.control.submission import RunHandle, describe_shell, send
from argosy.protocol.shells import is_text

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any


def run(arguments: Arguments) -> int:
    """Submit and follow; the exit code is the first cause's."""
    program = read_program(arguments)
    cluster = open_cluster()
    shield = Shield()
    handles = submit_program(program, cluster, shield)
    warn_of_input()
    if arguments.get("detach") or program.spec.get("service") or len(handles) != 1:
        print_handles(handles, arguments)
        leave_alone(handles, shield)
        return 0
    return follow(handles[0], cluster, program.spec, arguments, shield)


def submit_program(program: Program, cluster: Cluster, shield: Shield) -> list[RunHandle]:
    """Hand it to the cluster, which is started if need be. Until the shield is lifted Ctrl-C stops what was made."""
    submission = describe_shell(program.spec, env=program.env)
    if program.secrets:
        submission["secrets"] = program.secrets
    _warn_of_lost_variables(submission["env"])
    progress = Progress()
    with progress.during("submitting the run"):
        handles = send(
            cluster,
            submission,
            shield=shield,
            on_start=lambda: progress.begin("starting the cluster"),
        )
    if shield.num_interrupts:
        leave_alone(handles, shield)
    return handles


def leave_alone(handles: list[RunHandle], shield: Shield) -> None:
    """Lift the shield: from here on somebody looks after the runs, or nobody is to. KeyboardInterrupt, and they are stopped, when Ctrl-C came before."""
    if shield.lift():
        for handle in handles:
            handle.stop(hard=True, reason="Ctrl-C")
            sys.stderr.write(f"argosy: run {handle.run} stopped: Ctrl-C\n")
        raise KeyboardInterrupt


def print_handles(handles: list[RunHandle], arguments: Arguments) -> None:
    """The ids, one per line, or JSON."""
    if arguments.get("json"):
        print(json.dumps({"runs": [{"run": h.run, "name": h.name} for h in handles]}))
    else:
        for handle in handles:
            print(handle.run)


def follow(
    handle: RunHandle,
    cluster: Cluster,
    spec: dict[str, Any],
    arguments: Arguments,
    shield: Shield,
) -> int:
    """Stay with the run until it ends; the exit code of this command."""
    client = ControllerClient(cluster)
    view = _expected_view(handle, spec, cluster.runs)
    announce_start(view)
    if any(role.get("tty") for role in spec["roles"].values()) and sys.stdin.isatty():
        from argosy.cli.attach import attach_to_new

        leave_alone([handle], shield)
        return attach_to_new(handle, client)
    from argosy.cli.follow import DETACHED, Follower
    from argosy.cli.output import choose_output

    is_json = bool(arguments.get("json"))
    follower = Follower(client, view, choose_output(view, is_json=is_json))
    leave_alone([handle], shield)
    end = follower.follow(tied=bool(spec.get("tied")))
    if is_json:
        print(json.dumps(end or handle.view()))
    if end is None:
        return DETACHED
    if end["outcome"] == "succeeded":
        announce_success(end)
        return 0
    from argosy.cli.why import report_end

    return report_end(end, client)


def _expected_view(handle: RunHandle, spec: dict[str, Any], runs: str) -> dict[str, Any]:
    """What the controller would say about the new run, as far as the output needs it: one question less."""
    roles = [
        {"role": role, "count": given.get("count", 1), "processes": []}
        for role, given in spec["roles"].items()
    ]
    directory = f"{runs}/{handle.run}"
    return {"run": handle.run, "name": handle.name, "directory": directory, "roles": roles}


def _warn_of_lost_variables(sent: dict[str, str]) -> None:
    import os

    for name, value in os.environ.items():
        if name not in sent and not (is_text(name) and is_text(value)):
            shown = name.encode("utf-8", "backslashreplace").decode()
            sys.stderr.write(f"argosy: the variable {shown} is not UTF-8 text and was left out\n")
