"""The HTTP API: a Starlette application over the Conductor, one function per endpoint of docs/reference/control-interfaces.md.

Each function checks what came in, asks the conductor, and encodes what it says. Errors are `{"error", "fix"}` with a fitting status.
Who may connect is server.py's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from argosy import __version__
from argosy.config.spec import Submission
from argosy.control import api, injection, openapi
from argosy.control.conductor import Conductor
from argosy.control.evidence import MOST_STACKS
from argosy.control.shutdown import Shutdown
from argosy.control.streams import LogFollower, Place, RunStream, TiedRuns, follow_events, with_rank
from argosy.control.views import ProcessView, RunView, processes_of, with_looks
from argosy.errors import (
    ArgosyError,
    ClusterError,
    ConfigError,
    ForgottenError,
    HomeError,
    NotFoundError,
    ProtocolError,
)
from argosy.protocol.facts import FaultInjected, Note
from argosy.telemetry.logs import LogReader

logger = logging.getLogger("argosy.http")
MOST_BODY_BYTES = 16 << 20
_LINES_PER_PIECE = 2000
_MOST_EXECS = 1024
_MOST_NAMED = 3
_HELPER_SECONDS = 3.0
_CLIENT_SECONDS = 10.0
"""How long the client of a new (or found) tied run may take to come."""
_LOOK_SECONDS = 0.5
"""How long hosts may take to say what they see; without it the log's view is shown."""
_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_STATUS = {
    ConfigError: 422,
    NotFoundError: 404,
    ForgottenError: 410,
    ClusterError: 503,
    HomeError: 507,
    ProtocolError: 400,
}
T = TypeVar("T")


class _TooLarge(ArgosyError):
    pass


class _Conflict(ArgosyError):
    pass


class HttpApi:
    """All endpoints, over one conductor."""

    def __init__(self, conductor: Conductor, shutdown: Shutdown, *, http_port: int | None) -> None:
        self._conductor = conductor
        self._shutdown = shutdown
        self._http_port = http_port
        self._execs: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._document = msgspec.json.encode(openapi.describe(ENDPOINTS, __version__))
        self.tied = TiedRuns(self._stop_tied, lambda run: run in conductor.tally.alive)
        for run in conductor.tally.tied:
            self.tied.expect(run, _CLIENT_SECONDS)

    def application(self) -> Starlette:
        """The ASGI application."""
        by_path: dict[str, dict[str, Any]] = {}
        for endpoint in ENDPOINTS:
            methods = by_path.setdefault(endpoint.path, {})
            methods[endpoint.method] = self._guard(getattr(self, endpoint.name))
        routes = [
            Route(path, _choose(methods), methods=list(methods))
            for path, methods in by_path.items()
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_problem}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def status(self, request: Request) -> Response:
        """The cluster at a glance."""
        conductor = self._conductor
        hosts = conductor.links.hosts()
        keeper_pid, keeper = conductor.links.keeper(hosts[0]) if hosts else (0, "")
        pids = {"controller": os.getpid()}
        if keeper_pid:
            pids["keeper"] = keeper_pid
        for host in hosts:
            if conductor.links.agent_pid(host):
                pids["agent"] = conductor.links.agent_pid(host)
        tally = conductor.tally
        counts = api.RunCounts(
            queued=len(tally.queued), running=len(tally.running), ended=tally.num_ended
        )
        return _answer(
            api.Status(
                version=__version__,
                cluster=conductor.cluster.key,
                keeper=keeper,
                pids=pids,
                hosts=hosts,
                runs=counts,
                uptime_seconds=conductor.uptime_seconds(),
                home=conductor.cluster.home,
                http_port=self._http_port,
                trouble=conductor.log.trouble,
            )
        )

    async def submit(self, request: Request) -> Response:
        """Accept a submission."""
        submission = await _body(request, Submission)
        if self._shutdown.is_begun:
            raise _Conflict("the cluster is shutting down", fix="try again in a moment")
        runs = await self._conductor.submit(submission, has_left=request.is_disconnected)
        if submission.spec.tied:
            for run in runs:
                self.tied.expect(run["run"], _CLIENT_SECONDS)
        return _answer({"runs": runs}, 201)

    async def runs(self, request: Request) -> Response:
        """List runs."""
        query = _query(request, api.RunsQuery)
        runs = self._conductor.coordinator.runs_view(
            include_ended=bool(query.all), limit=query.limit, name=query.name
        )
        return _answer({"runs": await self._look_at(runs)})

    async def run(self, request: Request) -> Response:
        """One run."""
        view = self._conductor.coordinator.run_view(request.path_params["run"])
        return _answer((await self._look_at([view]))[0])

    async def processes(self, request: Request) -> Response:
        """List processes."""
        query = _query(request, api.ProcessesQuery)
        coordinator = self._conductor.coordinator
        if query.run:
            runs = [coordinator.run_view(query.run)]
        else:
            runs = coordinator.runs_view(include_ended=bool(query.all), limit=query.limit)
        found = processes_of(await self._look_at(runs))
        return _answer({"processes": found[: query.limit]})

    async def process(self, request: Request) -> Response:
        """One process, by the id of its newest start."""
        attempt = request.path_params["attempt"]
        view = self._conductor.coordinator.run_view(attempt.partition(".")[0])
        for process in processes_of(await self._look_at([view])):
            if process.attempt == attempt:
                return _answer(process)
        raise NotFoundError(
            f"no process has {attempt!r} as its newest start",
            fix=f"GET /v1/processes?run={view.run} lists them; earlier starts are in the events",
        )

    async def stop(self, request: Request) -> Response:
        """End a run, a role of it or one process."""
        body = await _body(request, api.StopBody)
        command = await self._conductor.stop(
            request.path_params["run"],
            hard=body.hard,
            reason=body.reason,
            role=body.role,
            index=body.index,
        )
        return _answer({"command": command}, 202)

    async def stop_runs(self, request: Request) -> Response:
        """End many runs at once."""
        body = await _body(request, api.StopRunsBody)
        words = None if body.runs is None else set(body.runs)
        runs = await self._conductor.stop_runs(words, hard=body.hard, reason=body.reason)
        return _answer({"runs": runs}, 202)

    async def scale(self, request: Request) -> Response:
        """Give a gang another size."""
        body = await _body(request, api.ScaleBody)
        command = await self._conductor.scale(
            request.path_params["run"], body.size, role=body.role, may_restart=body.restart
        )
        return _answer({"command": command}, 202)

    async def faults(self, request: Request) -> Response:
        """Break something on purpose."""
        body = await _body(request, api.FaultsBody)
        faults = await self._conductor.inject(request.path_params["run"], body.faults)
        for fault in faults:
            if not fault.is_told:
                await self._carry_out(fault)
        return _answer({"faults": faults}, 201)

    async def _carry_out(self, fault: FaultInjected) -> None:
        """Break it; what cannot be broken any more is said in the log, too, which has the fault already."""
        try:
            host = "" if fault.part else self._find(fault.attempt)[1]
            await injection.carry_out(self._conductor.links, fault, host)
        except ArgosyError as error:
            text = f"fault {fault.number} was not carried out: {error.what}"
            note = Note(run=fault.run, attempt=fault.attempt, level="warning", text=text)
            self._conductor.note(note)
            raise

    async def signal(self, request: Request) -> Response:
        """Signal the leader of a process."""
        body = await _body(request, api.SignalBody)
        attempt = request.path_params["attempt"]
        run, host = self._find(attempt)
        if body.signal not in signal.Signals.__members__:
            raise ConfigError(
                f"there is no signal {body.signal!r}", fix="use a name such as SIGUSR1"
            )
        data = {"attempt": attempt, "signal": body.signal}
        await self._conductor.links.ask(host, "signal", data)
        self._conductor.note(
            Note(run=run, attempt=attempt, text=f"{body.signal} sent to {attempt}")
        )
        return _answer({"ok": True})

    async def exec(self, request: Request) -> Response:
        """Start a command beside a process."""
        body = await _body(request, api.ExecBody)
        attempt = request.path_params["attempt"]
        run, host = self._find(attempt)
        data = {"attempt": attempt, "argv": body.argv, "tty": body.tty, "env": body.env}
        started = await self._conductor.links.ask(host, "exec", data)
        self._execs[started["attempt"]] = host
        while len(self._execs) > _MOST_EXECS:
            del self._execs[next(iter(self._execs))]
        text = f"exec of {body.argv[0]} beside {attempt}"
        self._conductor.note(Note(run=run, attempt=attempt, text=text))
        return _answer(started, 201)

    async def exec_state(self, request: Request) -> Response:
        """How an exec'd command is doing."""
        attempt = request.path_params["attempt"]
        known = self._execs.get(attempt)
        for host in [known] if known else self._conductor.links.hosts():
            state = await self._conductor.links.ask(host, "exec_state", {"attempt": attempt})
            if state:
                return _answer(state)
        raise NotFoundError(f"there is no exec {attempt!r}")

    async def stacks(self, request: Request) -> Response:
        """Stacks of a run's processes, taken now."""
        query = _query(request, api.StacksQuery)
        view = self._view(request.path_params["run"])
        processes = {
            process["attempt"]: process
            for role in view["roles"]
            for process in role["processes"]
            if process.get("pid") and process.get("code") is None and process.get("signal") is None
            if query.role in (None, process["role"]) and query.index in (None, process["index"])
        }
        found: dict[str, dict[str, Any]] = {}
        attempts = list(processes)
        for host in self._conductor.links.hosts():
            for first in range(0, len(attempts), MOST_STACKS):
                data = {"attempts": attempts[first : first + MOST_STACKS]}
                answer = await self._conductor.links.ask(host, "stacks", data, timeout_seconds=60)
                found |= {stack["attempt"]: stack for stack in answer["stacks"]}
        keys = ("role", "index", "rank", "attempt", "pid")
        stacks = [
            {**{key: process.get(key) for key in keys}, **found[attempt]}
            for attempt, process in processes.items()
            if attempt in found
        ]
        return _answer({"stacks": stacks})

    async def events(self, request: Request) -> Response:
        """Events of the log, or a live stream of them."""
        query = _query(request, api.EventsQuery)
        log = self._conductor.log
        if query.run:
            self._view(query.run)
        if query.follow:
            last = request.headers.get("last-event-id", "")
            after = max(query.after, Place.parse(last).seq)
            pieces = follow_events(log, after, query.run)
            return _stream(self._hold(query.run, pieces) if query.run else pieces)
        return _answer({"events": await log.read(query.after, query.run, query.limit)})

    async def logs(self, request: Request) -> Response:
        """Lines of output, or a live stream of them."""
        query = _query(request, api.LogsQuery)
        run, directory = self._directory(request.path_params["run"])
        ranks = self._conductor.tally.ranks(run)
        if not query.follow:
            reader = LogReader(directory, role=query.role, index=query.index)
            pieces = _line_pieces(reader, query.tail, lambda line: with_rank(line, ranks))
            return StreamingResponse(pieces, media_type="application/json")
        follower = LogFollower(directory, ranks, role=query.role, index=query.index)
        follower.begin(query.tail)
        return self._run_stream(request, run, follower, with_facts=False)

    async def stream(self, request: Request) -> Response:
        """Lines and facts of a run until its end."""
        query = _query(request, api.StreamQuery)
        run, directory = self._directory(request.path_params["run"])
        follower = LogFollower(directory, self._conductor.tally.ranks(run))
        follower.begin(None)
        with_lines = bool(query.lines)
        response = self._run_stream(request, run, follower, with_facts=True, with_lines=with_lines)
        if query.tied:
            response.body_iterator = self._tie(run, response.body_iterator)
        return response

    async def hosts(self, request: Request) -> Response:
        """The hosts."""
        return _answer({"hosts": self._conductor.coordinator.hosts_view()})

    async def queue(self, request: Request) -> Response:
        """The queue."""
        return _answer({"queue": self._conductor.coordinator.queue_view()})

    async def down(self, request: Request) -> Response:
        """Shut the cluster down."""
        body = await _body(request, api.DownBody)
        if not body.force:
            await self._helpers_gone()
        alive = self._conductor.tally.alive
        if alive and not body.force:
            some = ", ".join(self._named(run) for run in sorted(alive)[:_MOST_NAMED])
            more = ", …" if len(alive) > _MOST_NAMED else ""
            count = f"{len(alive)} runs are" if len(alive) > 1 else "1 run is"
            raise _Conflict(
                f"{count} alive: {some}{more}",
                fix="`argosy stop --all` first, or use `argosy down --force`",
            )
        self._shutdown.begin("argosy down --force" if body.force else "argosy down")
        return _answer({"ok": True}, 202)

    async def _helpers_gone(self) -> None:
        """What worked for runs that have ended ends a moment after them: it is no reason to refuse anything."""
        deadline = time.monotonic() + _HELPER_SECONDS
        tally, runs = self._conductor.tally, self._conductor.coordinator.runs
        while tally.alive and time.monotonic() < deadline:
            if any(runs[run].spec.helps in ("", *tally.alive) for run in tally.alive):
                return
            await asyncio.sleep(0.02)

    async def document(self, request: Request) -> Response:
        """This API, described."""
        return Response(self._document, media_type="application/json")

    def _named(self, run: str) -> str:
        name = self._conductor.coordinator.runs[run].submitted.name
        return f"{run} ({name})" if name else run

    def _guard(self, function: Callable[[Request], Awaitable[Response]]) -> Any:
        async def guarded(request: Request) -> Response:
            self._conductor.on_activity()
            try:
                response = await function(request)
                # Nobody is told what a crash could still undo.
                await self._conductor.wait_durable()
                return response
            except _TooLarge as error:
                return _problem(error, 413)
            except _Conflict as error:
                return _problem(error, 409)
            except ArgosyError as error:
                return _problem(error, _STATUS.get(type(error), 500))
            except ClientDisconnect:
                return Response(status_code=400)

        return guarded

    async def _look_at(self, views: list[RunView]) -> list[RunView]:
        """Show which processes a signal has stopped and which wait for a warm parent: the log knows nothing of that, the hosts do."""
        hosts = {p.host for p in processes_of(views) if p.pid or p.state == "planned"}
        halted: set[str] = set()
        importing: dict[str, str] = {}
        for host in hosts & set(self._conductor.links.hosts()):
            with contextlib.suppress(ClusterError):
                answer = await self._conductor.links.ask(
                    host, "look", {}, timeout_seconds=_LOOK_SECONDS
                )
                halted |= set(answer["halted"])
                importing |= answer["importing"]
        if not halted and not importing:
            return views
        return [with_looks(view, halted, importing) for view in views]

    def _view(self, run: str) -> dict[str, Any]:
        view: dict[str, Any] = msgspec.to_builtins(self._conductor.coordinator.run_view(run))
        return view

    def _directory(self, run: str) -> tuple[str, str]:
        """(id, directory) of a run; NotFoundError when there is none."""
        view = self._view(run)
        return view["run"], view["directory"]

    def _find(self, attempt: str) -> tuple[str, str]:
        found = self._conductor.tally.find(attempt)
        if found is None:
            raise NotFoundError(
                f"there is no live process {attempt!r}", fix="`argosy ps` shows those there are"
            )
        return found[0], found[1]

    def _run_stream(
        self, request: Request, run: str, follower: LogFollower, **what: bool
    ) -> StreamingResponse:
        place = Place.parse(request.headers.get("last-event-id", ""))
        stream = RunStream(self._conductor.log, follower, run, **what)
        pieces = stream.follow(place, self._conductor.tally.end_of, self._view)
        return _stream(self._hold(run, pieces))

    async def _hold(self, run: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The run is not forgotten while somebody follows it."""
        with self._conductor.coordinator.retention.held(run):
            async for piece in pieces:
                yield piece

    async def _tie(self, run: str, pieces: Any) -> AsyncIterator[bytes]:
        with self.tied.watched(run):
            async for piece in pieces:
                yield piece

    def _stop_tied(self, run: str) -> None:
        stopping = self._conductor.stop(run, hard=False, reason="its client vanished")
        task = asyncio.ensure_future(stopping)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


ENDPOINTS = [
    openapi.Endpoint(method=method, path=path, name=name, summary=summary, answer=answer, **more)
    for method, path, name, summary, answer, more in (
        ("GET", "/v1/status", "status", "The cluster at a glance", api.Status, {}),
        ("POST", "/v1/runs", "submit", "Submit runs", api.RunsAccepted, {"status": 201, "body": Submission}),
        ("GET", "/v1/runs", "runs", "List runs", api.Runs, {"query": api.RunsQuery}),
        ("GET", "/v1/runs/{run}", "run", "One run", RunView, {}),
        ("POST", "/v1/runs/{run}/stop", "stop", "End a run or a part of it", api.Command, {"status": 202, "body": api.StopBody}),
        ("POST", "/v1/stop", "stop_runs", "End many runs at once", api.RunsStopping, {"status": 202, "body": api.StopRunsBody}),
        ("POST", "/v1/runs/{run}/scale", "scale", "Give a gang another size", api.Command, {"status": 202, "body": api.ScaleBody}),
        ("POST", "/v1/runs/{run}/faults", "faults", "Break something on purpose", api.Faults, {"status": 201, "body": api.FaultsBody}),
        ("GET", "/v1/runs/{run}/stacks", "stacks", "Stacks of its processes", api.Stacks, {"query": api.StacksQuery}),
        ("GET", "/v1/runs/{run}/logs", "logs", "Lines of output", api.Lines, {"query": api.LogsQuery, "streams": True}),
        ("GET", "/v1/runs/{run}/stream", "stream", "Lines and facts until the end", None, {"query": api.StreamQuery, "streams": True}),
        ("GET", "/v1/processes", "processes", "List processes", api.Processes, {"query": api.ProcessesQuery}),
        ("GET", "/v1/processes/{attempt}", "process", "One process", ProcessView, {}),
        ("POST", "/v1/processes/{attempt}/signal", "signal", "Signal a process", api.Done, {"body": api.SignalBody}),
        ("POST", "/v1/processes/{attempt}/exec", "exec", "Start a command beside a process", api.ExecStarted, {"status": 201, "body": api.ExecBody}),
        ("GET", "/v1/exec/{attempt}", "exec_state", "How an exec'd command is doing", api.ExecState, {}),
        ("GET", "/v1/events", "events", "Events of the log", api.Events, {"query": api.EventsQuery, "streams": True}),
        ("GET", "/v1/hosts", "hosts", "The hosts", api.Hosts, {}),
        ("GET", "/v1/queue", "queue", "What waits", api.Queue, {}),
        ("POST", "/v1/down", "down", "Shut the cluster down", api.Done, {"status": 202, "body": api.DownBody}),
        ("GET", "/v1/openapi.json", "document", "This document", None, {}),
    )
]  # fmt: skip


def _choose(methods: dict[str, Any]) -> Any:
    """One route per path, so that a wrong method is told all the right ones."""

    async def chosen(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        answer: Response = await methods[method](request)
        return answer

    return chosen


def _answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _problem(error: ArgosyError, status: int) -> Response:
    return _answer(api.Problem(error=error.what, fix=error.fix), status)


async def _http_problem(request: Request, error: HTTPException) -> Response:
    fix = "see GET /v1/openapi.json"
    problem = api.Problem(error=f"{request.method} {request.url.path}: {error.detail}", fix=fix)
    response = _answer(problem, error.status_code)
    response.headers.update(error.headers or {})
    return response


def _stream(pieces: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(pieces, media_type="text/event-stream", headers=_STREAM_HEADERS)


def _query(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the query is wrong: {error}", fix="see GET /v1/openapi.json") from None


async def _body(request: Request, kind: type[T]) -> T:
    """The checked body; refused before it is read when it says that it is too large."""
    too_large = _TooLarge(
        f"the body is over the limit of {MOST_BODY_BYTES} bytes", fix="send less at once"
    )
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MOST_BODY_BYTES:
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BODY_BYTES:
            raise too_large
    try:
        return msgspec.json.decode(bytes(data), type=kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the body is wrong: {error}", fix="see GET /v1/openapi.json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the body is not JSON: {error}", fix="send a JSON object") from None


async def _line_pieces(
    reader: LogReader, tail: int | None, finish: Callable[[Any], Any]
) -> AsyncIterator[bytes]:
    """`{"lines": […]}` in pieces: a long log is never in memory as a whole."""
    loop = asyncio.get_running_loop()
    if tail is None:
        lines = reader.lines()
    else:
        lines = iter(await loop.run_in_executor(None, reader.tail, tail))

    def take() -> list[bytes]:
        found = []
        for line in lines:
            found.append(msgspec.json.encode(finish(line)))
            if len(found) == _LINES_PER_PIECE:
                break
        return found

    yield b'{"lines":['
    separator = b""
    while batch := await loop.run_in_executor(None, take):
        yield separator + b",".join(batch)
        separator = b","
    yield b"]}"
