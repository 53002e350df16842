"""Blobs in the controller: environments and secrets of runs that are alive, in memory alone.

They pass through here on their way to the keepers, and a new controller asks the keepers for them. They are kept for one case: keeper and
agent of this machine die together, and the controller has to start the next keeper. Nothing of them is ever written or logged.
"""

from __future__ import annotations

import fcntl
import os

from argosy.control.keeperlink import Held
from argosy.control.tally import Tally

_MOST_UNUSED = 32
"""Those of a run that is just being submitted are not in the log yet."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Blobs:
    """Values by digest."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._values: dict[str, str] = {}

    def keep(self, name: str, value: str) -> None:
        """Remember one that is being given out; of those that no live run needs, only the newest are kept."""
        self._values.pop(name, None)
        self._values[name] = value
        if len(self._values) <= _MOST_UNUSED:
            return
        needed = self._tally.blobs()
        unused = [key for key in self._values if key not in needed]
        for key in unused[:-_MOST_UNUSED]:
            del self._values[key]

    def missing(self) -> list[str]:
        """What live runs need and this controller does not have."""
        return sorted(self._tally.blobs() - self._values.keys())

    def hold_all(self) -> Held:
        """Sealed descriptors of all that live runs need, to be handed to a new keeper."""
        held = Held()
        for name in self._tally.blobs() & self._values.keys():
            data = self._values[name].encode()
            descriptor = os.memfd_create("argosy-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.lseek(descriptor, 0, os.SEEK_SET)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            frame = {"kind": "blob", "name": name, "run": "", "scope": "", "size": len(data)}
            held.hold(frame, descriptor)
        return held
