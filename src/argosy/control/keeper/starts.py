"""How an attempt begins: a batch is checked whole, then forked from a warm parent or started by exec.

Idempotent by attempt id: what is known is not started twice. Every failure after the check is a clean `exited` event
with its reason, never an exception in the caller.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable
from typing import Any

from argosy.control.keeper.arenas import ArenaError
from argosy.control.keeper.attempts import (
    Attempt,
    OrderError,
    close_fd,
    command_line,
    make_attempt,
)
from argosy.control.keeper.census import look_at
from argosy.control.keeper.children import Errand, open_child, read_report, start_child
from argosy.control.keeper.environment import (
    build_affinity,
    build_environment,
    build_limits,
    open_log,
    secret_names,
)
from argosy.control.keeper.exits import Exits
from argosy.control.keeper.frames import MOST_DESCRIPTORS, Message
from argosy.control.keeper.kernel import reopen
from argosy.control.keeper.loop import READ
from argosy.control.keeper.ports import PortError
from argosy.control.keeper.state import Keeper
from argosy.control.keeper.stores import Store, Stores
from argosy.control.keeper.terminals import Terminal
from argosy.control.keeper.zygotes import RANK_OOM_SCORE, Zygote, Zygotes, check_spec

_MOST_PER_FORK = 64
_MOST_EXECS_AT_ONCE = 8
_MOST_GATE_BYTES = 60_000


class Starts:
    """Starts batches."""

    def __init__(self, keeper: Keeper, exits: Exits, zygotes: Zygotes, stores: Stores) -> None:
        self.keeper = keeper
        self.exits = exits
        self.zygotes = zygotes
        self.stores = stores

    def spawn(self, batch: Any, reply: Callable[[dict[str, Any]], None]) -> None:
        """Check everything, then start; raises OrderError, SpecError or PortError before anything is."""
        fresh = self._check(batch)
        warm = batch.get("zygote")
        store, is_new_store = self._make_store(batch)
        for attempt in fresh:
            self.keeper.enter(attempt)
        forked = [attempt for attempt in fresh if warm is not None and _can_fork(attempt)]
        started = [attempt for attempt in fresh if warm is None or not _can_fork(attempt)]
        new_store = store if is_new_store else None

        def answer() -> None:
            reply({"store": store.reply()} if store is not None else {})

        def usable(zygote: Zygote | None, why: str) -> None:
            # A newer generation may have ended this one's store while the warm parent was importing.
            has_port = new_store is not None and new_store.socket is not None
            if zygote is None:
                if new_store is not None and has_port:
                    self._hold_port(new_store)
                self._all_by_exec(forked, store, why)
            else:
                helper = [self.stores.make_helper(new_store)] if new_store and has_port else []
                self._fork_next(zygote, [*helper, *forked], store)
            self._all_by_exec(started, store, "")
            if not fresh and store is not None:
                store.when_decided(answer)
            elif not fresh:
                answer()

        # With members the port alone matters, at once; survivors who re-form must know who hosts.
        if fresh:
            answer()
        if warm is not None and (forked or new_store is not None):
            # A gang that re-forms goes on with the code that it was started with.
            generation = batch.get("generation")
            is_later = isinstance(generation, int) and generation > 1
            self.zygotes.request(warm, usable, may_be_old=is_later)
        else:
            usable(None, "")

    def _check(self, batch: Any) -> list[Attempt]:
        """The attempts that are not known yet."""
        if not isinstance(batch, dict) or not isinstance(batch.get("attempts"), list):
            raise OrderError("batch.attempts is no list")
        if self.keeper.is_ending:
            raise OrderError("the keeper is shutting down")
        if batch.get("zygote") is not None:
            check_spec(batch["zygote"])
        fresh: dict[str, Attempt] = {}
        for order in batch["attempts"]:
            attempt = make_attempt(order)
            if not self.keeper.is_known(attempt.attempt):
                fresh[attempt.attempt] = attempt
        return list(fresh.values())

    def _make_store(self, batch: dict[str, Any]) -> tuple[Store | None, bool]:
        if batch.get("store") is None:
            return None, False
        for name, kind in (("run", str), ("role", str), ("generation", int)):
            if not isinstance(batch.get(name), kind):
                raise OrderError(f"batch.{name} is missing: a store belongs to a generation")
        wanted = batch["store"] if isinstance(batch["store"], dict) else {}
        return self.stores.make(
            batch["run"], batch["role"], batch["generation"], wanted.get("host")
        )

    # --- by fork ------------------------------------------------------------------------------

    def _fork_next(self, zygote: Zygote, rest: list[Attempt], store: Store | None) -> None:
        """Fork as many as one frame's descriptors allow, then the next ones."""
        rest = [attempt for attempt in rest if not self._is_cancelled(attempt)]
        batch: list[Attempt] = []
        frames: list[Message] = []
        descriptors: list[int] = []
        owned: list[int] = []
        while rest and len(batch) < _MOST_PER_FORK:
            needed = 4 + len(secret_names(rest[0]))
            if len(descriptors) + needed > MOST_DESCRIPTORS:
                break
            attempt = rest.pop(0)
            try:
                frame, fds = self._prepare_fork(attempt, store)
            except (OrderError, ArenaError, OSError) as error:
                self._give_up_helper(attempt, store)
                self.exits.fail(attempt, str(error))
                continue
            batch.append(attempt)
            frames.append(frame)
            descriptors += fds
            owned += fds
            if attempt.listener is not None:
                descriptors.append(attempt.listener.fileno())
        if not batch:
            return

        def done(pids: list[int] | None, why: str) -> None:
            if pids is None or len(pids) != len(batch):
                self._fork_refused(batch + rest, store, why or "the warm parent answered nonsense")
                return
            for attempt, pid in zip(batch, pids, strict=True):
                self._adopt(attempt, pid)
                if attempt.is_helper and store is not None:
                    attempt.listener = None
                    self.stores.handed_over(store)
            if rest:
                self._fork_next(zygote, rest, store)

        if zygote.pidfd < 0:
            done(None, "the warm parent died")
        else:
            self.zygotes.fork(zygote, frames, descriptors, done)
        for fd in owned:
            os.close(fd)

    def _prepare_fork(self, attempt: Attempt, store: Store | None) -> tuple[Message, list[int]]:
        self._contain(attempt)
        order = attempt.order
        gate, attempt.gate = os.pipe2(os.O_CLOEXEC)
        fds = [gate]
        try:
            fds += self._open_output(attempt)
            secrets = secret_names(attempt)
            for name in secrets:
                fds.append(reopen(self.keeper.blobs.descriptor(order["secret_blobs"][name])))
            variables = store.variables() if store is not None and not attempt.is_helper else {}
            frame = {
                "attempt": attempt.attempt,
                "program": order.get("program"),
                "env": build_environment(self.keeper, attempt, variables),
                "cwd": order.get("cwd") or "/",
                "umask": _umask(order),
                "limits": build_limits(self.keeper, attempt),
                "affinity": build_affinity(self.keeper, attempt),
                "nice": order.get("nice") or 0,
                "threads": order.get("threads"),
                "oom_score_adj": RANK_OOM_SCORE,
                "tty": bool(order.get("tty")),
                "error_file": order.get("error_file") or "",
                "mark": self.keeper.mark(attempt.attempt),
                "secret_names": secrets,
                "helper": {"listen": True} if attempt.is_helper else None,
            }
        except (OrderError, ArenaError, OSError):
            for fd in fds:
                os.close(fd)
            raise
        return frame, fds

    def _adopt(self, attempt: Attempt, pid: int) -> None:
        """A forked process waits at its gate: record it, put it into its group, open the gate."""
        try:
            attempt.pidfd = os.pidfd_open(pid)
        except OSError as error:
            self.exits.fail(attempt, f"it was gone before it began: {error.strerror}")
            return
        attempt.how = "fork"
        try:
            if attempt.group is not None:
                attempt.group.add(pid)
            if attempt.memory is not None and not attempt.memory.is_version_two:
                _join(attempt.memory.entry, pid)
        except ProcessLookupError:
            pass  # dead already: its exit is seen next
        except OSError as error:
            attempt.error = f"its cgroup cannot be joined: {error.strerror}"
            attempt.doom = 9
        self._begun(attempt, pid)
        if attempt.doom:
            self.exits.kill(attempt)
        elif attempt.order.get("parked"):
            attempt.state = "parked"
            self.announce(attempt)
        else:
            self.open_gate(attempt, {})
            attempt.state = "running"
            self.announce(attempt)

    def _fork_refused(self, attempts: list[Attempt], store: Store | None, why: str) -> None:
        for attempt in attempts:
            # Whoever was forked all the same finds its gate closed and exits.
            attempt.gate = close_fd(attempt.gate)
            if attempt.terminal is not None:
                attempt.terminal.finish()
                attempt.terminal = None
            if attempt.is_helper:
                self._give_up_helper(attempt, store)
                self.exits.fail(attempt, why)
        self._all_by_exec([a for a in attempts if not a.is_helper], store, why)

    def _give_up_helper(self, attempt: Attempt, store: Store | None) -> None:
        """A helper that does not come is nobody's death: rank 0 hosts, and all are told so."""
        if attempt.is_helper and store is not None:
            attempt.listener = None
            self._hold_port(store)

    def _hold_port(self, store: Store) -> None:
        try:
            self.stores.leave_to_rank_zero(store)
        except PortError as error:
            self.keeper.outbox.note(f"the store's port was lost: {error}", run=store.run)

    # --- by exec ------------------------------------------------------------------------------

    def _all_by_exec(self, attempts: list[Attempt], store: Store | None, why: str) -> None:
        """Start some, then the others after whatever else has happened meanwhile: a large batch must not make the keeper deaf."""
        for attempt in attempts[:_MOST_EXECS_AT_ONCE]:
            if not self._is_cancelled(attempt):
                self.start_by_exec(attempt, store, why)
        rest = attempts[_MOST_EXECS_AT_ONCE:]
        if rest:
            self.keeper.loop.soon(lambda: self._all_by_exec(rest, store, why))

    def start_by_exec(self, attempt: Attempt, store: Store | None, note: str) -> None:
        """Fork and exec; a failure becomes its exit."""
        attempt.how = "exec"
        attempt.note = note
        owned: list[int] = []
        try:
            self._contain(attempt)
            errand = self._make_errand(attempt, store, owned)
            pid, attempt.report = start_child(errand)
            attempt.pidfd = open_child(pid)
        except (OrderError, ArenaError) as error:
            self.exits.fail(attempt, str(error))
            return
        except OSError as error:
            self.exits.fail(attempt, f"could not be started: {error}")
            return
        finally:
            for fd in owned:
                os.close(fd)
        if attempt.group is not None and attempt.owns_group:
            attempt.group.leader = pid
        self.keeper.loop.watch(attempt.report, READ, lambda mask: self.read_report_of(attempt))
        self._begun(attempt, pid)
        if attempt.order.get("parked"):
            attempt.state = "parked"
            self.announce(attempt)

    def _make_errand(self, attempt: Attempt, store: Store | None, owned: list[int]) -> Errand:
        order = attempt.order
        variables = store.variables() if store is not None else {}
        if attempt.is_guest:
            variables = self.stores.variables_of(attempt.run, attempt.role)
        env = build_environment(self.keeper, attempt, variables)
        env.setdefault("PYTHONUNBUFFERED", "1")
        if order.get("threads") is not None:
            env.setdefault("OMP_NUM_THREADS", str(order["threads"]))
        output = self._open_output(attempt)
        owned += output
        if attempt.terminal is not None:
            descriptors = [output[0], *output]
        else:
            owned.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            descriptors = [owned[-1], *output]
        for name in secret_names(attempt):
            owned.append(reopen(self.keeper.blobs.descriptor(order["secret_blobs"][name])))
            env[f"ARGOSY_SECRET_{name.upper()}_FD"] = str(len(descriptors))
            descriptors.append(owned[-1])
        gate = -1
        if order.get("parked"):
            gate, attempt.gate = os.pipe2(os.O_CLOEXEC)
            owned.append(gate)
        entries = []
        if attempt.group is not None and attempt.group.entry is not None:
            entries.append(attempt.group.entry)
        host = self.keeper.attempts.get(attempt.host)
        memory = attempt.memory if host is None else host.memory
        if memory is not None and not memory.is_version_two:
            entries.append(memory.entry)
        return Errand(
            argv=command_line(order),
            env=env,
            cwd=order.get("cwd") or "/",
            umask=_umask(order),
            limits=build_limits(self.keeper, attempt),
            affinity=build_affinity(self.keeper, attempt),
            nice=order.get("nice") or 0,
            oom_score=RANK_OOM_SCORE,
            descriptors=descriptors,
            entries=entries,
            has_terminal=attempt.terminal is not None,
            gate=gate,
        )

    def read_report_of(self, attempt: Attempt) -> None:
        """What the child says before it becomes the program; the end of it means that it has."""
        try:
            part = os.read(attempt.report, 65536)
        except BlockingIOError:
            return
        attempt.report_text += part
        if part:
            return
        self.keeper.loop.forget(attempt.report)
        attempt.report = close_fd(attempt.report)
        notes, error = read_report(attempt.report_text)
        for note in notes:
            self.keeper.outbox.note(note, run=attempt.run, attempt=attempt.attempt)
        if error:
            attempt.error = error
            attempt.has_failed_to_start = True
        elif attempt.state == "starting":
            attempt.state = "running"
            self.announce(attempt)

    # --- both ---------------------------------------------------------------------------------

    def _is_cancelled(self, attempt: Attempt) -> bool:
        """Stopped while it waited for its warm parent."""
        if attempt.state != "starting" or not attempt.doom:
            return attempt.state == "exited"
        self.exits.fail(attempt, "it was stopped before it was started")
        return True

    def _contain(self, attempt: Attempt) -> None:
        if attempt.is_guest:
            host = self.keeper.attempts.get(attempt.host)
            if host is None or not host.is_live or not host.has_process:
                raise OrderError(f"attempt {attempt.host} is not running")
            attempt.group, attempt.owns_group = host.group, False
            return
        if attempt.group is None:
            mark = self.keeper.mark(attempt.attempt)
            attempt.group = self.keeper.containment.make_group(attempt.attempt, mark)
        limit = attempt.order.get("memory_bytes")
        if limit and attempt.memory is None:
            made = self.keeper.containment.limit_memory(attempt.group, attempt.attempt, limit)
            if isinstance(made, str):
                self.keeper.outbox.note(
                    f"its memory is not limited: {made}", run=attempt.run, attempt=attempt.attempt
                )
            else:
                attempt.memory = made

    def _open_output(self, attempt: Attempt) -> list[int]:
        """[stdout, stderr], owned by the caller; a log that cannot be opened is a note, not an end."""
        order = attempt.order
        if order.get("error_file"):
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(order["error_file"]), mode=0o700, exist_ok=True)
        if order.get("tty"):
            if attempt.terminal is None:
                log_fd = self._open_log(attempt, "stdout")
                attempt.terminal = Terminal(
                    self.keeper.loop, log_fd, lambda text: self._warn(attempt, text)
                )
            return [os.dup(attempt.terminal.slave), os.dup(attempt.terminal.slave)]
        return [self._open_log(attempt, "stdout"), self._open_log(attempt, "stderr")]

    def _open_log(self, attempt: Attempt, name: str) -> int:
        path = attempt.order.get(name) or "/dev/null"
        try:
            return open_log(path)
        except OSError as error:
            self._warn(attempt, f"its {name} is lost: {path}: {error.strerror}")
            return os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)

    def _warn(self, attempt: Attempt, text: str) -> None:
        self.keeper.outbox.note(text, run=attempt.run, attempt=attempt.attempt)

    def _begun(self, attempt: Attempt, pid: int) -> None:
        attempt.pid = pid
        attempt.started_at = time.time()
        seen = look_at(pid)
        attempt.start = seen.start if seen is not None else 0
        self.keeper.records.write_attempt(attempt.attempt, attempt.record())
        self.exits.watch(attempt)

    def announce(self, attempt: Attempt) -> None:
        """The `started` event."""
        if not attempt.is_helper:
            self.keeper.outbox.emit(
                {
                    "event": "started",
                    "attempt": attempt.attempt,
                    "run": attempt.run,
                    "pid": attempt.pid,
                    "how": attempt.how,
                    "note": attempt.note,
                    "at": attempt.started_at,
                }
            )

    def open_gate(self, attempt: Attempt, env: dict[str, str]) -> None:
        """Let a waiting process go, with these variables added."""
        data = b"g" + json.dumps({"env": env}).encode()
        if len(data) > _MOST_GATE_BYTES:
            fcntl.fcntl(attempt.gate, fcntl.F_SETPIPE_SZ, len(data) + 4096)
        os.set_blocking(attempt.gate, False)
        with contextlib.suppress(BrokenPipeError):
            os.write(attempt.gate, data)
        attempt.gate = close_fd(attempt.gate)

    def release(self, attempt: Attempt, env: dict[str, str], gang: dict[str, Any]) -> None:
        """Open a parked spare's gate; again is fine."""
        if attempt.state != "parked":
            return
        generation, rank = gang.get("generation"), gang.get("rank", env.get("RANK"))
        if isinstance(generation, int):
            attempt.generation = generation
        if rank is not None and str(rank).isdigit():
            attempt.rank = int(rank)
        attempt.state = "running"
        self.open_gate(attempt, {**self.stores.variables_of(attempt.run, attempt.role), **env})


def _umask(order: dict[str, Any]) -> int:
    mask = order.get("umask")
    return mask if isinstance(mask, int) else 0o022


def _can_fork(attempt: Attempt) -> bool:
    return attempt.order["program"]["kind"] != "exec" and not attempt.is_guest


def _join(entry: str, pid: int) -> None:
    with open(entry, "w") as file:
        file.write(str(pid))
