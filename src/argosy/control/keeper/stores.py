"""The TCPStore of a gang's generation: its port, and the helper that hosts it.

The port is listened on before anything is started, so a connect waits instead of failing. With a warm parent a helper
serves it; otherwise the port is only held and rank 0 hosts. One store per run and role: a newer generation ends the older.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from argosy.control.keeper.attempts import Attempt
from argosy.control.keeper.ports import LOOPBACK, PortError, bind_port
from argosy.control.keeper.state import Keeper


@dataclass
class Store:
    """One generation's store."""

    run: str
    role: str
    generation: int
    host: str
    port: int
    socket: socket.socket | None
    is_hosted: bool = False
    """A helper serves it; else rank 0 does."""
    helper: str = ""
    """attempt id of the helper"""
    is_decided: bool = False
    """It is known who hosts it."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Called when that is known."""

    def when_decided(self, then: Callable[[], None]) -> None:
        """Call when it is known who hosts it, now if it is."""
        if self.is_decided:
            then()
        else:
            self.waiting.append(then)

    def decide(self, *, is_hosted: bool) -> None:
        """A helper will host it, or rank 0 must."""
        self.is_hosted, self.is_decided = is_hosted, True
        waiting, self.waiting = self.waiting, []
        for then in waiting:
            then()

    def variables(self) -> dict[str, str]:
        """What it adds to the environment of a member."""
        return {
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.is_hosted),
        }

    def reply(self) -> dict[str, Any]:
        """For the reply to `spawn`."""
        return {"host": self.host, "port": self.port, "hosted": self.is_hosted}


class Stores:
    """The stores of this host, by run and role."""

    def __init__(self, keeper: Keeper, kill: Callable[[Attempt], None]) -> None:
        self.keeper = keeper
        self.kill = kill
        self._stores: dict[tuple[str, str], Store] = {}

    def make(self, run: str, role: str, generation: int, host: Any) -> tuple[Store, bool]:
        """(store, whether it is new); raises PortError."""
        old = self._stores.get((run, role))
        if old is not None and old.generation == generation:
            return old, False
        if not isinstance(host, str) or not host:
            host = LOOPBACK
        sock = bind_port(host, 0)
        try:
            sock.listen(1024)
        except OSError as error:
            sock.close()
            raise PortError(f"the store of {run}/{role} cannot listen: {error.strerror}")
        store = Store(run, role, generation, host, sock.getsockname()[1], sock)
        if old is not None:
            self._end(old)
        self._stores[run, role] = store
        return store, True

    def make_helper(self, store: Store) -> Attempt:
        """The attempt that will host it, for the front of the batch."""
        name = f"store-{store.run}-{store.role}-{store.generation}"[:190]
        helper = Attempt(
            order={}, attempt=name, run=store.run, role=store.role, index=-1, is_helper=True
        )
        helper.generation = store.generation
        helper.listener = store.socket
        store.helper = name
        store.is_hosted = True  # for those that are forked with it; it is decided when it is there
        self.keeper.enter(helper)
        return helper

    def handed_over(self, store: Store) -> None:
        """The helper has the listening socket: the keeper's own would keep the port after its death."""
        if store.socket is not None:
            store.socket.close()
            store.socket = None
        store.decide(is_hosted=True)

    def leave_to_rank_zero(self, store: Store) -> None:
        """No helper: hold the port, bound and not listening, so that rank 0 can listen on it."""
        store.helper = ""
        store.decide(is_hosted=False)
        if store.socket is None:
            store.socket = bind_port(store.host, store.port)
            return
        # Closing and binding anew would race with whoever still has a copy of it, as a warm parent that refused the helper.
        with contextlib.suppress(OSError):  # it did not listen
            store.socket.shutdown(socket.SHUT_RDWR)

    def variables_of(self, run: str, role: str) -> dict[str, str]:
        """What a member that enters now must know; empty without a store."""
        store = self._stores.get((run, role))
        return store.variables() if store is not None else {}

    def member_ended(self, attempt: Attempt) -> None:
        """Hook of exits: a store without members ends; a helper that died is missed."""
        store = self._stores.get((attempt.run, attempt.role))
        if store is None:
            return
        if attempt.is_helper:
            if store.helper == attempt.attempt and store.is_hosted:
                store.is_hosted = False
                self.keeper.outbox.note(
                    f"the host of the store of {store.run}/{store.role} died; "
                    "members that still need it will fail",
                    run=store.run,
                )
            return
        if not self.keeper.num_unended[attempt.run, attempt.role]:
            self._stores.pop((attempt.run, attempt.role))
            self._end(store)

    def run_ended(self, run: str) -> None:
        """End all stores of a run."""
        for key in [key for key in self._stores if key[0] == run]:
            self._end(self._stores.pop(key))

    def to_state(self) -> list[dict[str, Any]]:
        """For a successor program."""
        return [
            {
                "run": store.run,
                "role": store.role,
                "generation": store.generation,
                "host": store.host,
                "port": store.port,
                "fd": store.socket.fileno() if store.socket is not None else -1,
                "is_hosted": store.is_hosted,
                "helper": store.helper,
            }
            for store in self._stores.values()
        ]

    def take_state(self, state: list[dict[str, Any]]) -> None:
        """Go on with the predecessor's stores."""
        for saved in state:
            fd = saved.pop("fd")
            sock = socket.socket(fileno=fd) if fd >= 0 else None
            store = Store(**saved, socket=sock, is_decided=True)
            self._stores[store.run, store.role] = store

    def _end(self, store: Store) -> None:
        if store.socket is not None:
            store.socket.close()
            store.socket = None
        helper = self.keeper.attempts.get(store.helper)
        store.helper = ""
        store.decide(is_hosted=False)
        if helper is not None:
            self.kill(helper)
