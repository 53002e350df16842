"""Faults on purpose: what may be broken, who is told, and random ones as a pure function of a seed.

Used by the coordinator for `argosy fault`, by the fold for what outlives a process, and by the command line to draw. Breaking
itself is done elsewhere: by the rank that was told, or through the keeper (injection.py).
"""

from __future__ import annotations

from random import Random
from typing import Annotated, Any

import msgspec

from argosy.control.attempts import Attempt, Role
from argosy.errors import ConfigError, NotFoundError
from argosy.protocol.facts import FaultInjected, FaultKind, FaultPoint

PARTS = ("keeper", "agent", "controller", "zygote")
POINTS = ("lane", "publish", "vote", "update", "flip", "refresh")
KINDS: tuple[FaultKind, ...] = ("kill", "stop", "slow", "nan", "raise")
DRAWN: tuple[FaultKind, ...] = ("kill", "stop", "slow")
"""Random faults unless others are asked for: those that no run should notice in its result."""
SLOW_SECONDS = (0.2, 2.0)
_DEADLY = ("kill", "stop", "raise")


class FaultOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault as a client asks for it."""

    fault: FaultKind
    part: str = ""
    """keeper, agent, controller or zygote; empty: a rank."""
    role: str | None = None
    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    step: Annotated[int, msgspec.Meta(ge=0)] | None = None
    from_now: bool = False
    """Whether the step is counted from the one that the run is at."""
    point: FaultPoint = ""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


def draw_faults(
    seed: int,
    count: int,
    world_size: int,
    between: tuple[int, int],
    kinds: tuple[FaultKind, ...] = DRAWN,
) -> list[FaultOrder]:
    """So many faults at random steps, ranks and points, in order of their steps; the same for the same arguments."""
    random = Random(f"argosy fault {seed}")
    first, last = between
    drawn = []
    for _ in range(count):
        fault = random.choice(kinds)
        drawn.append(
            FaultOrder(
                fault=fault,
                rank=random.randrange(world_size),
                step=random.randint(first, last),
                point=random.choice(POINTS),  # type: ignore[arg-type]
                seconds=round(random.uniform(*SLOW_SECONDS), 3) if fault == "slow" else 0.0,
            )
        )
    return sorted(drawn, key=lambda order: order.step or 0)


def left_over(faults: list[FaultInjected]) -> list[FaultInjected]:
    """What of its faults a process that has ended did not come to, for sure: those after the first that was to end it."""
    ends = [fault.step for fault in faults if fault.fault in _DEADLY and fault.step is not None]
    first = min(ends, default=None)
    if first is None:
        return []
    return [fault for fault in faults if fault.step is not None and fault.step > first]


def check_order(order: FaultOrder) -> None:
    """Raise ConfigError for a fault that makes no sense whatever the run is."""
    if order.part:
        if order.part not in PARTS:
            raise ConfigError(
                f"there is no part {order.part!r} of the runtime", fix=f"use {', '.join(PARTS)}"
            )
        if order.fault != "kill" or order.step is not None or order.rank is not None:
            raise ConfigError(
                f"the {order.part} can only be killed, and at once", fix=f"--kill {order.part}"
            )
    elif order.rank is None:
        raise ConfigError("the fault names no rank", fix="--kill rank=2")
    if order.fault == "slow" and not order.seconds:
        raise ConfigError("how slow is not said", fix="--slow rank=2 --seconds 1.5")
    if order.seconds and order.fault != "slow":
        raise ConfigError(f"seconds mean nothing for {order.fault}", fix="leave --seconds out")
    if order.point and order.step is None:
        raise ConfigError(
            f"the point {order.point} of which step?", fix="say --at-step too, or leave --point out"
        )


def settle_steps(orders: list[FaultOrder], presents: dict[str | None, int]) -> list[FaultOrder]:
    """The orders with the steps that are meant, where the gangs that they name are at these.

    Raise ConfigError for a fault at a step that is over: the rank would break at once, and not where it was asked to.
    """
    return [_settle(order, presents.get(order.role, 0)) for order in orders]


def _settle(order: FaultOrder, present: int) -> FaultOrder:
    if order.step is not None and order.from_now:
        return msgspec.structs.replace(order, step=present + order.step, from_now=False)
    if order.step is not None and order.step < present:
        raise ConfigError(
            f"step {order.step} is over: the run is at step {present}",
            fix=f"name a step after {present} (--at-step, --between), or none: at once",
        )
    return order


def choose_role(roles: dict[str, Role], name: str | None) -> Role:
    """The gang that is meant; without a name the only one there is."""
    gangs = {role.name: role for role in roles.values() if role.spec.gang}
    if name is not None:
        if name not in roles:
            raise NotFoundError(f"there is no role {name!r}", fix=f"its roles: {', '.join(roles)}")
        return roles[name]
    if len(gangs) == 1:
        return next(iter(gangs.values()))
    if not gangs:
        raise ConfigError("the run has no gang", fix="start it with `argosy run -n RANKS`")
    raise ConfigError("the run has several gangs", fix=f"name one: RUN/{next(iter(gangs))}")


def victim_of(role: Role, order: FaultOrder) -> Attempt:
    """The process that has the rank now; ConfigError or NotFoundError when it cannot be broken so."""
    rank = order.rank or 0
    if not role.spec.gang:
        raise ConfigError(f"{role.name} is not a gang: it has no ranks", fix="use `argosy kill`")
    attempt = role.processes[role.members[rank]].alive if rank < len(role.members) else None
    if attempt is None or attempt.started_at is None or attempt.stopping:
        size = len(role.members)
        fix = f"ranks 0 to {size - 1} are there" if rank >= size else "try again in a moment"
        raise NotFoundError(f"{role.name} has no live rank {rank}", fix=fix)
    needs_telling = order.step is not None or order.fault not in ("kill", "stop")
    if needs_telling and attempt.joined is None:
        raise ConfigError(
            f"rank {rank} of {role.name} has not joined: it cannot be told of a fault",
            fix="try again when its trainer has begun; a program without a trainer or `argosy.join()` "
            "takes only --kill and --stop, without --at-step",
        )
    return attempt


def fault_of(run: str, number: int, order: FaultOrder, victim: Attempt | None) -> FaultInjected:
    """The fact of it."""
    return FaultInjected(
        run=run,
        number=number,
        fault=order.fault,
        part=order.part,
        attempt=victim.id if victim is not None else "",
        role=victim.role if victim is not None else "",
        rank=victim.rank if victim is not None else None,
        step=order.step,
        point=order.point,
        seconds=order.seconds,
    )


def message_of(fault: FaultInjected) -> dict[str, Any]:
    """What the rank is told."""
    return {
        "tell": "fault",
        "kind": fault.fault,
        "step": fault.step,
        "point": fault.point or None,
        "seconds": fault.seconds,
        "number": fault.number,
    }
