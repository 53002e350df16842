"""`argosy events`: what happened, as sentences, from the event log."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from argosy.analyze.story import Story
from argosy.cli.arguments import Arguments
from argosy.cli.connection import Controller, connect
from argosy.cli.paint import Paint, clock
from argosy.errors import ClusterError

_PAGE = 10_000
RECONNECT_SECONDS = 20.0


def events(arguments: Arguments) -> int:
    """Print the events of a run, or with --all of the cluster; with -f go on."""
    controller = connect()
    run = "" if arguments.get("all") else controller.run(arguments.word())["run"]
    found = read_all(controller, run)
    tail = arguments.get("tail")
    shown = found if tail is None else found[len(found) - min(tail, len(found)) :]
    is_json, should_follow = bool(arguments.get("json")), bool(arguments.get("follow"))
    if is_json and not should_follow:
        print(json.dumps({"events": shown}))
        return 0
    teller = Teller(is_json=is_json, names_runs=not run)
    for event in found[: len(found) - len(shown)]:
        teller.learn(event)
    for event in shown:
        teller.print(event)
    has_ended = bool(run) and any(event["fact"]["kind"] == "run.ended" for event in found)
    if should_follow and not has_ended:
        follow(controller, run, found[-1]["seq"] if found else 0, teller)
    return 0


def read_all(controller: Controller, run: str) -> list[dict[str, Any]]:
    """All events so far, a page at a time."""
    found: list[dict[str, Any]] = []
    while True:
        after = found[-1]["seq"] if found else 0
        page = controller.get(f"/v1/events?after={after}&limit={_PAGE}&run={run}")["events"]
        found += page
        if len(page) < _PAGE:
            return found


class Teller:
    """Prints events, each in one line."""

    def __init__(self, *, is_json: bool, names_runs: bool) -> None:
        self._is_json = is_json
        self._names_runs = names_runs
        self._story = Story()
        self._paint = Paint(sys.stdout)

    def learn(self, event: dict[str, Any]) -> None:
        """Who is who, without printing."""
        self._story.tell(event)

    def print(self, event: dict[str, Any]) -> None:
        """One line."""
        sentence = self._story.tell(event)
        if self._is_json:
            print(json.dumps(event), flush=True)
            return
        run = event["fact"].get("run", "")
        who = f"{self._paint(run, 'bold')} " if self._names_runs and run else ""
        stamp = self._paint(f"{event['seq']:>6} {clock(event['at'])}", "dim")
        print(f"{stamp}  {who}{sentence}", flush=True)


def follow(controller: Controller, run: str, after: int, teller: Teller) -> None:
    """Until the run has ended or Ctrl-C; goes on by itself after a restart of the controller."""
    broken_at = 0.0
    while True:
        path = f"/v1/events?after={after}&run={run}&follow=1"
        try:
            with controller.client.stream(path) as stream:
                broken_at = 0.0
                while not stream.is_closed:
                    for message in stream.wait(None)[0]:
                        event = message.json()
                        if event["seq"] <= after:
                            continue
                        after = event["seq"]
                        teller.print(event)
                        if run and event["fact"]["kind"] == "run.ended":
                            return
        except KeyboardInterrupt:
            return
        except OSError as error:
            broken_at = broken_at or time.monotonic()
            if time.monotonic() - broken_at > RECONNECT_SECONDS:
                raise ClusterError(f"lost the controller ({error})", fix="see `argosy status`")
            time.sleep(0.05)
