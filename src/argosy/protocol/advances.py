"""How far a save is, in words: for whoever waits for the end of a run. Pure, and cheap to import."""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

TELL_SECONDS = 10.0
"""So often a person at a terminal is told."""
_MIB, _GIB = 1 << 20, 1 << 30


def describe_advance(step: int, num_bytes: int, total_bytes: int, what: str) -> str:
    """`saves step 120: 1.2 of 4.0 GiB written`; without a total what is done."""
    is_large = max(num_bytes, total_bytes) >= _GIB
    unit, name = (_GIB, "GiB") if is_large else (_MIB, "MiB")
    of = f" of {total_bytes / unit:.1f}" if total_bytes else ""
    return f"saves step {step}: {num_bytes / unit:.1f}{of} {name} {what}"


def describe_fact(fact: dict[str, Any]) -> str:
    """The same of an `attempt.saving`, as it stands among the events."""
    total, what = fact.get("total_bytes", 0), fact.get("what", "written")
    return describe_advance(fact["step"], fact["num_bytes"], total, what)
