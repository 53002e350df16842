"""`argosy stop` and `argosy kill`: end a run, a role or a process; or send a signal."""

from __future__ import annotations

import json
import signal
from typing import Any

from argosy.cli.arguments import Arguments
from argosy.cli.connection import Controller, Target, connect, processes_of
from argosy.cli.progress import Progress
from argosy.control.submission import RunHandle
from argosy.errors import ConfigError, NotFoundError

_LOST = "nothing was saved"


def stop(arguments: Arguments) -> int:
    """Gracefully: stop signal, grace, then the whole tree."""
    return _end(arguments, hard=False)


def kill(arguments: Arguments) -> int:
    """At once; or only a signal, with --signal."""
    if "signal" in arguments.options:
        return _signal(arguments)
    return _end(arguments, hard=True)


def _end(arguments: Arguments, *, hard: bool) -> int:
    controller = connect()
    target, view = _resolve_alive(controller, arguments)
    verb = "killed" if hard else "stopped"
    if view["state"] == "ended":
        return _say(arguments, view, f"run {view['run']} has already {view['outcome'] or 'ended'}")
    body = {
        "hard": hard,
        "reason": arguments.get("reason") or f"argosy {arguments.verb.name}",
        "role": target.role,
        "index": target.index,
    }
    controller.post(f"/v1/runs/{view['run']}/stop", body)
    if arguments.get("no_wait"):
        return _say(arguments, view, f"run {view['run']} is being {verb}")
    handle = RunHandle(view["run"], view["name"], controller.client)
    with Progress().during(f"waiting for {arguments.word() or view['run']} to end"):
        view = _await_processes(handle, target) if target.role is not None else handle.wait()
    what = f"{arguments.word() or view['run']} {verb}"
    return _say(arguments, view, what + _describe_save(controller, view))


def _describe_save(controller: Controller, view: dict[str, Any]) -> str:
    """Where a run that was stopped has saved what it had come to, and how to go on with it; or that it has not."""
    if view["state"] != "ended":
        return ""
    from argosy.analyze.attempts import read_attempts
    from argosy.analyze.story import resume_command
    from argosy.cli.why import read_events

    events = read_events(controller, view["run"])
    facts = {event["fact"]["kind"]: event["fact"] for event in events}
    saved, submitted = facts.get("run.saved", {}), facts.get("run.submitted", {})
    attempt = read_attempts(events).by_id.get(saved.get("attempt", ""))
    text = ""
    if _LOST in view["reason"]:
        text = f"; {view['reason'][view['reason'].index(_LOST) :]}"
    if attempt is not None and saved.get("path"):
        command = resume_command(submitted, attempt.role, saved["path"])
        text += f"; step {saved['step']} is saved in {saved['path']}\n  go on: {command}"
    return text


def _resolve_alive(controller: Controller, arguments: Arguments) -> tuple[Target, dict[str, Any]]:
    """Without a target: the newest run that is alive, never one that has ended long ago."""
    if arguments.words:
        return controller.resolve(arguments.word())
    runs = controller.get("/v1/runs?all=0&limit=1000")["runs"]
    if not runs:
        raise NotFoundError("no run is alive", fix="`argosy ps --all` shows those that have ended")
    view = max(runs, key=lambda run: run["submitted_at"])
    return Target(view["run"], None, None), view


def _await_processes(handle: RunHandle, target: Target) -> dict[str, Any]:
    """Until the attempts that were meant are gone; what their restart policy makes of it is another matter."""
    import time

    first = handle.view()
    attempts = {p["attempt"] for p in processes_of(first, target) if p.get("pid")}
    while True:
        view = handle.view()
        left = [
            p
            for p in processes_of(view, target)
            if p["attempt"] in attempts and p["state"] != "exited"
        ]
        if not left or view["state"] == "ended":
            return view
        time.sleep(0.03)


def _signal(arguments: Arguments) -> int:
    name = arguments.get("signal").upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in signal.Signals.__members__:
        from argosy.config.nearest import did_you_mean

        raise ConfigError(
            f"there is no signal {arguments.get('signal')!r}",
            fix=did_you_mean(name.lower(), [n.lower() for n in signal.Signals.__members__]),
        )
    controller = connect()
    target, view = _resolve_alive(controller, arguments)
    alive = [p for p in processes_of(view, target) if p.get("pid") and p["state"] != "exited"]
    if not alive:
        raise NotFoundError(
            f"no process of {arguments.word() or view['run']} is running",
            fix="see `argosy ps --all`",
        )
    for process in alive:
        controller.post(f"/v1/processes/{process['attempt']}/signal", {"signal": name})
    count = f"{len(alive)} process{'es' if len(alive) != 1 else ''}"
    return _say(arguments, view, f"{name} sent to {count} of {view['run']}")


def _say(arguments: Arguments, view: dict[str, Any], text: str) -> int:
    print(json.dumps(view) if arguments.get("json") else text)
    return 0
