"""Whether a process of this host still runs. No torch."""

from __future__ import annotations


def is_alive(pid: int) -> bool:
    """Whether it does; one that nobody has reaped, as in containers without an init, does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, IndexError):
        return True
