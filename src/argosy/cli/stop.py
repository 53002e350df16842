"""`argosy stop` and `argosy kill`: end a run, a role or a process; or send a signal."""

from __future__ import annotations

import json
import signal
from typing import Any

from argosy.cli.arguments import Arguments, is_whole_number
from argosy.cli.connection import (
    MOST_LISTED,
    Controller,
    Target,
    connect,
    describe_end,
    newest_of,
    processes_of,
)
from argosy.cli.progress import Progress
from argosy.control.submission import RunHandle
from argosy.errors import ConfigError, NotFoundError


def stop(arguments: Arguments) -> int:
    """Gracefully: stop signal, grace, then the whole tree."""
    if arguments.get("all"):
        return _stop_all(arguments)
    return _end(arguments, hard=False)


def _stop_all(arguments: Arguments) -> int:
    """All are asked before any is waited for, so that they end side by side."""
    if arguments.words:
        raise ConfigError(f"both {arguments.word()} and --all", fix="leave one of them out")
    controller = connect()
    # Looked at before: where the directory of one is that has ended and is forgotten, nobody says any more.
    known = {view["run"]: view for view in _list(controller, with_ended=False)}
    body = {"runs": None, "reason": arguments.get("reason") or "argosy stop --all"}
    asked = controller.post("/v1/stop", body)["runs"]
    runs = [known.get(each["run"]) or _look_up(controller, each) for each in asked]
    never_started = {each["run"] for each in asked if each["was_queued"]}
    if not arguments.get("no_wait"):
        with Progress().during("waiting for all runs to end"):
            runs = _await_ends(controller, runs, never_started)
    if arguments.get("json"):
        print(json.dumps({"runs": runs}))
        return 0
    for view in runs:
        if view["run"] in never_started:
            print(f"run {view['run']} cancelled")
        else:
            _say_end(arguments, controller, view, f"run {view['run']} {_told(view)}")
    if not runs:
        print("no run is alive")
    return 0


def _list(controller: Controller, *, with_ended: bool) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]]
    runs = controller.get(f"/v1/runs?all={int(with_ended)}&limit={MOST_LISTED}")["runs"]
    return runs


def _look_up(controller: Controller, asked: dict[str, Any]) -> dict[str, Any]:
    """A run that was not listed, as there were more. One that has never been started may be forgotten by now: all there is to say is that it was cancelled."""
    run = asked["run"]
    if not asked["was_queued"]:
        return controller.run(run)
    known = {"run": run, "name": asked["name"], "directory": f"{controller.cluster.runs}/{run}"}
    return {**known, "state": "ended", "outcome": "cancelled"}


def _await_ends(
    controller: Controller, runs: list[dict[str, Any]], never_started: set[str]
) -> list[dict[str, Any]]:
    """The runs as they ended. Thousands may have waited in the queue: they are looked at together."""
    ended = (
        {view["run"]: view for view in _list(controller, with_ended=True)} if never_started else {}
    )
    return [
        ended.get(view["run"]) or _read_end(view, "cancelled")
        if view["run"] in never_started
        else _await_end(controller, view)
        for view in runs
    ]


def _await_end(controller: Controller, view: dict[str, Any]) -> dict[str, Any]:
    try:
        return RunHandle(view["run"], view["name"], controller.client).wait()
    except NotFoundError:
        return _read_end(view, "")


def _read_end(view: dict[str, Any], outcome: str) -> dict[str, Any]:
    """A run that the controller has forgotten already, among so many, as its directory says that it ended."""
    from argosy.cli.farewell import read_end

    end = read_end(view["directory"])
    kept = {key: end.get(key) for key in ("outcome", "exit_code", "reason")}
    return {**view, "state": "ended", **kept, "outcome": end.get("outcome", outcome)}


def _told(view: dict[str, Any]) -> str:
    return str(view["outcome"] or "ended") if view["state"] == "ended" else "is being stopped"


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
        return _say_end(arguments, controller, view, describe_end(view))
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
    text, progress = f"waiting for {arguments.word() or view['run']} to end", Progress()

    def hear(fact: dict[str, Any]) -> None:
        progress.begin(text, _saving(fact))

    with progress.during(text):
        is_whole = target.role is None
        view = handle.wait(hear=hear) if is_whole else _await_processes(handle, target)
    return _say_end(arguments, controller, view, f"{arguments.word() or view['run']} {verb}")


def _saving(fact: dict[str, Any]) -> str:
    """What a fact says of a save that goes on."""
    if fact["kind"] != "attempt.saving":
        return ""
    from argosy.protocol.advances import describe_fact

    return describe_fact(fact)


def _say_end(arguments: Arguments, controller: Controller, view: dict[str, Any], what: str) -> int:
    """That it is done; of a run that has ended also what it lost, what it has saved, and how to go on with it."""
    if view["state"] != "ended":
        return _say(arguments, view, what)
    from argosy.cli.saves import loss_of, newest_save
    from argosy.cli.why import read_events

    try:
        events = read_events(controller, view["run"])
    except NotFoundError:
        events = []  # one of so many that it is forgotten already
    save = newest_save(view, events)
    if arguments.get("json"):
        return _say(arguments, {**view, "saved": save.as_json() if save else None}, "")
    is_finished = view["outcome"] == "succeeded"
    told = [what, loss_of(view), "\n".join(save.lines()) if save and not is_finished else ""]
    return _say(arguments, view, "; ".join(part for part in told if part))


def _resolve_alive(controller: Controller, arguments: Arguments) -> tuple[Target, dict[str, Any]]:
    """Without a target: the newest run that is alive, never one that has ended long ago."""
    if arguments.words:
        return controller.resolve(arguments.word(), to_act=True)
    alive = controller.get("/v1/runs?all=0&limit=1000")["runs"]
    runs = [view for view in alive if not view.get("helps")]
    if not runs:
        fix = "`argosy ps --all` shows those that have ended"
        if alive:
            helper = alive[0]
            fix = f"{helper['name']} {helper['run']} works for {helper['helps']}: name it to end it"
        raise NotFoundError("no run is alive", fix=fix)
    view = newest_of(runs, to_act=True)
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


def signal_name(text: str) -> str:
    """`SIGUSR1` from `usr1`, `SIGUSR1` or its number; ConfigError when there is none such."""
    if is_whole_number(text) and int(text) in list(signal.Signals):
        return signal.Signals(int(text)).name
    name = text.upper().removeprefix("SIG")
    known = [each.removeprefix("SIG") for each in signal.Signals.__members__]
    if name not in known:
        from argosy.config.nearest import nearest

        match = nearest(name, known)
        raise ConfigError(
            f"there is no signal {text!r}",
            fix=f"did you mean `SIG{match}`?" if match else "`kill -l` lists them",
        )
    return f"SIG{name}"


def _signal(arguments: Arguments) -> int:
    name = signal_name(arguments.get("signal"))
    controller = connect()
    target, view = _resolve_alive(controller, arguments)
    alive = [p for p in processes_of(view, target) if p.get("pid") and p["state"] != "exited"]
    num_sent = sum(_send_signal(controller, process["attempt"], name) for process in alive)
    if not num_sent:
        raise NotFoundError(
            f"no process of {arguments.word() or view['run']} is running",
            fix="see `argosy ps --all`",
        )
    count = f"{num_sent} process{'es' if num_sent != 1 else ''}"
    return _say(arguments, view, f"{name} sent to {count} of {view['run']}")


def _send_signal(controller: Controller, attempt: str, name: str) -> bool:
    """Whether it was there to get it: of a gang the first that the signal ends may take the others with it."""
    try:
        controller.post(f"/v1/processes/{attempt}/signal", {"signal": name})
    except NotFoundError:
        return False
    return True


def _say(arguments: Arguments, view: dict[str, Any], text: str) -> int:
    print(json.dumps(view) if arguments.get("json") else text)
    return 0
