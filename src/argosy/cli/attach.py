"""`argosy attach`, and the foreground of `argosy run --tty`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from argosy.cli.announce import announce_success
from argosy.cli.arguments import Arguments
from argosy.cli.connection import connect, processes_of
from argosy.cli.progress import Progress
from argosy.cli.terminal import converse, size_of
from argosy.cli.why import report_end
from argosy.control.submission import RunHandle
from argosy.errors import ConfigError, NotFoundError
from argosy.protocol.httpclient import Client

SHOWN_BYTES = 8 << 10
DETACHED = 0


def attach(arguments: Arguments) -> int:
    """Connect to a process's terminal; of one that has none, follow the output."""
    controller = connect()
    target, view = controller.resolve(arguments.word(), to_act=True)
    processes = processes_of(view, target)
    alive = [p for p in processes if p.get("pid") and p["state"] not in ("exited", "parked")]
    if not alive:
        raise NotFoundError(
            f"no process of {arguments.word() or view['run']} is running",
            fix=f"argosy logs {view['run']} shows what it printed",
        )
    process = next((p for p in alive if p.get("tty")), None)
    handle = RunHandle(view["run"], view["name"], controller.client)
    if process is None:
        sys.stderr.write(
            "argosy: it was started without --tty, so this follows its output; Ctrl-C leaves it running\n"
        )
        from argosy.cli.logs import follow_lines

        return follow_lines(controller, view, target)
    if not os.isatty(0):
        raise ConfigError(
            "attach needs a terminal to type in, and stdin is none",
            fix=f"`argosy logs -f {view['run']}` follows the output",
        )
    begin = max(0, size_of(process["stdout"]) - SHOWN_BYTES)
    return _converse(handle, controller.client, process, begin)


def attach_to_new(handle: RunHandle, client: Client) -> int:
    """Wait for the run's one process and connect to it from its first byte; the run's exit code."""
    progress = Progress()
    while True:
        view = handle.view()
        process = next(iter(processes_of(view)), None)
        if view["state"] == "ended":
            break
        if process and process.get("pid") and process["state"] in ("running", "ready"):
            progress.end()
            return _converse(handle, client, process, 0)
        progress.begin(str(view.get("waiting") or "starting"))
        progress.show()
        time.sleep(0.02)
    if process and process.get("stdout") and os.path.exists(process["stdout"]):
        with open(process["stdout"], "rb") as file:
            sys.stdout.buffer.write(file.read())
    return _report(view, client)


def _report(view: dict[str, Any], client: Client) -> int:
    if view["outcome"] == "succeeded":
        announce_success(view)
    return report_end(view, client)


def _converse(handle: RunHandle, client: Client, process: dict[str, Any], begin: int) -> int:
    keeper_socket = os.path.join(os.path.dirname(client.path), "keeper.sock")
    has_ended = converse(keeper_socket, process["attempt"], process["stdout"], show_from=begin)
    if not has_ended:
        sys.stderr.write(f"\nargosy: detached; again with `argosy attach {handle.run}`\n")
        return DETACHED
    with Progress().during("waiting for the run to end"):
        view = handle.wait(30.0)
    return _report(view, client)
