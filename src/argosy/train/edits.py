"""`with trainer.edit() as params`: a change of weights as a transaction of its own, at the same step.

Every rank runs the block on private copies under the same seeds; when all have come here, owners write their parameters into the next version and it is committed. An edit stands in the loop before
the step's update, so that a rank that joins later comes to it too: the ledger counts a step's edits, and one that is committed already is run for nothing. Called by trainer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from argosy.errors import ConfigError, MismatchError
from argosy.move.kernels import copy_crc32c
from argosy.train.lanes import BUFFER
from argosy.train.roster import EDIT
from argosy.train.seeds import mix, seed_all
from argosy.train.stateplan import VALUE

if TYPE_CHECKING:
    from argosy.train.memories import Version
    from argosy.train.parts import Parts

Values = dict[str, torch.Tensor]
_SALT = 0xED17


@contextmanager
def edit(parts: Parts, step: int, number: int) -> Iterator[Values]:
    """The `number`-th edit of a step: master values to change in place, committed at the end of the block."""
    committed = parts.committed
    names = [name for name in parts.memories.plan.names if not name.startswith(BUFFER)]
    values = {name: committed.tensor(name).clone() for name in names}
    seed_all(parts.run.seed, step, number, _SALT)
    with torch.no_grad():
        yield values
    _check_shapes(values, committed)
    parts.transaction.persist(lambda: _commit(parts, step, number, values))


def _commit(parts: Parts, step: int, number: int, values: Values) -> None:
    """Make the next version with all ranks. Interrupted by changes of membership, and called again."""
    transaction, state = parts.transaction, parts.state
    version, slot = state.current()
    if not _is_done(parts, step, number):
        transaction.check_crew(step)
        _agree(parts, version, values)
        _meet(parts, version)
        if state.current()[0] == version:
            old = parts.memories.version(slot)
            transaction.write(
                version + 1, lambda new, names: _write(old, new, names, values, number)
            )
            transaction.wait_flip(version + 1)
    transaction.refresh()


def _meet(parts: Parts, version: int) -> None:
    """Wait until all members have come to this edit: nobody's weights may change while it computes with the old ones."""
    crew, roster = parts.crew, parts.crew.roster
    roster.arrive(crew.rank, version)
    parts.exchange.wake()

    def late() -> list[int]:
        return [r for r in crew.members if not roster.has_arrived(r, crew.pid_of(r), version)]

    def meet(deadline: float) -> None:
        while late() and parts.state.current()[0] == version:
            parts.exchange.wait_progress(deadline=deadline)

    parts.transaction.patience.wait(meet, late)


def _write(
    old: Version, new: Version, names: list[str], values: Mapping[str, torch.Tensor], number: int
) -> None:
    """Some parameters of the next version; whoever has the first one writes the ledger."""
    for name in names:
        new.copy_from(old, name)
        if name in values:
            new.tensor(name).copy_(values[name])
    if old.plan.names[0] in names:
        new.ledger = {**old.ledger, "edits": number + 1}


def _is_done(parts: Parts, step: int, number: int) -> bool:
    ledger = parts.committed.ledger
    return int(ledger["step"]) != step or ledger.get("edits", 0) > number


def _agree(parts: Parts, version: int, values: Values) -> None:
    """MismatchError when the block did something else here than on another rank."""
    own = mix(*(copy_crc32c(None, value.contiguous()) for value in values.values()))
    if parts.crew.roster.agree_on(version, EDIT, parts.crew.rank, own) != own:
        raise MismatchError(
            "trainer.edit() came to other values here than on another rank",
            fix="use torch's default generators, which are seeded alike, and nothing of this process's own",
        )


def _check_shapes(values: Values, version: Version) -> None:
    known = {f.name: f for f in version.plan.fields if f.key == VALUE and f.name in values}
    for name, value in values.items():
        field = known.get(name)
        form = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if field is None or form != (field.shape, field.dtype):
            raise ConfigError(
                f"trainer.edit() left {name!r} as {value.dtype} of {tuple(value.shape)}",
                fix="change the values that are there in place: params[name].mul_(0.5)",
            )
