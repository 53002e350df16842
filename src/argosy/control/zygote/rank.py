"""A forked rank from its fork to its first line: descriptors, limits, signals, parent, gate; then the program.

Called once, at the top of the stack, in a process that the intermediate forked. Everything that does not depend on the gate is
done before it, while the keeper still records the pid. It installs no Python signal handler: one in a rank that is blocked in
a collective would never run and would eat the grace period.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import resource
import signal
import sys
import termios
import time
from typing import Any, NoReturn

from argosy.control.zygote import kernel, libraries, program, shutdown, stdio, storehost
from argosy.control.zygote.assignment import Assignment

STACKS_SIGNAL = signal.SIGRTMIN + 8
"""A rank that gets this signal writes the Python stacks of all its threads to its stderr and goes on."""


def become(assignment: Assignment) -> NoReturn:
    """Turn this process into the attempt and run it to its end."""
    _arrange_descriptors(assignment)
    _reset_signals(assignment.touched_signals)
    failure = ""
    try:
        _apply_limits(assignment)
    except (OSError, ValueError, OverflowError) as error:
        # An affinity without a CPU, say. Told after the gate, when the keeper knows this process.
        failure = f"argosy: the process cannot be set up: {error}\n"
    stdio.rebuild()
    libraries.reseed()
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)
    assignment.surroundings.memory.write_mark(assignment.mark)
    if not _wait_parent_gone(assignment):
        os._exit(1)
    kernel.allow_tracing_by(assignment.keeper)
    additions = _wait_gate(assignment.gate)
    if assignment.program is None:
        storehost.serve(assignment.listener)
    if failure:
        sys.stderr.write(failure)
        shutdown.finish(shutdown.Outcome(code=126))
    _settle(assignment, additions)
    shutdown.finish(program.run(assignment.program, assignment.surroundings, assignment.error_file))


def _arrange_descriptors(assignment: Assignment) -> None:
    """Stdio to 0, 1, 2, secrets to 3 and up; close everything else that the zygote had open."""
    first_free = 3 + len(assignment.secrets)

    def move_up(descriptor: int) -> int:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, first_free + 8)

    kept = [assignment.gate, assignment.parent_gone]
    if assignment.listener is not None:
        kept.append(assignment.listener)
    kept = [move_up(descriptor) for descriptor in kept]
    secrets = {name: move_up(number) for name, number in assignment.secrets.items()}
    stdin = assignment.stdout if assignment.is_tty else os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((stdin, assignment.stdout, assignment.stderr)):
        os.dup2(source, target)
    for target, (name, source) in enumerate(secrets.items(), start=3):
        os.dup2(source, target)
        assignment.secrets[name] = target
    start = first_free
    for descriptor in sorted(kept):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assignment.gate, assignment.parent_gone = kept[:2]
    assignment.listener = kept[2] if len(kept) > 2 else None


def _reset_signals(touched: tuple[int, ...]) -> None:
    """Handlers as in a fresh interpreter, and nothing blocked."""
    for number in touched:
        signal.signal(number, signal.SIG_DFL)
    if touched:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _apply_limits(assignment: Assignment) -> None:
    os.setsid()
    if assignment.is_tty:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.umask(assignment.umask)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    _set_nice(assignment.nice)
    if assignment.affinity:
        os.sched_setaffinity(0, assignment.affinity)
    if assignment.oom_score_adj is not None:
        _write_oom_score(assignment.oom_score_adj)
    for name, limit in assignment.limits.items():
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is not None:
            _set_limit(number, limit[0], limit[1])


def _set_nice(level: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, level)
    except PermissionError:
        # Lowering it is a privilege. That the cluster was started at a higher level than 0 is no news to whoever did it.
        if level:
            stays = os.getpriority(os.PRIO_PROCESS, 0)
            text = f"argosy: nice level {level} is not allowed here, it stays {stays}\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())


def _write_oom_score(score: int) -> None:
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except PermissionError:
        pass  # lowering it is a privilege; the rank is none the worse for the inherited one


def _set_limit(number: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(number, (soft, hard))
    except (ValueError, PermissionError):
        # Only a privileged keeper can give back a higher hard limit than it has itself.
        _, most = resource.getrlimit(number)
        wanted = most if soft == resource.RLIM_INFINITY else min(soft, most)
        resource.setrlimit(number, (soft if most == resource.RLIM_INFINITY else wanted, most))


def _wait_parent_gone(assignment: Assignment) -> bool:
    """Wait for the intermediate to exit and the keeper to become the parent."""
    os.read(assignment.parent_gone, 1)
    os.close(assignment.parent_gone)
    return kernel.wait_adopted(assignment.keeper)


def _wait_gate(gate: int) -> dict[str, str]:
    """Wait until the keeper opens the gate; the variables that it adds. A gate that closes unopened ends this process."""
    data = bytearray()
    while chunk := os.read(gate, 65536):
        data += chunk
    os.close(gate)
    if data[:1] != b"g":
        os._exit(0)
    added: Any = json.loads(data[1:] or b"{}")
    return dict(added.get("env") or {})


def _settle(assignment: Assignment, additions: dict[str, str]) -> None:
    """Environment, directory and what preloaded libraries derived from the zygote's."""
    environment = {**assignment.environment, **additions}
    for name, descriptor in assignment.secrets.items():
        environment[f"ARGOSY_SECRET_{name.upper()}_FD"] = str(descriptor)
    if assignment.surroundings.coerced_locale:
        environment.setdefault("LC_CTYPE", assignment.surroundings.coerced_locale)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    time.tzset()
    try:
        os.chdir(assignment.cwd)
    except OSError as error:
        sys.stderr.write(f"argosy: cannot enter the working directory: {error}\n")
        shutdown.finish(shutdown.Outcome(code=126))
    libraries.follow_environment()
    assignment.libraries.set_threads(assignment.threads, assignment.surroundings.affinity)
