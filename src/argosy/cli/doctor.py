"""`argosy doctor`: is this machine fit to train, and what to do where it is not.

Runs the checks of control/hostchecks.py and control/torchchecks.py one after the other, shows each as it is done, and exits 0 when nothing
is broken; with `--transfer` shows the routes of control/transferchecks.py. Needs no running cluster and changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from argosy.cli.arguments import Arguments
from argosy.control.hostchecks import Check, host_checks
from argosy.control.torchchecks import torch_checks
from argosy.control.transferchecks import Pair, Routes, probe_routes
from argosy.errors import ConfigError

_COLOURS = {"ok": "\033[32m", "warning": "\033[33m", "broken": "\033[31m"}


def main(arguments: Arguments) -> int:
    """Carry out the command; the result is its exit code."""
    is_json = bool(arguments.get("json"))
    if arguments.get("transfer"):
        return show_routes(_num_processes(arguments.get("ranks", 4)), is_json=is_json)
    if "ranks" in arguments.options:
        raise ConfigError("-n is for --transfer", fix="argosy doctor --transfer -n 3")
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


def show_routes(num_processes: int, *, is_json: bool) -> int:
    """`--transfer`: the route of each pair of processes."""
    announce(f"{num_processes} processes and their routes")
    routes = probe_routes(num_processes)
    announce("")
    if is_json:
        sys.stdout.write(msgspec.json.encode(routes).decode() + "\n")
    else:
        sys.stdout.write(route_table(routes))
    return 1 if routes.is_broken else 0


def _num_processes(count: int) -> int:
    if not 2 <= count <= 16:
        raise ConfigError(f"routes between {count} processes", fix="say -n with 2 to 16")
    return count


def route_table(routes: Routes) -> str:
    """For a person: a line for each pair, the reasons once each, and what failed."""
    lines = [f"kernels: {routes.kernels}", ""]
    head = f"{'pair':8} {'route':14} {'GB/s':>7} {'µs':>8}   {'Gloo GB/s':>9} {'µs':>8}   peer's memory"
    lines.append(head)
    lines += [_route_line(pair) for pair in routes.pairs]
    reasons: dict[str, list[str]] = {}
    for pair in routes.pairs:
        label = f"{pair.first}-{pair.second}"
        reasons.setdefault(f"{pair.route}: {pair.why}", []).append(label)
        if pair.process_vm_readv_why:
            why = f"no reading of a peer's memory: {pair.process_vm_readv_why}"
            reasons.setdefault(why, []).append(label)
        if pair.gloo_why:
            reasons.setdefault(f"no Gloo: {pair.gloo_why}", []).append(label)
    lines.append("")
    for reason, pairs in reasons.items():
        lines.append(
            f"{reason} ({'all pairs' if len(pairs) == len(routes.pairs) else ', '.join(pairs)})"
        )
    lines += [f"process {failure.rank} failed: {failure.why}" for failure in routes.failed]
    return "\n".join(lines) + "\n"


def _route_line(pair: Pair) -> str:
    label = f"{pair.first}-{pair.second}"
    numbers = [
        "-" if value is None else f"{value:.1f}"
        for value in (
            pair.copy_gb_per_second,
            pair.latency_us,
            pair.gloo_gb_per_second,
            pair.gloo_latency_us,
        )
    ]
    memory = "readable" if pair.process_vm_readv else "no"
    return (
        f"{label:8} {pair.route:14} {numbers[0]:>7} {numbers[1]:>8}   "
        f"{numbers[2]:>9} {numbers[3]:>8}   {memory}"
    )
