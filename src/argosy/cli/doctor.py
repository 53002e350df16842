"""`argosy doctor`: is this machine fit to train, and what to do where it is not.

Runs the checks of control/hostchecks.py and control/torchchecks.py one after the other, shows each as it is done, and exits 0 when nothing
is broken. Needs no running cluster and changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from argosy.control.hostchecks import Check, host_checks
from argosy.control.torchchecks import torch_checks
from argosy.errors import ConfigError

USAGE = """\
argosy doctor [--json]

Is this machine fit to train: interpreter, torch, CPU instructions, memory, disk, limits, clock, home, containment,
stacks, name lookup. Each line is ok, a warning (works, but worse than it could) or broken, with the mend below it.

  --json    one JSON object: {"checks": [{"name", "state", "detail", "mend"}], "broken": N, "warnings": N}

Exits 0 when nothing is broken, else 1. Needs no running cluster.
"""

_COLOURS = {"ok": "\033[32m", "warning": "\033[33m", "broken": "\033[31m"}


def main(argv: list[str]) -> int:
    """Carry out the command; the result is its exit code."""
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(USAGE)
        return 0
    unknown = [word for word in argv if word != "--json"]
    if unknown:
        raise ConfigError(f"doctor does not take {unknown[0]!r}", fix="argosy doctor [--json]")
    is_json = bool(argv)
    checks = run_checks([*torch_checks(), *host_checks()], show=None if is_json else show)
    num_broken = sum(check.state == "broken" for check in checks)
    num_warnings = sum(check.state == "warning" for check in checks)
    if is_json:
        report = {"checks": checks, "broken": num_broken, "warnings": num_warnings}
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        sys.stdout.write(summary(num_broken, num_warnings))
    return 1 if num_broken else 0


def run_checks(
    checks: list[tuple[str, Callable[[], Check]]], *, show: Callable[[Check], None] | None
) -> list[Check]:
    """Run them in order. A check that fails in a way nobody foresaw is itself a finding, not the end."""
    found = []
    for name, check in checks:
        announce(name)
        try:
            result = check()
        # A host may be broken in any way: the other lines are still worth having.
        except (OSError, ValueError, RuntimeError) as failure:
            result = Check(
                name=name,
                state="warning",
                detail=f"could not be checked: {type(failure).__name__}: {failure}",
                mend="report this line",
            )
        announce("")
        found.append(result)
        if show is not None:
            show(result)
    return found


def announce(name: str) -> None:
    """Say on a terminal what is being looked at; erased when it is known."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{f'looking at {name} …' if name else ''}")
        sys.stderr.flush()


def show(check: Check) -> None:
    """One line for a person, and the mend below."""
    colour, plain = (_COLOURS[check.state], "\033[0m") if sys.stdout.isatty() else ("", "")
    sys.stdout.write(f"{colour}{check.state:8}{plain} {check.name:17} {check.detail}\n")
    if check.mend:
        sys.stdout.write(f"{'':8} {'':17} mend: {check.mend}\n")
    sys.stdout.flush()


def summary(num_broken: int, num_warnings: int) -> str:
    """The last line."""
    if num_broken:
        return f"\n{num_broken} broken, {num_warnings} warnings: mend what is broken first.\n"
    if num_warnings:
        return f"\nfit to train, {num_warnings} warnings.\n"
    return "\nfit to train.\n"
