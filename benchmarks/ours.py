"""Our side: a local Argosy cluster with a home of its own, driven by the command line that a person would type.

Ends everything it started. HTTP is used only where a number needs a stream (exit events) or thousands of reads.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import PYTHON, ROOT, SideFailed, fair_environment, wait_until

ARGOSY = ROOT / ".venv" / "bin" / "argosy"


class Cluster:
    """One local cluster in `directory`; use as a context manager: `argosy down --force` at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / "home"
        self.home.mkdir(exist_ok=True)
        self.environment = fair_environment(ARGOSY_HOME=str(self.home))
        self._clients: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            end_process(client)
        self.down()

    def command(self, *arguments: str, timeout_seconds: float = 60.0, check: bool = True) -> str:
        """Run one argosy command to its end and return what it printed."""
        done = subprocess.run(
            [str(ARGOSY), *arguments],
            check=False,
            env=self.environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
        if check and done.returncode != 0:
            raise SideFailed(
                f"argosy {' '.join(arguments)} exited {done.returncode}: {done.stderr.strip()[-2000:]}"
            )
        return done.stdout

    def start(self, *arguments: str, out: Path | None = None) -> subprocess.Popen[bytes]:
        """Start an argosy command and leave it running; BENCH_DIR is `out` for the program."""
        environment = self.environment | ({"BENCH_DIR": str(out)} if out else {})
        log = (self.directory / "clients.log").open("ab")
        with log:
            client = subprocess.Popen(
                [str(ARGOSY), *arguments],
                env=environment,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._clients.append(client)
        return client

    def finish(self, client: subprocess.Popen[bytes], *, timeout_seconds: float = 60.0) -> None:
        """Wait for a client that must succeed."""
        try:
            code = client.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise SideFailed(
                f"{client.args} did not end in {timeout_seconds:g} s; {self.log_tail()}"
            )
        self._clients.remove(client)
        if code != 0:
            raise SideFailed(f"{client.args} exited {code}; {self.log_tail()}")

    def forget(self, client: subprocess.Popen[bytes]) -> None:
        """End a client whose run has been stopped already."""
        end_process(client)
        self._clients.remove(client)

    def log_tail(self) -> str:
        log = self.directory / "clients.log"
        return log.read_text(errors="replace")[-1500:] if log.exists() else ""

    def up(self) -> None:
        self.command("up")

    def down(self) -> None:
        """End the cluster with everything in it, and wait until its three processes are gone."""
        pids = self._pids_from_disk()
        self.command("down", "--force", check=False)
        wait_until(
            "argosy down", lambda: not any(is_alive(pid) for pid in pids), timeout_seconds=30.0
        )

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.command("status", "--json"))
        return value

    def pids(self) -> dict[str, int]:
        """Pids of keeper, controller and agent."""
        return {name: int(pid) for name, pid in self.status()["pids"].items()}

    def _pids_from_disk(self) -> list[int]:
        try:
            return list(self.pids().values())
        except (SideFailed, KeyError, ValueError, subprocess.TimeoutExpired):
            return []

    def get(self, path: str, *, timeout_seconds: float = 10.0) -> Any:
        connection = self._connect(timeout_seconds)
        try:
            connection.request("GET", path, headers=self._headers())
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise SideFailed(f"GET {path}: {answer.status} {body[:300]!r}")
        return json.loads(body)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        connection = self._connect(60.0)
        try:
            headers = self._headers() | {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise SideFailed(f"POST {path}: {answer.status} {data[:300]!r}")
        return json.loads(data)

    def stream_events(self, after: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (monotonic_ns of arrival, event) for each durable event; ends with the connection."""
        connection = self._connect(None)
        connection.request("GET", f"/v1/events?follow=1&after={after}", headers=self._headers())
        answer = connection.getresponse()
        for line in answer:
            if line.startswith(b"data:"):
                yield time.monotonic_ns(), json.loads(line[5:])

    def processes(self) -> list[dict[str, Any]]:
        """All processes of all runs that have not ended."""
        runs = self.get("/v1/runs?all=0&limit=10000")["runs"]
        return [p for run in runs for role in run["roles"] for p in role["processes"]]

    def submit(self, spec: dict[str, Any], **environment: str) -> list[str]:
        """Submit a spec as the command line would; return the ids of its runs."""
        answer = self.post(
            "/v1/runs",
            {
                "spec": spec,
                "env": self.environment | environment,
                "cwd": str(self.directory),
                "python": str(PYTHON),
                "affinity": sorted(os.sched_getaffinity(0)),
            },
        )
        return [run["run"] for run in answer["runs"]]

    def _files(self) -> Path:
        found = sorted(self.home.glob("clusters/*/http.json"))
        if not found:
            raise SideFailed(f"no cluster in {self.home}")
        return found[0].parent

    def _connect(self, timeout_seconds: float | None) -> http.client.HTTPConnection:
        try:
            port = json.loads((self._files() / "http.json").read_text())["port"]
        except (OSError, ValueError) as failure:
            raise SideFailed(f"http.json: {failure}")
        return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {(self._files() / 'token').read_text().strip()}"}


def is_alive(pid: int) -> bool:
    """A zombie counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, kill."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
