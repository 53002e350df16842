"""Shapes: what each verb prints with --json, for docs/reference/cli.md.

Text only, used by `python -m argosy.cli.help`; a test holds that no verb with --json is missing and that the fields are those of the API.
"""

from __future__ import annotations

RUN_FIELDS = (
    "run", "name", "state", "outcome", "exit_code", "reason", "first_cause", "waiting", "submitted_at", "started_at", "ended_at",
    "directory", "service", "helps", "roles",
)  # fmt: skip
PROCESS_FIELDS = (
    "run", "role", "index", "rank", "host", "attempt", "number", "state", "waiting", "pid", "how", "started_at", "ready",
    "restarts", "code", "signal", "ports", "stdout", "stderr", "tty",
)  # fmt: skip

SHAPES = {
    "run": "a *run* as it ended; with `--detach`, `--service` or an array `{runs: [{run, name}]}`",
    "up": "as `status`, and `is_new`",
    "down": "`{running: false, said, runs: [{run, name, outcome, reason, saved}]}`; `runs`: those that ended with it",
    "status": "`{running: true, version, cluster, home, keeper, pids, hosts, runs, uptime_seconds, http_port, trouble}`, or `{running: false, home}`",
    "ps": "`{runs: [run]}`",
    "tree": "`{status, runs: [run], descendants: {PID: [pid]}}`",
    "logs": "`{lines: [line]}`; with `-f` each *line* is an object of its own, one per line: `{at, role, index, rank, number, stream, text, partial, end, dropped}`",
    "events": "`{events: [event]}`; with `-f` each *event* is an object of its own, one per line: `{seq, at, fact: {kind, …}, source}`",
    "stop": "the *run*, and `saved` if it has ended; with `--all` `{runs: [run]}`",
    "kill": "the *run*, and `saved` if it has ended",
    "scale": "`{run, command, outcome, role, generation, count}`; `outcome`: `ok`, or `accepted` with `--no-wait`",
    "fault": "`{run, faults: [fact]}`",
    "stacks": "`{stacks: [{role, index, rank, attempt, pid, state, source, threads}]}`",
    "why": "`{run, name, state, outcome, exit_code, reason, first_cause, incidents}`; `first_cause` is one of the *incidents*, or null",
    "queue": "`{queue: [{run, name, share, priority, cpus, why, …}]}`",
    "queue ls": "as `queue`",
    "queue add": "`{runs: [{run, name}]}`",
    "queue cancel": "`{runs: [{run, name, command}]}`",
    "data pack": "`{out, tokens, documents, dtype, tokenizer, sha256, seconds, …}`",
    "data show": "`{file, tokens, dtype, bytes, documents, tokenizer, …}`",
    "checkpoint ls": "`{store, checkpoints: [{step, saved_at, bytes, own_bytes, metrics, pinned, fault}]}`; `pinned`: why, or null; with `--peers` also `silent`, the hosts that did not answer",
    "checkpoint show": "`{path, step, run, saved_at, parent, world, metrics, tensors, bytes, signed, files, …}`; `tensors` is a number, with `--tensors` a list",
    "checkpoint verify": "`{store, checkpoints: [{step, faults, bytes_read, is_good, is_unreadable}]}`",
    "checkpoint diff": "`{first, second, is_equal, changed, unchanged, only_first, only_second, reshaped, stuck}`",
    "checkpoint export": "`{step, out, form, bytes}`",
    "checkpoint import": "`{step, form, tensors, bytes, …}`",
    "checkpoint push": "`{url, checkpoints: [{step, is_new, sent_bytes, …}]}`",
    "checkpoint pull": "`{step, path, bytes}`",
    "checkpoint pin": "`{step, pinned}`",
    "checkpoint gc": "`{dry, removed, leftovers, idle_pins, freed_bytes, verified, damaged}`",
    "doctor": "`{checks: [{name, state, detail, mend}], broken, warnings}`; `mend` only where there is something to do; with `--transfer` the routes",
    "demo": "`{ok, checks: {WHAT: bool}, seconds, run, digest, …}`",
    "version": "`{version, python, executable}`",
}  # fmt: skip


def describe_shapes() -> list[str]:
    """The lines of the document."""
    return [
        "## JSON",
        "",
        "One object, except where `-f` follows something: then one object per line. Times are seconds since 1970. What does not apply is null, or an empty text",
        "where the field is one (`reason`, `waiting`, `outcome`). Further fields may come; those named here stay.",
        "",
        f"- a *run*: `{', '.join(RUN_FIELDS)}`. `state` is queued, starting, running, stopping or ended; `outcome` succeeded, failed, stopped or cancelled; `first_cause` the attempt by which it ended (its id), or null.",
        f"- `roles`: `[{{role, gang, generation, count, processes}}]`; a process: `{', '.join(PROCESS_FIELDS)}`.",
        "- `saved`: `{step, path, command}`, the newest checkpoint and what goes on with it, or null.",
        "- an *incident* of `why`: `{sentence, cause, failed_after, stopped, then, error, evidence, log, last_lines}`; `cause` and those in `failed_after` and `stopped`: `{attempt, role, index, rank, number, generation, host, pid, code, signal, at, how}`. In order of time.",
        "",
        "| verb | prints |",
        "|---|---|",
        *(f"| `{verb}` | {shape} |" for verb, shape in SHAPES.items()),
        "",
    ]
