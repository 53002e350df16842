"""Blobs in the controller: environments and secrets of runs that are alive, in memory alone.

They pass through here on their way to the keepers, and a new controller asks the keepers for them. They are kept for one case: keeper and
agent of this machine die together, and the controller has to start the next keeper. Nothing of them is ever written or logged.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterable

from argosy.control.keeperlink import Held
from argosy.control.tally import Tally

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Blobs:
    """Values by digest."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._values: dict[str, str] = {}
        self._pinned: Counter[str] = Counter()
        """Those of runs that are just being submitted, and are not in the log yet."""

    def pin(self, name: str, value: str) -> None:
        """Keep one that is being given out, until it is unpinned and no live run needs it."""
        self._values[name] = value
        self._pinned[name] += 1

    def unpin(self, names: Iterable[str]) -> None:
        """The submission is in the log, or was refused."""
        for name in names:
            self._pinned[name] -= 1
            if not self._pinned[name]:
                del self._pinned[name]
                self.put_back([name])

    def learn(self, name: str, value: str) -> None:
        """Keep one that a keeper had, if a live run still needs it."""
        if self._tally.is_needed(name):
            self._values[name] = value

    def take_unneeded(self) -> list[str]:
        """Forget those that nobody needs any more, and name them: the keepers may forget them too."""
        names = sorted(self._tally.unneeded - self._pinned.keys())
        self._tally.unneeded -= set(names)
        for name in names:
            self._values.pop(name, None)
        return names

    def put_back(self, names: Iterable[str]) -> None:
        """Name them as unneeded again, unless they have become needed."""
        self._tally.unneeded |= {name for name in names if not self.is_wanted(name)}

    def is_wanted(self, name: str) -> bool:
        """A live run, or one that is being submitted, needs it."""
        return name in self._pinned or self._tally.is_needed(name)

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
