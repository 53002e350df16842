"""What only optimizers' steps change: their parameters and their state, with the versions that all of it has when a save is asked for.

Such memory may be copied while forward and backward run. Whoever changes it by hand meanwhile is found by its version, unless he goes around torch's
count of changes (`.data`, numpy). Used by snapshots and captures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from argosy.errors import ArgosyError
from argosy.move.placements import local_of

Members = list[tuple[torch.Tensor, dict[str, Any]]]
"""Parameters with their state."""
_NOTHING: dict[str, Any] = {}
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class SnapshotTorn(ArgosyError):
    """A tensor was changed while it was copied, by something else than its optimizer's step."""


class Guards:
    """The tensors of optimizers, as they are now."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._members = {id(one): members_of(one) for one in optimizers}
        pairs = [pair for groups in self._members.values() for group in groups for pair in group]
        # All this is in the way of training, and whatever is done for each tensor is a good part of it.
        found: list[torch.Tensor] = [parameter for parameter, _ in pairs]
        kept: list[Any] = list(chain.from_iterable([state.values() for _, state in pairs]))
        self.kinds: set[type] = set(map(type, kept))
        """Of all that optimizers keep for their parameters."""
        is_tensors = self.kinds <= _PLAIN
        found += kept if is_tensors else [one for one in kept if isinstance(one, torch.Tensor)]
        if not set(map(type, found)) <= _PLAIN:
            found = [one if type(one) in _PLAIN else local_of(one) for one in found]
        self.tensors = found
        try:
            self._versions = [one._version for one in found]
        except RuntimeError:
            self._versions = [version_of(one) for one in found]
        self._addresses = list(map(torch.Tensor.data_ptr, found))

    def members(self, optimizer: torch.optim.Optimizer) -> list[Members]:
        """Parameters of each group with their state, as they were found."""
        return self._members[id(optimizer)]

    @property
    def addresses(self) -> set[int]:
        """Of all their memory."""
        return set(self._addresses) - {0}

    def places(self) -> dict[int, int]:
        """The address that each had, by its identity."""
        return dict(zip(map(id, self.tensors), self._addresses, strict=True))

    def changed(self) -> int | None:
        """The address of the first that is not as it was."""
        for one, version, address in zip(
            self.tensors, self._versions, self._addresses, strict=True
        ):
            if version_of(one) != version:
                return address
        return None


def members_of(optimizer: torch.optim.Optimizer) -> list[Members]:
    """Parameters of each group with their state as it is now."""
    states: Mapping[torch.Tensor, dict[str, Any]] = optimizer.state
    # By identity: a tensor's own hash is a call of Python.
    by_id = {id(one): state for one, state in states.items()}
    return [
        [(one, dict(by_id.get(id(one), _NOTHING))) for one in group["params"]]
        for group in optimizer.param_groups
    ]


def version_of(tensor: torch.Tensor) -> int:
    """Counts its changes; those that were made without a count have none."""
    return 0 if tensor.is_inference() else tensor._version
