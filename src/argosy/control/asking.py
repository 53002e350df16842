"""Asking the controller: a client that knows which cluster it asks, waits for a part that is being replaced, and says what is wrong.

Used by submission and by every verb of the command line; quick to import. It starts nothing, and asks again only what nobody has heard or what reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from argosy import __version__
from argosy.control.home import Cluster
from argosy.errors import ArgosyError, ClusterError, ConfigError, NotFoundError, ProtocolError
from argosy.protocol.httpclient import Client, unreachable

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

ANSWER_SECONDS = 30.0
RETURN_SECONDS = 10.0
"""So long a part of the cluster that is being replaced is waited for."""
_PAUSE_SECONDS = 0.01
_ABSENT = (FileNotFoundError, ConnectionRefusedError)
_CUT = (ConnectionResetError, BrokenPipeError)


class ControllerClient(Client):
    """Asks the controller of one cluster, and looks for a stopped part when no answer comes."""

    def __init__(self, cluster: Cluster, *, return_seconds: float = RETURN_SECONDS) -> None:
        super().__init__(
            cluster.http_socket, timeout_seconds=ANSWER_SECONDS, on_silence=self._find_stopped
        )
        self.cluster = cluster
        self._return_seconds = return_seconds

    def reach(self, ask: Callable[[], Any], *, is_reading: bool = False) -> Any:
        """Ask; a connection that fails becomes an error for people, and so does a cluster of another version."""
        try:
            return self._patiently(ask, is_reading=is_reading)
        except OSError as error:
            if isinstance(error, _ABSENT):
                self._check_dead()
            raise unreachable(error, self.path)
        except (ConfigError, NotFoundError, ProtocolError) as error:
            raise self.blame_version(error)

    def status(self) -> dict[str, Any] | None:
        """The status of the cluster, None when there is none; ClusterError when there is one that cannot be asked."""
        try:
            found: dict[str, Any] = self._patiently(lambda: self.get("/v1/status"), is_reading=True)
            return found
        except _ABSENT:
            self._check_dead()
            return None
        except OSError as error:
            raise unreachable(error, self.path)

    def blame_version(self, error: ArgosyError) -> ArgosyError:
        """The error, unless the cluster is of another version: then that is what is wrong."""
        try:
            version = self.get("/v1/status").get("version")
        except (OSError, ArgosyError, AttributeError):
            return error
        if version == __version__:
            return error
        return ProtocolError(
            f"the cluster runs Argosy {version}, this command is {__version__} ({error.what})",
            fix="`argosy down`, then try again; or use the other version, or another ARGOSY_HOME",
        )

    def _patiently(self, ask: Callable[[], Any], *, is_reading: bool) -> Any:
        """Ask; again while somebody can be expected to come back, but not for ever."""
        deadline = time.monotonic() + self._return_seconds
        while True:
            try:
                return ask()
            except _ABSENT:
                if time.monotonic() > deadline or not self._is_succeeding():
                    raise
            except _CUT:
                if not is_reading or time.monotonic() > deadline or not self._is_alive():
                    raise
            time.sleep(_PAUSE_SECONDS)

    def _check_dead(self) -> None:
        """After nobody has listened."""
        if self._is_alive():
            raise out_of_reach(self.path)

    def _is_alive(self) -> bool:
        from argosy.control.stalled import is_alive

        return is_alive(self.cluster)

    def _is_succeeding(self) -> bool:
        from argosy.control.stalled import is_succeeding

        return is_succeeding(self.cluster)

    def _find_stopped(self) -> None:
        from argosy.control.stalled import check_parts

        check_parts(self.cluster)


def out_of_reach(path: str) -> ClusterError:
    """What to tell a person when a cluster lives and cannot be asked."""
    return ClusterError(
        f"a cluster is running, but nobody listens on {path}",
        fix="`argosy down --force` ends it with everything in it",
    )
