"""The gang that this process belongs to: who it is, whether that has changed, and how to join what comes after.

`argosy.join()` tells the runtime that this program can re-form in the same process. Then a peer's death is told at once, and
`rejoin()` waits for the next generation and puts it into the environment, so that `torch.distributed.init_process_group`
just works again. Outside Argosy there is a gang of one. Never imports torch, never tears down a process group by itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from argosy.errors import ConfigError, GenerationChanged
from argosy.protocol import link as links

_JOIN_SECONDS = 30.0
_REJOIN_SECONDS = 600.0

_joined: Gang | None = None


def join(*, timeout: float = _JOIN_SECONDS) -> Gang:
    """Take part in the gang of this process; again gives the same gang."""
    global _joined
    if _joined is None or not _joined.is_own_process():
        own = links.current()
        gang = Gang(own)
        if own is not None:
            own.wait_welcome(timeout=timeout)
            own.listen(gang._hear)
            gang._say_joined()
        _joined = gang
    return _joined


class Gang:
    """This process's membership; `rejoin` moves it to a newer generation in place."""

    def __init__(self, link: links.Link | None) -> None:
        self._link = link
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._next: dict[str, Any] | None = None
        """The newest generation told and not yet joined."""
        self._lost: dict[str, Any] | None = None
        """The first member of this generation that was heard to have died."""
        self._callbacks: list[Callable[[Gang], None]] = []
        self.rank = _read_number("RANK", 0)
        self.world_size = _read_number("WORLD_SIZE", 1)
        self.generation = _read_number("ARGOSY_GENERATION", 0)
        self.master_addr = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.master_port = _read_number("MASTER_PORT", 0)

    def __repr__(self) -> str:
        return f"Gang(rank {self.rank} of {self.world_size}, generation {self.generation})"

    @property
    def changed(self) -> bool:
        """Whether a member has died or a newer generation was formed."""
        return self._next is not None or self._lost is not None

    @property
    def reason(self) -> str:
        """What changed, in words; empty when nothing did."""
        with self._condition:
            if self._lost is not None:
                how = f"signal {self._lost['signal']}" if self._lost.get("signal") else ""
                how = how or f"code {self._lost.get('code')}"
                return f"rank {self._lost.get('rank')} of generation {self.generation} died ({how})"
            if self._next is not None:
                return f"generation {self._next['generation']} was formed"
            return ""

    def check(self) -> None:
        """Raise GenerationChanged if anything has changed."""
        if self.changed:
            raise GenerationChanged(self.reason, fix="call gang.rejoin()")

    def wait_changed(self, timeout: float | None = None) -> bool:
        """Wait until something has changed; False when it has not by then."""
        with self._condition:
            return self._condition.wait_for(lambda: self.changed, timeout)

    def on_change(self, callback: Callable[[Gang], None]) -> None:
        """Call back from the link's thread, the moment a change is heard: to abort a collective, for example."""
        with self._condition:
            self._callbacks.append(callback)

    def rejoin(self, *, timeout: float = _REJOIN_SECONDS) -> Gang:
        """Wait for a newer generation, take the place it gives this process, and set the environment accordingly."""
        if self._link is None:
            raise ConfigError(
                "a gang of one outside Argosy has no next generation", fix="use `argosy run`"
            )
        deadline = time.monotonic() + timeout
        with self._condition:
            if not self._condition.wait_for(
                lambda: self._next is not None, deadline - time.monotonic()
            ):
                raise TimeoutError(
                    f"no generation after {self.generation} was formed within {timeout:g} s"
                )
            told, self._next, self._lost = self._next, None, None
            assert told is not None
            self._take(told)
        self._say_joined()
        return self

    def step(self, number: int) -> None:
        """Report progress; cheap enough for every step."""
        if self._link is not None:
            self._link.step(number)

    def ready(self) -> None:
        """Report that this process is ready."""
        if self._link is not None:
            self._link.ready()

    def is_own_process(self) -> bool:
        """False in a forked child of the member."""
        return os.getpid() == self._pid

    def _say_joined(self) -> None:
        if self._link is not None:
            self._link.say({"say": "join", "generation": self.generation}, stand="join")

    def _take(self, told: dict[str, Any]) -> None:
        is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        self.generation = int(told["generation"])
        self.rank = int(told["rank"])
        self.world_size = int(told["world_size"])
        self.master_addr = str(told.get("master_addr") or self.master_addr)
        self.master_port = int(told.get("master_port") or self.master_port)
        variables = {
            "ARGOSY_GENERATION": self.generation,
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            # Keys of torchelastic's store are prefixed with this number: it must be the same for all members.
            "TORCHELASTIC_RESTART_COUNT": self.generation - 1,
        }
        if is_one_host:
            variables |= {"LOCAL_RANK": self.rank, "LOCAL_WORLD_SIZE": self.world_size}
        if "hosted" in told:
            variables["TORCHELASTIC_USE_AGENT_STORE"] = bool(told["hosted"])
        variables |= told.get("env") or {}
        os.environ.update({name: str(value) for name, value in variables.items()})

    def _hear(self, frame: dict[str, Any]) -> None:
        """A frame from the keeper, on the link's thread."""
        with self._condition:
            if not self._note(frame):
                return
            self._condition.notify_all()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(self)

    def _note(self, frame: dict[str, Any]) -> bool:
        """Remember what the frame means for this gang; False if it means nothing."""
        if frame.get("type") == "peer":
            # A member that ended well has finished its work: that is for the runtime to judge.
            is_death = bool(frame.get("signal")) or frame.get("code") not in (0, None)
            if int(frame.get("generation", 0)) != self.generation or not is_death:
                return False
            if self._lost is None:
                self._lost = frame
            return True
        message = frame.get("message")
        if frame.get("type") != "told" or not isinstance(message, dict):
            return False
        if message.get("tell") != "reform":
            return False
        newest = self._next["generation"] if self._next else self.generation
        if int(message.get("generation", 0)) <= newest:
            return False
        self._next = message
        return True


def _read_number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.lstrip("-").isdigit() else default
