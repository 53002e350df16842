"""How the processes of a save tell each other things without a training collective: a board where each posts under its name and reads the others'.

`FileBoard` is a directory, so it works wherever the checkpoint itself can be written; `StoreBoard` is a store of torch.distributed. Waits are bounded
and name who is missing; a process that fails says so and ends everybody's wait.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from argosy.checkpoint.directio import disk_error
from argosy.checkpoint.neighbours import Neighbours
from argosy.errors import ArgosyError, ClusterError, TimedOut

_FAILED = "failed"
_LEAVING_SECONDS = 10.0


class Failure(msgspec.Struct, frozen=True):
    """What a process says when it gives up."""

    rank: int
    what: str
    fix: str = ""


class PartnerFailed(ClusterError):
    """Another process of the save has failed; carries what it said."""


Kind = TypeVar("Kind", bound=PartnerFailed)


class PartnerRefused(PartnerFailed):
    """Another process has no part in the save, so nobody can commit it. Why is raised there; here no later call raises it, or refusals would follow each other for ever."""


class PartnerLost(PartnerFailed):
    """Another process of the save has ended and nobody has its part."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} has ended before it had done its part", fix="see its own error"
        )
        self.rank = rank


class BoardGone(ClusterError):
    """What was to be said or read cannot be: whoever hosts the board has ended."""


class Board(Protocol):
    """A place where bytes are posted once under a key and read by all."""

    def post(self, key: str, data: bytes) -> None:
        """Put it up, whole or not at all."""

    def find(self, key: str) -> bytes | None:
        """What was posted, or None yet."""

    def is_there(self) -> bool:
        """Whether it has not been taken down as a whole."""


class FileBoard:
    """Files of a directory; posted by rename."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def post(self, key: str, data: bytes) -> None:
        """Put it up."""
        beside = self._directory / f".{key}.{secrets.token_hex(4)}"
        try:
            beside.write_bytes(data)
            os.rename(beside, self._directory / f"{key}.json")
        except FileNotFoundError:
            raise PartnerFailed(
                f"{self._directory} is gone: the process that commits has given the save up",
                fix="see that process's own error",
            )
        except OSError as failure:
            raise disk_error(failure, f"{self._directory} cannot be written into")

    def is_there(self) -> bool:
        """Who gives a save up takes its directory away."""
        return self._directory.exists()

    def find(self, key: str) -> bytes | None:
        """Read it."""
        try:
            return (self._directory / f"{key}.json").read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, keys: Sequence[str]) -> None:
        """Take them down before the directory becomes a checkpoint."""
        for key in keys:
            (self._directory / f"{key}.json").unlink(missing_ok=True)


class StoreBoard:
    """A store of torch.distributed, with keys of its own; asks, never waits inside the store."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def post(self, key: str, data: bytes) -> None:
        """Put it up."""
        with _reaching_store():
            self._store.set(f"{self._prefix}/{key}", data)

    def is_there(self) -> bool:
        """It lives as long as the group."""
        return True

    def find(self, key: str) -> bytes | None:
        """Read it."""
        name = f"{self._prefix}/{key}"
        with _reaching_store():
            return bytes(self._store.get(name)) if self._store.check([name]) else None

    def enlist(self, name: str) -> int:
        """How many had enlisted under the name before."""
        with _reaching_store():
            return int(self._store.add(f"{self._prefix}/{name}", 1)) - 1

    def enlisted(self, name: str) -> int:
        """How many have."""
        with _reaching_store():
            return int(self._store.add(f"{self._prefix}/{name}", 0))


@contextlib.contextmanager
def _reaching_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as failure:  # what torch's stores raise
        raise BoardGone(
            f"the store of torch.distributed cannot be reached: {failure}",
            fix="see whether the process that hosts it lives (rank 0, or the launcher)",
        )


Check = Callable[[Sequence[int]], None]
"""Told which ranks are missing; raises when one of them never will come."""


class Met(NamedTuple):
    """What the members of a group know when they have met."""

    session: str
    """The same in all of them, and in no other group."""
    board: Board | None
    neighbours: Neighbours | None
    """Those of them that are on this host and can read for each other."""


class Group:
    """The processes that save and load together; alone it has one member and never waits."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        session: str = "",
        board: Board | None = None,
        *,
        seconds: float = 600.0,
        meet: Callable[[], Met] | None = None,
        has_left: Callable[[], bool] = lambda: False,
    ) -> None:
        """`meet` is called when the others are first needed, and waits for them."""
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.has_left = has_left
        """Whether the process has gone for which this one acts."""
        self._meeting = threading.Lock()
        self._meet = meet
        self._met = Met(session or secrets.token_hex(6), board, None)
        self._rounds = 0
        self._turns = 0
        self._telling = threading.Lock()
        self._untold: dict[str, bytes] = {}
        """What this member has said before all had met."""

    def met(self) -> Met:
        """What is known once all have met."""
        with self._meeting:
            if self._meet is not None:
                self._met, self._meet = self._meet(), None
                self._tell()
            return self._met

    @property
    def session(self) -> str:
        """The same in all members, and in no other group."""
        return self.met().session

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to ask."""
        return self.size == 1

    def next_number(self) -> int:
        """Of a save or a load, the same in all members: each counts what it is asked for."""
        self._turns += 1
        return self._turns

    def tell(self, key: str, data: bytes) -> None:
        """Put it up as soon as all have met; does not wait for that."""
        if self.is_alone:
            return
        with self._telling:
            self._untold[key] = data
        if self._meet is None:
            self._tell()

    def heard(self, key: str) -> bytes | None:
        """What a member has told, or None yet."""
        board = self.met().board
        if self.is_alone or board is None:
            return None
        try:
            return board.find(key)
        except BoardGone:
            return None  # with whoever hosted it, which is found in other ways

    def _tell(self) -> None:
        with self._telling:
            told, self._untold = self._untold, {}
        board = self._met.board
        for key, data in told.items():
            if board is not None:
                # A board that is gone has nobody who would look.
                with contextlib.suppress(ArgosyError):
                    board.post(key, data)

    def agree(self, mine: bytes) -> list[bytes]:
        """What each member says, by rank, outside of any turn; all call it equally often."""
        self._rounds += 1
        return self.exchange(f"round-{self._rounds}", mine)

    def exchange(
        self, key: str, mine: bytes, check: Check | None = None, *, more_seconds: float = 0.0
    ) -> list[bytes]:
        """What each member says under a key, by rank."""
        board = self.met().board
        if self.is_alone or board is None:
            return [mine] * self.size
        return exchange(board, key, mine, self, check, more_seconds=more_seconds)


def exchange(
    board: Board,
    key: str,
    mine: bytes,
    group: Group,
    check: Check | None = None,
    *,
    more_seconds: float = 0.0,
) -> list[bytes]:
    """Post one's own and wait for everybody's, in the order of ranks."""
    board.post(f"{key}-{group.rank:05d}", mine)
    return gather(board, key, group, check, more_seconds=more_seconds)


def gather(
    board: Board,
    key: str,
    group: Group,
    check: Check | None = None,
    *,
    more_seconds: float = 0.0,
) -> list[bytes]:
    """Wait for everybody's; TimedOut names the ranks that are missing, PartnerFailed who gave up and why. `check` is asked about the missing now and then."""
    seconds = group.seconds + more_seconds
    deadline = time.monotonic() + seconds
    found: dict[int, bytes] = {}
    has_ended = False
    pause = 0.001
    while True:
        missing = _look(board, key, group.size, found)
        if not missing:
            return [found[rank] for rank in range(group.size)]
        try:
            check_failures(board, group)
            if check is not None:
                check(missing)
        except PartnerFailed:
            # Who has failed since may have said this before: what all have said they all go on with.
            if _look(board, key, group.size, found):
                raise
            continue
        if not board.is_there():
            raise PartnerFailed("the save was given up by another rank", fix="see its own error")
        if not has_ended and not threading.main_thread().is_alive():
            # The program has ended and only waits for this thread: partners that have not come by now are not worth its whole patience.
            has_ended, deadline = True, min(deadline, time.monotonic() + _LEAVING_SECONDS)
        if time.monotonic() > deadline:
            raise TimedOut(
                f"ranks {missing} have not said {key!r} within {seconds:.0f} s",
                fix="see whether they live (py-spy dump), or give a longer time",
            )
        time.sleep(pause)
        pause = min(longest_pause(group.size), pause * 1.5)


def _look(board: Board, key: str, size: int, found: dict[int, bytes]) -> list[int]:
    """Take what has been said since; the ranks that are missing."""
    for rank in range(size):
        if rank not in found and (data := board.find(f"{key}-{rank:05d}")) is not None:
            found[rank] = data
    return [rank for rank in range(size) if rank not in found]


def longest_pause(size: int) -> float:
    """Between two looks of each of so many processes at what all of them have posted: the board has to bear them all."""
    return max(0.02, size * 2e-4)


def tell_failure(board: Board, group: Group, failure: BaseException) -> None:
    """Let the others know at once."""
    said = failure_of(group, failure)
    board.post(f"{_FAILED}-{group.rank:05d}", msgspec.json.encode(said))


def failure_of(group: Group, failure: BaseException) -> Failure:
    """What a member says of its own failure."""
    what = failure.what if isinstance(failure, ArgosyError) else repr(failure)
    return Failure(group.rank, what, failure.fix if isinstance(failure, ArgosyError) else "")


def check_failures(board: Board, group: Group) -> None:
    """PartnerFailed when another member has given up."""
    for rank in range(group.size):
        data = board.find(f"{_FAILED}-{rank:05d}")
        if data is not None and rank != group.rank:
            raise error_of(data, PartnerFailed)


def error_of(data: bytes, kind: type[Kind]) -> Kind:
    """The same as an error of the others."""
    said = msgspec.json.decode(data, type=Failure)
    return kind(f"rank {said.rank} has failed: {said.what}", fix=said.fix)


def wait_all_failed(board: Board, group: Group, failure: BaseException, seconds: float) -> None:
    """Give the others a moment to read why, before the board goes away."""
    lost = {failure.rank} if isinstance(failure, PartnerLost) else set[int]()
    others = [rank for rank in range(group.size) if rank not in lost]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        told = [board.find(f"{_FAILED}-{rank:05d}") for rank in others]
        if all(one is not None for one in told):
            return
        time.sleep(0.005)
