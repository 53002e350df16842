"""Gloo between the first ranks of several hosts, and what it means when it fails.

Made by groups.py on the first rank of each host; hostroute.py moves data over it. A leader that cannot go on says why in the group's
store and cuts its connections: the others fail at once and read that. Who has neither a connection nor said anything has ended. The
other ranks of a leader's host read its verdict (`verdict`). Never touches shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from argosy.errors import ArgosyError, ConfigError, NoRoute, PeerLost, TimedOut
from argosy.move import counters, torchgroup
from argosy.move.messages import as_bytes

_SILENCE_SECONDS = 0.3
"""A leader that lives says why it has left within this time."""
_JUDGEMENT_SECONDS = 1.0
_SLICE_SECONDS = 0.01


class Reason(msgspec.Struct, frozen=True):
    """Why a group that spans hosts has ended, as it stands in the store."""

    kind: str
    rank: int = -1
    text: str = ""

    @classmethod
    def of(cls, failure: BaseException, rank: int) -> Reason:
        """What a failure of this rank means to the other hosts."""
        if isinstance(failure, PeerLost):
            return cls("lost", failure.rank)
        if isinstance(failure, TimedOut):
            return cls("late", rank, failure.what)
        if isinstance(failure, ArgosyError):
            return cls("ended", rank, failure.what)
        return cls("ended", rank, f"rank {rank} has aborted its part: {failure!r}")

    def error(self, what: str, group: str) -> ArgosyError:
        """For whoever made a call in the group."""
        if self.kind == "lost":
            return PeerLost(self.rank, f"{what} in group {group}")
        if self.kind == "late":
            return TimedOut(
                f"{what} in group {group}: {self.text}",
                fix="see where those ranks are (`argosy stacks`), or give the group a longer timeout",
            )
        if self.kind == "ended":
            return ConfigError(
                f"{what} in group {group}: {self.text}",
                fix="destroy the process group and make a new one",
            )
        return NoRoute(
            f"{what} in group {group}: rank {self.rank} has failed: {self.text}",
            fix="see that rank's own output; then make a new process group",
        )


class Notes:
    """What leaders have left in the group's store. A store that cannot be reached holds nothing."""

    def __init__(self, store: torchgroup.Store) -> None:
        self._store = torchgroup.inner_store(store, "leaders' notes")

    def leave(self, key: str, reason: Reason) -> None:
        """Write, over what was there."""
        try:
            self._store.set(key, msgspec.json.encode(reason))
        except RuntimeError:
            return  # its host has ended: the others find out by their connections

    def read(self, key: str) -> Reason | None:
        """Without waiting."""
        try:
            if not self._store.check([key]):
                return None
            return msgspec.json.decode(self._store.get(key), type=Reason)
        except RuntimeError:
            return None

    def wait_for(self, key: str, seconds: float) -> Reason | None:
        """For a bounded time."""
        deadline = time.monotonic() + seconds
        while (found := self.read(key)) is None and time.monotonic() < deadline:
            time.sleep(_SLICE_SECONDS)
        return found


class Leaders:
    """One leader's connections to the others; `tell_host` makes the other ranks of its host leave their waits."""

    def __init__(
        self,
        gloo: Any,
        notes: Notes,
        ranks: list[int],
        index: int,
        tell_host: Callable[[], None],
    ) -> None:
        self._gloo = gloo
        self._notes = notes
        self._ranks = ranks
        self._index = index
        self._tell_host = tell_host
        self.reason: Reason | None = None
        """Why nothing goes on, once something has failed."""

    @property
    def others(self) -> list[int]:
        """Indices of the other leaders."""
        return [index for index in range(len(self._ranks)) if index != self._index]

    def gather(
        self, given: torch.Tensor, timeout_seconds: float, parts: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Every leader's tensor, by host."""
        into = [torch.empty_like(given) for _ in self._ranks] if parts is None else parts
        options = torchgroup.gather_options(timeout_seconds)
        outputs = [as_bytes(part) for part in into]
        self._wait(
            lambda: self._gloo.allgather([outputs], [as_bytes(given)], options), given.nbytes
        )
        return into

    def broadcast(self, tensor: torch.Tensor, home: int, timeout_seconds: float) -> None:
        """The tensor becomes that of the leader of one host."""
        options = torchgroup.broadcast_options(home, timeout_seconds)
        self._wait(lambda: self._gloo.broadcast([as_bytes(tensor)], options), tensor.nbytes)

    def exchange(
        self, output: torch.Tensor, given: torch.Tensor, counts: list[int], timeout_seconds: float
    ) -> None:
        """Each leader's part for each other: `counts` elements for each host go out, equal parts come in."""
        if not sum(counts):
            return
        size = given.itemsize
        sends = [count * size for count in counts]
        takes = [counts[self._index] * size] * len(counts)
        options = torchgroup.exchange_options(timeout_seconds)
        self._wait(
            lambda: self._gloo.alltoall_base(
                as_bytes(output), as_bytes(given), takes, sends, options
            ),
            given.nbytes,
        )

    def _wait(self, start: Callable[[], Any], num_bytes: int) -> None:
        counters.own.gloo_bytes += num_bytes
        try:
            with counters.own.waiting():
                torchgroup.wait_for([start()], self._is_alone)
        except RuntimeError as failure:
            own = Reason("failed", self._ranks[self._index], str(failure))
            self.fail(own, is_late=torchgroup.has_timed_out(failure))
            raise Failed
        except torchgroup.Stuck as stuck:
            torchgroup.abandon(self._gloo)
            own = Reason("failed", self._ranks[self._index], str(stuck))
            self.fail(own, is_late=False)
            raise Failed

    def _is_alone(self) -> bool:
        """Whether a connection to another leader is closed."""
        return any(torchgroup.is_cut(self._gloo, index) for index in self.others)

    def fail(self, own: Reason, *, is_late: bool) -> Reason:
        """Something has failed here: find out whether a leader has ended, and tell everybody. `own` holds when none has."""
        if self.reason is None:
            unclear = Reason("failed", self._ranks[self._index], own.text)
            self._notes.leave(self._note(self._index), unclear)
            self.leave(self._judge_late() if is_late else self._judge(own))
        assert self.reason is not None
        return self.reason

    def leave(self, reason: Reason) -> None:
        """End the group for everybody, for this reason."""
        if self.reason is not None:
            return
        self.reason = reason
        self._notes.leave(self._note(self._index), reason)
        self._notes.leave(verdict_key(self._index), reason)
        if self._gloo is not None:
            torchgroup.cut(self._gloo, self.others[0])
        self._tell_host()

    def _judge_late(self) -> Reason:
        """Those who have waited too say so as soon as this leader's connections have closed; the rest was awaited."""
        deadline = time.monotonic() + _SILENCE_SECONDS
        absent = self.others
        while absent and time.monotonic() < deadline:
            time.sleep(_SLICE_SECONDS)
            absent = [index for index in absent if self._notes.read(self._note(index)) is None]
        named = ", ".join(str(self._ranks[index]) for index in absent or self.others)
        return Reason("late", self._ranks[self._index], f"rank {named} did not come in time")

    def _judge(self, own: Reason) -> Reason:
        """What the others say, or who has neither said anything nor a connection; a host that is busy may see that late."""
        began = time.monotonic()
        while time.monotonic() < began + _JUDGEMENT_SECONDS:
            said = {index: self._notes.read(self._note(index)) for index in self.others}
            for reason in said.values():
                if reason is not None and reason.kind != "failed":
                    return reason
            if time.monotonic() >= began + _SILENCE_SECONDS:
                for index, reason in said.items():
                    if reason is None and torchgroup.is_cut(self._gloo, index):
                        return Reason("lost", self._ranks[index])
            time.sleep(_SLICE_SECONDS)
        return own

    def _note(self, index: int) -> str:
        return f"note{index}"

    def close(self) -> None:
        """End the connections."""
        self._gloo = None


class Failed(Exception):
    """The reason is known and has been told; hostroute.py raises it with the call's name."""


def verdict_key(index: int) -> str:
    """Where the ranks of a host find why their leader has left."""
    return f"verdict{index}"
