"""Workload: random runs for the simulator; roles, gangs, spares, services, queues, dependencies, strategies.

The first word of a role's command says what its processes do: `task` ends by itself, `server` runs until it is stopped,
`rank` is a plain gang member, `joiner` one that can re-form in place.
"""

from __future__ import annotations

from random import Random

from argosy.config.spec import Backoff, Budget, Probe, RoleSpec, RunSpec

_BACKOFF = Backoff(first_seconds=0.05, most_seconds=2.0)


def random_run(random: Random, number: int) -> RunSpec:
    """One run."""
    kind = random.random()
    name = f"run{number}"
    if kind < 0.45:
        roles = {"train": _gang(random)}
        if random.random() < 0.3:
            roles["db"] = _server(random)
    elif kind < 0.7:
        roles = _pipeline(random)
    elif kind < 0.95:
        roles = {"task": _tasks(random)}
    else:
        roles = _service(random)
    is_queued = random.random() < 0.3
    return RunSpec(
        name=name,
        roles=roles,
        strategy=random.choice(["one_for_one", "one_for_one", "one_for_all", "rest_for_one"]),
        priority=random.randrange(3),
        share=random.choice(["", "alice", "bob"]),
        array=random.choice([0, 0, 0, 0, 3, 3, 6, 30]) if is_queued else 0,
        queued=is_queued,
        service=kind >= 0.95,
    )


def _gang(random: Random) -> RoleSpec:
    count = random.choice([1, 2, 4, 8])
    return RoleSpec(
        command=[random.choice(["rank", "joiner"])],
        gang=True,
        count=count,
        min=random.randint(1, count),
        spares=random.choice([0, 0, 1, 2]),
        budget=Budget(user=random.randrange(4), host=10, no_progress=random.choice([0, 3])),
        backoff=_BACKOFF,
        grace_seconds=0.5,
        hang_seconds=random.choice([0.0, 3.0]),
        cpu_request=random.choice([0.0, 1.0, 4.0]),
    )


def _tasks(random: Random) -> RoleSpec:
    return RoleSpec(
        command=["task"],
        count=random.choice([1, 2, 5]),
        restart=random.choice(["temporary", "transient", "transient"]),
        budget=Budget(user=random.randrange(6), host=10),
        backoff=_BACKOFF,
        grace_seconds=0.5,
        cpu_request=random.choice([0.0, 0.5, 2.0, 4.0]),
        ports={"http": 0} if random.random() < 0.2 else {},
    )


def _server(random: Random) -> RoleSpec:
    has_probe = random.random() < 0.5
    return RoleSpec(
        command=["server"],
        restart="permanent",
        budget=Budget(user=5, host=10),
        backoff=_BACKOFF,
        grace_seconds=0.5,
        ports={"http": 0},
        ready=Probe(port="http") if has_probe else None,
    )


def _service(random: Random) -> dict[str, RoleSpec]:
    """It says nothing of restarts, so what ends is started again until somebody stops it; beside it there may be what runs once."""
    is_gang = random.random() < 0.5
    role = RoleSpec(
        command=[random.choice(["rank", "joiner"] if is_gang else ["task", "server"])],
        gang=is_gang,
        count=random.choice([1, 2, 4]),
        backoff=_BACKOFF,
        grace_seconds=0.5,
    )
    once = RoleSpec(command=["task"], restart="transient", backoff=_BACKOFF, grace_seconds=0.5)
    return {"serve": role, "once": once} if random.random() < 0.3 else {"serve": role}


def _pipeline(random: Random) -> dict[str, RoleSpec]:
    db = _server(random)
    work = _tasks(random)
    work = RoleSpec(
        command=work.command,
        count=work.count,
        restart=work.restart,
        budget=work.budget,
        backoff=_BACKOFF,
        grace_seconds=0.5,
        after_ready=["db"],
    )
    last = RoleSpec(command=["task"], after=["work"], restart="transient", backoff=_BACKOFF)
    return {"last": last, "db": db, "work": work}
