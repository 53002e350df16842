"""What the controller keeps about one host: its keeper, and which wants it has not confirmed yet.

The version of a want is the place in the log of the fact that changed it last, so versions survive a restart of the
controller. Owned by the coordinator; builds nothing itself, it says which attempts and runs belong into the next message.
"""

from __future__ import annotations

from collections import OrderedDict

RESEND_SECONDS = 1.0


class HostWants:
    """One host as the controller sees it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.keeper = ""
        self.past_keepers: set[str] = set()
        self.condemned: dict[str, int] = {}
        """Keepers that were killed on purpose, by which fault."""
        self.cpus = 0
        self.memory_bytes = 0
        self.pid = 0
        self.connected = False
        self.seen_at = 0.0
        self.version = 0
        self.sent = 0
        self.confirmed = 0
        self.sent_at = 0.0
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._runs: OrderedDict[str, int] = OrderedDict()
        self._finished: OrderedDict[str, int] = OrderedDict()
        """Attempts and runs that leave the tables when the host has confirmed this version."""

    def touch_attempt(self, attempt: str, version: int) -> None:
        """Its want changed."""
        self._attempts[attempt] = version
        self._attempts.move_to_end(attempt)
        self.version = max(self.version, version)

    def touch_run(self, run: str, version: int) -> None:
        """Its ports changed, or it is over."""
        self._runs[run] = version
        self._runs.move_to_end(run)
        self.version = max(self.version, version)

    def finish(self, name: str, version: int) -> None:
        """Attempt (run) needs no further message once this version is confirmed."""
        self._finished[name] = version
        self._finished.move_to_end(name)

    def attempts(self) -> list[str]:
        """All attempts with a want."""
        return list(self._attempts)

    def runs(self) -> list[str]:
        """All runs with ports to hold, or that are over."""
        return list(self._runs)

    def changed_since(self, version: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """(attempt, version) and (run, version) newer than a version, oldest first."""
        return _newer(self._attempts, version), _newer(self._runs, version)

    def connect(self) -> None:
        """A new connection: nothing is known to have arrived."""
        self.connected = True
        self.sent = self.confirmed = 0

    def confirm(self, version: int) -> None:
        """The host has everything up to this version."""
        self.confirmed = max(self.confirmed, min(version, self.version))
        self.sent = max(self.sent, self.confirmed)
        while self._finished:
            name, needed = next(iter(self._finished.items()))
            if needed > self.confirmed:
                return
            del self._finished[name]
            self.drop(name)

    def drop(self, name: str) -> None:
        """Forget an attempt or run."""
        self._attempts.pop(name, None)
        self._runs.pop(name, None)

    @property
    def is_behind(self) -> bool:
        """Something changed that was not sent."""
        return self.connected and self.sent < self.version

    @property
    def resend_at(self) -> float | None:
        """When unconfirmed wants are sent again."""
        if not self.connected or self.confirmed >= self.version:
            return None
        return self.sent_at + RESEND_SECONDS


def _newer(table: OrderedDict[str, int], version: int) -> list[tuple[str, int]]:
    newer: list[tuple[str, int]] = []
    for name in reversed(table):
        if table[name] <= version:
            break
        newer.append((name, table[name]))
    newer.reverse()
    return newer
