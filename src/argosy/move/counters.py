"""What data movement has done in this process: bytes by route, calls, copies, stalls; plain numbers that telemetry reads.

Every mover adds to `own` in place. There is no lock: a count may miss an update of another thread, never a step of training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

STALL_SECONDS = 50e-6
"""Longer than anybody spins."""


@dataclass
class Counters:
    """Totals since the process began."""

    shared_memory_bytes: int = 0
    """Read from or written for a peer of the host."""
    gloo_bytes: int = 0
    """Given to Gloo: across hosts, messages, reductions without a kernel."""
    copy_bytes: int = 0
    """Copied inside this process on the way: tensors in pieces, staging."""
    shared_memory_calls: int = 0
    gloo_calls: int = 0
    """A call between hosts counts for both routes that it takes."""
    copies: int = 0
    stalls: int = 0
    """Waits that had to sleep."""
    stalled_seconds: float = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for somebody else: counted when it was so long that it has slept."""
        began = time.monotonic()
        yield
        waited = time.monotonic() - began
        if waited > STALL_SECONDS:
            self.stalls += 1
            self.stalled_seconds += waited

    def copied(self, num_bytes: int) -> None:
        """One more copy on the way."""
        self.copies += 1
        self.copy_bytes += num_bytes

    def snapshot(self) -> dict[str, int | float]:
        """The numbers now, by name."""
        return dataclasses.asdict(self)

    def since(self, earlier: dict[str, int | float]) -> dict[str, int | float]:
        """What was added after an earlier snapshot."""
        return {name: value - earlier.get(name, 0) for name, value in self.snapshot().items()}

    def reset(self) -> None:
        """Begin at zero, as a forked child does."""
        for each in dataclasses.fields(self):
            setattr(self, each.name, each.default)


own = Counters()
"""Of this process."""


def snapshot() -> dict[str, int | float]:
    """This process's numbers now."""
    return own.snapshot()
