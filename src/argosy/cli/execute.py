"""`argosy exec`: a command beside a process, with its environment, directory and containment."""

from __future__ import annotations

import os
import sys
import time

from argosy.cli.announce import warn_of_input
from argosy.cli.arguments import Arguments
from argosy.cli.connection import connect, processes_of
from argosy.cli.output import write_all
from argosy.cli.program import read_env
from argosy.cli.terminal import converse
from argosy.errors import ConfigError, NotFoundError


def execute(arguments: Arguments) -> int:
    """Run it to its end; the exit code is the command's."""
    if not arguments.rest:
        raise ConfigError("there is no command", fix=f"usage: argosy {arguments.verb.usage}")
    controller = connect()
    target, view = controller.resolve(arguments.word(), to_act=True)
    process = next(
        (p for p in processes_of(view, target) if p.get("pid") and p["state"] != "exited"), None
    )
    if process is None:
        raise NotFoundError(
            f"no process of {arguments.word() or view['run']} is running",
            fix="exec needs a living process: `argosy ps` shows them",
        )
    wants_tty = bool(arguments.get("tty")) and sys.stdin.isatty()
    body = {"argv": arguments.rest, "tty": wants_tty, "env": read_env(arguments)}
    started = controller.post(f"/v1/processes/{process['attempt']}/exec", body)
    warn_of_input()
    if wants_tty and not converse(
        controller.cluster.keeper_socket, started["attempt"], started["stdout"]
    ):
        sys.stderr.write("\nargosy: detached; the command goes on\n")
        return 0
    streams = [] if wants_tty else [(1, started["stdout"], 0), (2, started["stderr"], 0)]
    while True:
        state = controller.get(f"/v1/exec/{started['attempt']}")
        streams = [(fd, path, _copy(fd, path, position)) for fd, path, position in streams]
        if not state["running"]:
            break
        # The API has no stream for commands beside a run; they are short.
        time.sleep(0.02)
    if state.get("error"):
        sys.stderr.write(f"argosy: {arguments.rest[0]} could not be started: {state['error']}\n")
    if state.get("signal") is not None:
        return 128 + int(state["signal"])
    if state.get("code") is not None:
        return int(state["code"])
    from argosy.control.restarts import unstarted_code

    return unstarted_code(str(state.get("error") or ""))


def _copy(descriptor: int, path: str, position: int) -> int:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, TypeError):
        return position
    try:
        while data := os.pread(file, 1 << 16, position):
            write_all(descriptor, data)
            position += len(data)
    finally:
        os.close(file)
    return position
