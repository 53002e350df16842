"""The gang that this process belongs to: who it is, who has ended, and how to join what comes after.

`argosy.join()` tells the runtime that this program can re-form in the same process. Then a peer's end is told at once. A program with
collectives calls `rejoin()`, which waits for the next generation and puts it into the environment, so that
`torch.distributed.init_process_group` just works again; the trainer polls `lost()` and `coming()` and calls `take()`. Outside
Argosy there is a gang of one. Never imports torch, never tears down a process group by itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from argosy.errors import ConfigError, GenerationChanged
from argosy.protocol import link as links
from argosy.protocol.advances import TELL_SECONDS, describe_advance
from argosy.worker import stops
from argosy.worker.notices import say
from argosy.worker.tidings import Place, Tidings

_JOIN_SECONDS = 30.0
_REJOIN_SECONDS = 600.0
_MOST_REASON = 8 << 10

_joined: Gang | None = None


@dataclass(frozen=True)
class Fault:
    """A fault that a person asked this process to have."""

    kind: str
    """`kill`, `stop`, `slow`, `nan` or `raise`."""
    step: int | None = None
    """None: at once."""
    point: str | None = None
    """`lane`, `publish`, `vote`, `update`, `flip` or `refresh`; None: at the step's beginning."""
    seconds: float = 0.0
    number: int = 0


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


def leave() -> None:
    """The run of this process is over: whoever joins next takes part in another one."""
    global _joined
    _joined = None


def joined() -> Gang | None:
    """The gang that this process has joined; None if it has not."""
    return _joined if _joined is not None and _joined.is_own_process() else None


class Gang:
    """This process's membership; `rejoin` and `take` move it to a newer generation in place."""

    def __init__(self, link: links.Link | None) -> None:
        self._link = link
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._faults: list[Fault] = []
        self._known_faults: set[int] = set()
        self._callbacks: list[Callable[[Gang], None]] = []
        self._told_saving_at = time.monotonic()
        self.rank = _read_number("RANK", 0)
        self.world_size = _read_number("WORLD_SIZE", 1)
        self._tidings = Tidings(_read_number("ARGOSY_GENERATION", 0))
        self.master_addr = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.master_port = _read_number("MASTER_PORT", 0)

    @property
    def generation(self) -> int:
        """The generation that this process has its place in."""
        return self._tidings.generation

    def __repr__(self) -> str:
        return f"Gang(rank {self.rank} of {self.world_size}, generation {self.generation})"

    # --- what has changed -----------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether a member has died or a newer generation was formed."""
        return self._tidings.told is not None or self._tidings.death is not None

    @property
    def reason(self) -> str:
        """What changed, in words; empty when nothing did."""
        with self._condition:
            death, told = self._tidings.death, self._tidings.told
            if death is not None:
                how = f"signal {death['signal']}" if death.get("signal") else ""
                how = how or f"code {death.get('code')}"
                return f"rank {death.get('rank')} of generation {self.generation} died ({how})"
            if told is not None:
                return f"generation {told['generation']} was formed"
            return ""

    def lost(self) -> frozenset[int]:
        """Ranks of this generation whose processes have ended, however they did: none of them can write any more."""
        return self._tidings.lost

    def lost_in(self, generation: int) -> frozenset[int]:
        """The same of this generation or a newer one: some may have ended before they could take their place in it."""
        with self._condition:
            return self._tidings.lost_in(generation)

    def coming(self) -> Place | None:
        """The place of this process in the newest generation that was told and not yet taken."""
        return self._tidings.coming()

    @property
    def stopping(self) -> bool:
        """Whether this process was asked to save and leave; whoever reads this promises to do so."""
        return stops.is_asked()

    def check(self) -> None:
        """Raise GenerationChanged if anything has changed."""
        if self.changed:
            raise GenerationChanged(self.reason, fix="call gang.rejoin()")

    def wait_changed(self, timeout: float | None = None) -> bool:
        """Wait until something has changed; False when it has not by then."""
        with self._condition:
            return self._condition.wait_for(lambda: self.changed, timeout)

    def on_change(self, callback: Callable[[Gang], None]) -> None:
        """Call back from the link's thread when a member has ended or a generation was formed: to abort a collective, say."""
        with self._condition:
            self._callbacks.append(callback)

    def faults(self) -> list[Fault]:
        """Faults that were told to this process since the last call."""
        if not self._faults:
            return []
        with self._condition:
            told, self._faults = self._faults, []
        return told

    def met(self, fault: int) -> None:
        """Report that this process has come to the fault of this number, before it breaks."""
        if self._link is not None:
            self._link.say({"say": "fault", "number": fault})

    # --- the next generation --------------------------------------------------------------------

    def rejoin(self, *, timeout: float = _REJOIN_SECONDS) -> Gang:
        """Wait for a newer generation, take the place it gives this process, and set the environment accordingly."""
        if self._link is None:
            raise ConfigError(
                "a gang of one outside Argosy has no next generation", fix="use `argosy run`"
            )
        deadline = time.monotonic() + timeout
        with self._condition:
            if not self._condition.wait_for(
                lambda: self._tidings.told is not None, deadline - time.monotonic()
            ):
                raise TimeoutError(
                    f"no generation after {self.generation} was formed within {timeout:g} s"
                )
        self.take()
        return self

    def take(self) -> None:
        """Take the place that `coming()` shows: numbers and environment. Nothing is waited for, and without one nothing happens."""
        with self._condition:
            told = self._tidings.take()
            if told is None:
                return
            self._take(told)
        self._say_joined()

    # --- what this process says -----------------------------------------------------------------

    def step(self, number: int) -> None:
        """Report progress; cheap enough for every step."""
        if self._link is not None:
            self._link.step(number)

    def ready(self) -> None:
        """Report that this process is ready."""
        if self._link is not None:
            self._link.ready()

    def bound(
        self, *, least: int, most: int, why: str, keeps_state: bool, hang_seconds: float
    ) -> None:
        """Report how many ranks this program's trainer can use; whether what it trains outlives them; how long one may prepare beyond what others took (0: for ever)."""
        if self._link is not None:
            message = {"say": "bounds", "least": least, "most": most, "why": why}
            more = {"keeps_state": keeps_state, "hang_seconds": hang_seconds}
            self._link.say({**message, **more}, stand="bounds")

    def entered(self) -> None:
        """Report that this process is about to train: from here on its peers see whether it hangs."""
        if self._link is not None:
            self._link.say({"say": "enter"}, stand="enter")

    def saved(self, step: int, path: str) -> None:
        """Report that what the run has come to is saved (without a path: that there was nothing to save); outside Argosy there is only the person to tell."""
        if self._link is not None:
            self._link.say({"say": "saved", "step": step, "path": path}, stand="saved")
        elif path:
            say(f"step {step} is saved in {path}")

    def saving(
        self, step: int, num_bytes: int, total_bytes: int = 0, what: str = "written"
    ) -> None:
        """Report that a save goes on, when bytes were added: once this process was asked to leave, it is not killed as long as it says so."""
        if not stops.was_asked():
            return
        advance = {"step": step, "num_bytes": num_bytes, "total_bytes": total_bytes, "what": what}
        if self._link is not None:
            self._link.say({"say": "saving", **advance})
            return
        now = time.monotonic()
        if now - self._told_saving_at >= TELL_SECONDS:
            self._told_saving_at = now
            say(describe_advance(step, num_bytes, total_bytes, what))

    def warn(self, text: str) -> None:
        """Tell whoever looks after the run of something that it has survived."""
        if self._link is not None:
            self._link.say({"say": "warning", "text": text[:_MOST_REASON]})
        else:
            say(text)

    def inform(self, text: str) -> None:
        """Have something written down among the run's events; nobody is disturbed."""
        if self._link is not None:
            self._link.say({"say": "info", "text": text[:_MOST_REASON]})

    def suspect(self, rank: int, reason: str, *, pid: int = 0) -> None:
        """Ask the runtime to take the stacks of all ranks, then to kill and reap this one; `lost()` shows when it is done.

        A process id names it also when the runtime is a generation ahead of its members.
        """
        message = {"say": "suspect", "rank": rank, "generation": self.generation}
        self._say({**message, "pid": pid} if pid else message, reason)

    def fail(self, reason: str, *, rank: int | None = None) -> None:
        """Say that the run cannot succeed: the runtime ends it with this cause, without a restart. `rank` names a member whose end is the cause."""
        self._say({"say": "fail"} if rank is None else {"say": "fail", "rank": rank}, reason)

    def is_own_process(self) -> bool:
        """False in a forked child of the member."""
        return os.getpid() == self._pid

    def _say(self, message: dict[str, Any], reason: str) -> None:
        if self._link is not None:
            self._link.say({**message, "reason": reason[:_MOST_REASON]})

    def _say_joined(self) -> None:
        if self._link is not None:
            self._link.say({"say": "join", "generation": self.generation}, stand="join")

    def _take(self, told: Mapping[str, Any]) -> None:
        is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
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

    # --- what is told, on the link's thread -----------------------------------------------------

    def _hear(self, frame: dict[str, Any]) -> None:
        with self._condition:
            if not self._note(frame):
                return
            self._condition.notify_all()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(self)

    def _note(self, frame: dict[str, Any]) -> bool:
        """Remember what the frame means for this gang; False if it changes nothing."""
        message = frame.get("message") if frame.get("type") == "told" else None
        if isinstance(message, dict) and message.get("tell") == "fault":
            self._note_fault(message)
            return False
        return self._tidings.note(frame)

    def _note_fault(self, told: dict[str, Any]) -> None:
        step, point = told.get("step"), told.get("point")
        fault = Fault(
            kind=str(told.get("kind", "")),
            step=None if step is None else int(step),
            point=None if point is None else str(point),
            seconds=float(told.get("seconds") or 0.0),
            number=int(told.get("number") or 0),
        )
        # The same fault may be told again after a break of the connection.
        if fault.number and fault.number in self._known_faults:
            return
        self._known_faults.add(fault.number)
        self._faults.append(fault)


def _read_number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.lstrip("-").isdigit() else default
