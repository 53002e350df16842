"""`argosy fault`: break something on purpose, now or at a step, and see what the run makes of it."""

from __future__ import annotations

import json
from typing import Any

from argosy.cli.arguments import Arguments, is_whole_number
from argosy.cli.connection import Target, connect
from argosy.errors import ConfigError

_KINDS = ("kill", "stop", "slow", "nan", "raise")
NEXT_STEPS = (1, 100)
"""Those of random faults, counted from where the run is, unless others are named."""
_ONLY_RANDOM = ("seed", "count", "between", "kinds")


def fault(arguments: Arguments) -> int:
    """Read what is to be broken, ask for it, and say what was done."""
    controller = connect()
    target, view = controller.resolve(arguments.word(), to_act=True)
    orders = read_orders(arguments, target, view)
    answer = controller.post(f"/v1/runs/{view['run']}/faults", {"faults": orders})
    if arguments.get("json"):
        print(json.dumps({"run": view["run"], **answer}))
        return 0
    from argosy.analyze.story import fault_sentence

    for fact in answer["faults"]:
        print(fault_sentence(fact))
    return 0


def read_orders(arguments: Arguments, target: Target, view: dict[str, Any]) -> list[dict[str, Any]]:
    """The faults that were typed, or drawn from a seed."""
    chosen = [kind for kind in _KINDS if kind in arguments.options]
    if arguments.get("random"):
        if chosen:
            raise ConfigError(f"--random and --{chosen[0]}", fix="leave one of them out")
        return _draw(arguments, target, view)
    if len(chosen) != 1:
        raise ConfigError(
            f"{'several faults' if chosen else 'no fault'} named",
            fix="one of --kill, --stop, --slow, --nan, --raise with rank=N; or --random",
        )
    for name in _ONLY_RANDOM:
        if name in arguments.options:
            raise ConfigError(f"--{name} is for --random", fix=f"add --random, or drop --{name}")
    order: dict[str, Any] = {"fault": chosen[0], **_victim(chosen[0], arguments.get(chosen[0]))}
    if target.index is not None:
        name = view["run"] + (f"/{target.role}" if target.role else "")
        raise ConfigError(
            "a fault names its process by rank, which is not always its index",
            fix=f"argosy fault {name} --{chosen[0]} rank=N",
        )
    if "rank" in order:
        order["role"] = target.role
    for option, key in (("at_step", "step"), ("point", "point"), ("seconds", "seconds")):
        if option in arguments.options:
            order[key] = arguments.options[option]
    _check_point(order.get("point", ""))
    return [order]


def _victim(kind: str, text: str) -> dict[str, Any]:
    from argosy.control.faults import PARTS

    if kind == "kill" and text in PARTS:
        return {"part": text}
    name, _, rank = text.rpartition("=")
    if name not in ("", "rank") or not is_whole_number(rank):
        parts = f", or one of {', '.join(PARTS)}" if kind == "kill" else ""
        raise ConfigError(f"--{kind} {text!r} is no rank", fix=f"--{kind} rank=2{parts}")
    return {"rank": int(rank)}


def _check_point(point: str) -> None:
    from argosy.config.nearest import did_you_mean
    from argosy.control.faults import POINTS

    if point and point not in POINTS:
        raise ConfigError(f"a step has no point {point!r}", fix=did_you_mean(point, POINTS))


def _draw(arguments: Arguments, target: Target, view: dict[str, Any]) -> list[dict[str, Any]]:
    """Random faults: a function of the seed, the gang's size and the steps."""
    import msgspec

    from argosy.control.faults import DRAWN, KINDS, draw_faults

    for name in ("at_step", "point", "seconds"):
        if name in arguments.options:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} with --random", fix=f"drop {flag}: it is drawn")
    gangs = [r for r in view["roles"] if r["gang"] and target.role in (None, r["role"])]
    if len(gangs) != 1:
        raise ConfigError(
            "random faults need one gang", fix="name its role: RUN/ROLE" if gangs else ""
        )
    names = arguments.get("kinds")
    kinds = tuple(name.strip() for name in names.split(",")) if names else DRAWN
    unknown = [name for name in kinds if name not in KINDS]
    if unknown:
        raise ConfigError(f"there is no fault {unknown[0]!r}", fix=f"use {', '.join(KINDS)}")
    drawn = draw_faults(
        arguments.get("seed", 0),
        arguments.get("count", 1),
        gangs[0]["count"],
        arguments.get("between", NEXT_STEPS),
        kinds,
    )
    more = {"role": gangs[0]["role"], "from_now": "between" not in arguments.options}
    return [{**msgspec.to_builtins(order), **more} for order in drawn]
