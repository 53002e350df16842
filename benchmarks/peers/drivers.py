"""The peers as seen from the benchmark: torchrun as a command, Ray and Monarch as drivers that wait for requests.

A driver is connected to its running cluster before the clock starts, so a peer's own imports and connection are never
counted against it; our side is charged with the whole command.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import PYTHON, ROOT, SideFailed, fair_environment
from benchmarks.ours import end_process

HERE = Path(__file__).resolve().parent


def start_torchrun(
    ranks: int,
    program: Path,
    out: Path,
    *,
    restarts: int = 0,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `torchrun` on this host: statically for a launch, its quickest form; with its own rendezvous for restarts,
    for the static one gives a restarted gang the addresses of the dead one.
    """
    where = (
        ["--standalone"]
        if restarts
        else ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    )
    log = (out / "torchrun.log").open("ab")
    with log:
        return subprocess.Popen(
            [
                str(PYTHON.parent / "torchrun"),
                f"--nproc-per-node={ranks}",
                f"--max-restarts={restarts}",
                *where,
                str(program),
            ],
            env=fair_environment(BENCH_DIR=str(out), **(environment or {})),
            cwd=out,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finish_torchrun(process: subprocess.Popen[bytes], out: Path) -> None:
    code = process.wait(120)
    if code != 0:
        raise SideFailed(f"torchrun exited {code}: {(out / 'torchrun.log').read_text()[-1500:]}")


class Driver:
    """A peer's driver process; `ask` sends one request line and waits for its answer."""

    def __init__(self, name: str, directory: Path, *, environment: str = "") -> None:
        """Start `NAME_driver.py` in `.peers/ENVIRONMENT`, which is the driver's own name unless several share one."""
        self.name = name
        self.version = ""
        self._directory = directory
        python = ROOT / ".peers" / (environment or name) / "bin" / "python"
        if not python.exists():
            raise SideFailed(f"{name} is not installed: run `make peers`")
        with (directory / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(python), str(HERE / f"{name}_driver.py")],
                env=fair_environment(RAY_DISABLE_IMPORT_WARNING="1", RAY_USAGE_STATS_ENABLED="0"),
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._buffer = b""
        self.version = str(self._wait_answer(180.0)["version"])

    def ask(self, request: str, *, timeout_seconds: float = 300.0) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideFailed(f"{self.name} died: {self._log_tail()}")
        return self._wait_answer(timeout_seconds)

    def launch(self, ranks: int) -> float:
        """Seconds from the first call to the last rank's all-reduce, its sums checked."""
        answer = self.ask(f"launch {ranks}")
        expected = ranks * (ranks + 1) / 2
        if answer["totals"] != [expected] * ranks:
            raise SideFailed(f"{self.name}: sums {answer['totals']}, each must be {expected}")
        return float(answer["seconds"])

    def close(self) -> None:
        """End of stdin ends the driver and, with it, what it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)
            end_process(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _wait_answer(self, timeout_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line.startswith(b"@"):
                    answer: dict[str, Any] = json.loads(line[1:])
                    return answer
                continue
            self._read_more(deadline - time.monotonic())

    def _read_more(self, seconds: float) -> None:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, seconds))
        data = self._process.stdout.read1(65536) if readable else b""  # type: ignore[attr-defined]
        if not data:
            raise SideFailed(
                f"{self.name} gave no answer ({'late' if not readable else 'it ended'}): {self._log_tail()}"
            )
        self._buffer += data

    def _log_tail(self) -> str:
        return (self._directory / f"{self.name}.log").read_text(errors="replace")[-1500:]
