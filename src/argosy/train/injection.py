"""Faults that this process was told to have: death, stop, slowness, an exception, a spoilt gradient, at a chosen point of a chosen step.

`argosy fault` tells them; the transaction passes here at each point of a step. Without a fault told, a point costs one look at an empty list.
"""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any, Protocol

import torch


class InjectedError(RuntimeError):
    """Raised on request."""


class Fault(Protocol):
    """What was told."""

    kind: str
    step: int | None
    point: str | None
    seconds: float
    number: int


class Injector:
    """Pending faults of this process."""

    def __init__(self, gang: Any) -> None:
        self._gang = gang
        self._pending: list[Fault] = []

    def pass_by(self, point: str, step: int, slot: torch.Tensor | None = None) -> None:
        """This process is at that point of that step."""
        faults = getattr(self._gang, "faults", None)
        if faults is not None:
            self._pending += faults()
        if not self._pending:
            return
        for fault in list(self._pending):
            if (fault.step is None or fault.step <= step) and fault.point in (None, point):
                if fault.kind == "nan" and slot is None:
                    continue
                self._pending.remove(fault)
                self._gang.met(fault.number)
                _carry_out(fault, slot)


def _carry_out(fault: Fault, slot: torch.Tensor | None) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "raise":
        raise InjectedError("this exception was asked for by `argosy fault --raise`")
    elif fault.kind == "nan" and slot is not None:
        slot[:2] = math.nan  # both halves, should it be of float64
