"""`argosy scale`: give a gang another number of ranks while it runs."""

from __future__ import annotations

import json
import time
from typing import Any

from argosy.cli.arguments import Arguments, is_whole_number
from argosy.cli.connection import Controller, connect
from argosy.cli.progress import Progress
from argosy.errors import ClusterError, ConfigError

_RECONNECT_SECONDS = 20.0


def scale(arguments: Arguments) -> int:
    """Ask for the size, and wait until the new generation has started."""
    word, size = arguments.words[0], _read_size(arguments.words[1])
    controller = connect()
    target, view = controller.resolve(word, to_act=True)
    if target.index is not None:
        fix = f"argosy scale {word.rpartition('/')[0]} {size}"
        raise ConfigError("one process has no size", fix=fix)
    body = {"size": size, "role": target.role, "restart": bool(arguments.get("restart"))}
    command = controller.post(f"/v1/runs/{view['run']}/scale", body)["command"]
    outcome = ""
    if not arguments.get("no_wait"):
        with Progress().during(f"waiting for {size} ranks"):
            outcome = await_command(controller, command)
        view = controller.get(f"/v1/runs/{view['run']}")
    roles = {role["role"]: role for role in view["roles"] if role["gang"]}
    role = roles[target.role] if target.role else next(iter(roles.values()))
    if outcome not in ("", "ok"):
        raise ClusterError(f"{word} was not resized: {outcome}", fix=f"argosy events {view['run']}")
    if arguments.get("json"):
        keys = ("role", "generation", "count")
        answer = {"run": view["run"], "command": command, "outcome": outcome or "accepted"}
        print(json.dumps({**answer, **{key: role[key] for key in keys}}))
    else:
        state = f"has {size} ranks, generation {role['generation']}"
        print(f"{view['run']}/{role['role']} {state if outcome else f'gets {size} ranks'}")
    return 0


def _read_size(text: str) -> int:
    if not is_whole_number(text):
        raise ConfigError(f"{text!r} is no number of ranks", fix="example: argosy scale train 4")
    return int(text)


def await_command(controller: Controller, command: str) -> str:
    """What became of an accepted command; goes on by itself after a restart of the controller."""
    # Commands are events of the cluster, not of a run; their ids say where in the log they are.
    after, broken_at = int(command[1:]) - 1, 0.0
    while True:
        try:
            with controller.client.stream(f"/v1/events?follow=1&after={after}") as stream:
                broken_at = 0.0
                while not stream.is_closed:
                    for message in stream.wait(None)[0]:
                        event: dict[str, Any] = message.json()
                        after = max(after, int(event["seq"]))
                        fact = event["fact"]
                        if fact["kind"] == "command.done" and fact["command"] == command:
                            return str(fact["outcome"])
        except OSError as error:
            broken_at = broken_at or time.monotonic()
            if time.monotonic() - broken_at > _RECONNECT_SECONDS:
                raise ClusterError(f"lost the controller ({error})", fix="see `argosy status`")
            time.sleep(0.05)
