"""`argosy logs`: the output of a run's processes, merged in order of time and folded."""

from __future__ import annotations

import json
import os
import time
from typing import Any
from urllib.parse import urlencode

from argosy.cli.arguments import Arguments
from argosy.cli.connection import Controller, Target, connect, processes_of
from argosy.cli.output import LabelledOutput
from argosy.errors import ClusterError, NotFoundError

RECONNECT_SECONDS = 20.0


def logs(arguments: Arguments) -> int:
    """Print lines; with -f until the run ends."""
    controller = connect()
    target, view = controller.resolve(arguments.word())
    role = arguments.get("role")
    if role is not None:
        known = [r["role"] for r in view["roles"]]
        if role not in known:
            from argosy.config.nearest import did_you_mean

            raise NotFoundError(
                f"run {view['run']} has no role {role!r}", fix=did_you_mean(role, known)
            )
        target.role = role
    if arguments.get("follow"):
        return follow_lines(controller, view, target, arguments)
    lines = controller.get(_path(target, follow=0, tail=arguments.get("tail")))["lines"]
    if arguments.get("json"):
        print(json.dumps({"lines": lines}))
        return 0
    if not lines:
        _check_files(view, target)
    output = _output(view, arguments, is_live=False)
    for line in lines:
        output.line(line)
    output.finish()
    return 0


def _check_files(view: dict[str, Any], target: Target) -> None:
    """NotFoundError when there is nothing to show because somebody has removed the files."""
    started = [p for p in processes_of(view, target) if p["started_at"]]
    if started and not any(os.path.exists(p["stdout"]) for p in started):
        raise NotFoundError(
            f"the log files of run {view['run']} are gone from {view['directory']}/logs",
            fix=f"what happened is still in `argosy events {view['run']}`",
        )


def follow_lines(
    controller: Controller, view: dict[str, Any], target: Target, arguments: Arguments | None = None
) -> int:
    """Until the run ends, or Ctrl-C, which leaves the run alone; goes on by itself after a restart of the controller."""
    is_json = bool(arguments and arguments.get("json"))
    output = _output(view, arguments, is_live=True)
    path = _path(target, follow=1, tail=arguments.get("tail") if arguments else None)
    last_id = ""
    broken_at = 0.0
    while True:
        try:
            with controller.client.stream(path, last_id=last_id) as stream:
                broken_at = 0.0
                while not stream.is_closed:
                    due = output.deadline()
                    patience = None if due is None else max(0.0, due - time.time())
                    for event in stream.wait(patience)[0]:
                        if event.kind == "end":
                            output.finish()
                            if not is_json:
                                _say_end(controller, view["run"])
                            return 0
                        last_id = event.id or last_id
                        if is_json:
                            print(event.data, flush=True)
                        else:
                            output.line(event.json())
                    output.flush(time.time())
        except KeyboardInterrupt:
            output.finish()
            return 130
        except OSError as error:
            broken_at = broken_at or time.monotonic()
            if time.monotonic() - broken_at > RECONNECT_SECONDS:
                raise ClusterError(f"lost the controller ({error})", fix="see `argosy status`")
            time.sleep(0.05)


def _say_end(controller: Controller, run: str) -> None:
    """A run that did not succeed says why, as at the end of `argosy run`."""
    from argosy.cli.why import report_end

    view = controller.get(f"/v1/runs/{run}")
    if view["state"] == "ended":
        report_end(view, controller.client)


def _output(view: dict[str, Any], arguments: Arguments | None, *, is_live: bool) -> LabelledOutput:
    return LabelledOutput(
        view,
        is_live=is_live,
        should_fold=not (arguments and arguments.get("no_fold")),
        has_timestamps=bool(arguments and arguments.get("timestamps")),
    )


def _path(target: Target, *, follow: int, tail: int | None) -> str:
    query: dict[str, Any] = {"follow": follow}
    if target.role is not None:
        query["role"] = target.role
    if target.index is not None:
        query["index"] = target.index
    if tail is not None:
        query["tail"] = tail
    return f"/v1/runs/{target.run}/logs?{urlencode(query)}"
