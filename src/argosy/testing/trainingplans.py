"""Plans of simulated training runs: how many lanes and steps, how long things take, and what goes wrong at which point of which step.

Drawn from a seed. A trouble comes to the first member that passes its point; a poisoned lane raises in every process, a bad batch is not finite in every process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Literal

from argosy.train.guards import Guard

Kind = Literal["kill", "raise", "nan", "stopped", "asleep", "spinning", "slow", "idle"]
POINTS = (
    "start",
    "joined",
    "settle",
    "outside",
    "evaluation",
    "lane",
    "publish",
    "vote",
    "update",
    "flip",
    "refresh",
)
HANGS = ("stopped", "asleep", "spinning")


@dataclass(slots=True)
class Trouble:
    """Something that happens once."""

    kind: Kind
    point: str
    step: int
    seconds: float = 0.0
    has_come: bool = False


@dataclass(slots=True)
class TrainingPlan:
    """One run's training."""

    num_lanes: int
    num_steps: int
    costs: dict[str, int]
    lane_seconds: float
    guard: Guard
    evaluate_every: int
    """Steps between evaluations; 0: none."""
    evaluation_batches: int
    hang_seconds: float
    first_hang_seconds: float
    start_seconds: float
    last_seconds: float = 0.0
    """Until a process ends when its loop is over."""
    poison: tuple[int, int] | None = None
    """(step, lane) that always raises."""
    bad_batches: frozenset[int] = frozenset()
    troubles: list[Trouble] = field(default_factory=list)

    def may_leave_out(self, step: int, batch: int) -> bool:
        """Whether the guard may leave this batch out: its numbers are bad, or a machine has spoiled the step twice."""
        spoiled = [t for t in self.troubles if t.kind == "nan" and t.step == step and t.has_come]
        return batch in self.bad_batches or len(spoiled) > 1


def random_plan(random: Random, num_lanes: int) -> TrainingPlan:
    """One plan."""
    steps = random.randint(6, 16)
    lane_seconds = random.choice([0.01, 0.05, 0.4, 3.0])
    median = lane_seconds * num_lanes
    # So long a rank may sleep or compute without being taken for hung, whatever it is that the others wait for.
    patience = {"idle": (3.0 * lane_seconds + 1.0) / 2, "slow": 25.0}
    kinds: list[Kind] = [
        "kill",
        "kill",
        "raise",
        "nan",
        "stopped",
        "asleep",
        "spinning",
        "slow",
        "idle",
    ]
    troubles = []
    for _ in range(random.randint(0, 5)):
        kind = random.choice(kinds)
        point = "lane" if kind == "nan" else random.choice(POINTS)
        # An upload between two steps may take its time.
        most = 60.0 if (kind, point) == ("idle", "outside") else patience.get(kind, 0.0)
        seconds = 0.8 * most * random.random()
        troubles.append(Trouble(kind, point, random.randrange(steps), seconds))
    policy = random.choice(["skip", "rewind"])
    return TrainingPlan(
        num_lanes=num_lanes,
        num_steps=steps,
        costs={f"p{i}": random.randint(1, 9) for i in range(random.randint(1, 4))},
        lane_seconds=lane_seconds,
        guard=Guard(policy=policy, snapshot_every=random.randint(1, 5), most_skips=100),  # type: ignore[arg-type]
        evaluate_every=random.choice([0, 1, 3]),
        evaluation_batches=random.randint(1, 4),
        hang_seconds=1.0,
        first_hang_seconds=max(60.0, 4 * median),
        start_seconds=random.choice([0.1, 3.0, 40.0]),
        last_seconds=random.choice([0.0, 0.0, 2.0, 400.0]),
        poison=(random.randrange(steps), random.randrange(num_lanes))
        if random.random() < 0.12
        else None,
        bad_batches=frozenset(i for i in range(steps + 4) if random.random() < 0.06),
        troubles=troubles,
    )
