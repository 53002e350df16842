"""`argosy run`: submit a program and follow it to its end.

The way from here to a submitted run imports no asyncio, msgspec, rich, argparse or http.client; what is only needed for a
file, a terminal or a failure is imported when it is.
"""

from __future__ import annotations

import json
import sys

from argosy.cli.arguments import Arguments
from argosy.cli.program import Program, read_program
from argosy.cli.progress import Progress
from argosy.control.home import open_cluster
from argosy.control.submission import RunHandle, describe_shell, is_text, send
from argosy.protocol.httpclient import Client

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any


def run(arguments: Arguments) -> int:
    """Submit and follow; the exit code is the first cause's."""
    program = read_program(arguments)
    handles, client = submit_program(program)
    if arguments.get("detach") or program.spec.get("service") or len(handles) != 1:
        print_handles(handles, arguments)
        return 0
    return follow(handles[0], client, program.spec, arguments)


def submit_program(program: Program) -> tuple[list[RunHandle], Client]:
    """Hand it to the cluster, which is started if need be."""
    cluster = open_cluster()
    submission = describe_shell(program.spec, env=program.env)
    if program.secrets:
        submission["secrets"] = program.secrets
    _warn_of_lost_variables(submission["env"])
    with Progress().during("starting the cluster"):
        handles = send(cluster, submission)
    return handles, Client(cluster.http_socket)


def print_handles(handles: list[RunHandle], arguments: Arguments) -> None:
    """The ids, one per line, or JSON."""
    if arguments.get("json"):
        print(json.dumps({"runs": [{"run": h.run, "name": h.name} for h in handles]}))
    else:
        for handle in handles:
            print(handle.run)


def follow(handle: RunHandle, client: Client, spec: dict[str, Any], arguments: Arguments) -> int:
    """Stay with the run until it ends; the exit code of this command."""
    if any(role.get("tty") for role in spec["roles"].values()) and sys.stdin.isatty():
        from argosy.cli.attach import attach_to_new

        return attach_to_new(handle, client)
    from argosy.cli.follow import DETACHED, Follower
    from argosy.cli.output import choose_output

    view = handle.view()
    follower = Follower(client, view, choose_output(view), imports=_imports(spec))
    end = follower.follow(tied=bool(spec.get("tied")))
    if end is None:
        return DETACHED
    if arguments.get("json"):
        print(json.dumps(end))
    return report_end(end, client)


def report_end(view: dict[str, Any], client: Client) -> int:
    """Say how it ended if it did not end well; the exit code."""
    code = int(view.get("exit_code") or 0)
    if view["outcome"] == "succeeded":
        return 0
    from argosy.cli.why import explain_failure

    sys.stdout.flush()
    sys.stderr.write(explain_failure(client, view))
    return code or 1


def _imports(spec: dict[str, Any]) -> str:
    """What the run's warm parents import; nothing when it has none."""
    names: list[str] = []
    for role in spec["roles"].values():
        if (role.get("script") or role.get("module")) and role.get("warm", True):
            names += role.get("preload", ["torch", "torch.distributed"])
    return ", ".join(dict.fromkeys(names))


def _warn_of_lost_variables(sent: dict[str, str]) -> None:
    import os

    for name, value in os.environ.items():
        if name not in sent and not (is_text(name) and is_text(value)):
            shown = name.encode("utf-8", "backslashreplace").decode()
            sys.stderr.write(f"argosy: the variable {shown} is not UTF-8 text and was left out\n")
