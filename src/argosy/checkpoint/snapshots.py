"""A snapshot beside training: copied in the background into warm memory, with one gate before the optimizer's next step.

Parameters and the optimizer's state change in the optimizer's step and nowhere else: they are copied while forward and backward run, and the step waits for
the rest, helping with it. Everything else is copied before `save` returns. Whoever changes a parameter by hand meanwhile makes the save fail, as far as
torch counts the change (guards.py): a torn snapshot is not kept. Knows nothing of files and writers.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import torch

from argosy.checkpoint.captures import MOST_CLONED_BYTES
from argosy.checkpoint.entries import Entry
from argosy.checkpoint.gathering import TensorSource
from argosy.checkpoint.guards import Guards, SnapshotTorn, version_of
from argosy.checkpoint.layouts import FileImage, Image
from argosy.checkpoint.shares import HEADER, Duty
from argosy.errors import ArgosyError

Mode = Literal["auto", "gated", "blocking"]


class Copy:
    """One copy of a state into memory that is laid out by duties; several threads may work on it.

    It is planned before it runs: in the call, or later where all that may change at once was set aside in the call (`is_captured`).
    """

    def __init__(self, guards: Guards, *, is_captured: bool) -> None:
        self._guards = guards
        self.is_captured = is_captured
        self.how: Literal["gated", "blocking"] = "gated"
        self.is_all_late = is_captured
        """Whether `save` need not wait for any of it."""
        self.source: TensorSource | None = None
        self._watched: list[tuple[str, torch.Tensor, int]] = []
        self._names: dict[int, str] = {}
        """Of what is guarded, by address."""
        self._duties: Sequence[Duty] = ()
        self._places: Sequence[int] = ()
        self._early: deque[int] = deque()
        self._late: deque[int] = deque()
        self._left = 0
        self._lock = threading.Lock()
        self._address: int | None = None
        self._is_ready = threading.Event()
        self._are_copied = threading.Event()
        self.is_released = threading.Event()
        """What may change at once has been copied."""
        self.is_over = threading.Event()
        """Copied or given up: everything may change."""
        self.failure: BaseException | None = None
        self.waited_seconds = 0.0
        """How long training has waited for it."""

    def plan(
        self, image: Image, entries: Sequence[Entry], duties: Sequence[Duty], places: Sequence[int]
    ) -> None:
        """Say what is copied, and whither."""
        addresses = self._guards.addresses
        safe = {entry.name for entry in entries if _is_guarded(entry, addresses)}
        self._names = {entry.address: entry.name for entry in entries if entry.name in safe}
        if self.is_captured:
            late = set(range(len(duties)))
        else:
            # These may have a count of changes of their own, over memory of an optimizer.
            self._watched = [
                (entry.name, buffer, version_of(buffer))
                for entry in entries
                if entry.name in safe
                for buffer in entry.buffers
            ]
            entries, cloned = _set_aside(entries, safe)
            late = _untouched(image, duties, safe | cloned) if safe else set[int]()
        self.source = TensorSource(image, entries)
        self._duties, self._places, self._left = duties, places, len(duties)
        self._early.extend(one for one in range(len(duties)) if one not in late)
        self._late.extend(sorted(late))
        self.how = "gated" if late else "blocking"
        self.is_all_late = not self._early

    def run(self, address: int) -> None:
        """Copy everything; SnapshotTorn when something has changed meanwhile."""
        self._address = address
        self._work(self._early)
        if self.how == "gated":
            self.is_released.set()
        self._is_ready.set()
        self._work(self._late)
        self._are_copied.wait()
        if self.failure is not None:
            raise self.failure
        self.check()

    def check(self) -> None:
        """SnapshotTorn when a tensor is not as it was when the copy was asked for."""
        changed = [name for name, one, version in self._watched if version_of(one) != version]
        address = self._guards.changed()
        if address is not None:
            changed.append(self._names.get(address, "a tensor of the optimizer"))
        if changed:
            raise SnapshotTorn(
                f"{changed[0]} was changed while its snapshot was taken, not by its optimizer's step",
                fix='wait for the save with handle.wait("staged") before that, or give the Checkpointer writing=Writing(snapshot="blocking")',
            )

    def end(self) -> None:
        """Copied or given up: nobody waits for it any more."""
        self._is_ready.set()
        self.is_released.set()
        self.is_over.set()

    def help(self) -> None:
        """Wait for its end, and work on it meanwhile: for the thread that wants to change what is copied."""
        begun = time.monotonic()
        self._is_ready.wait()
        if self._address is not None:
            self._work(self._late)
        self.is_over.wait()
        self.waited_seconds += time.monotonic() - begun

    def _work(self, numbers: deque[int]) -> None:
        assert self._address is not None
        assert self.source is not None
        if not self._duties:
            self._are_copied.set()
        while True:
            try:
                number = numbers.popleft()
            except IndexError:
                return
            try:
                if self.failure is None:
                    self.source.fill(self._duties[number], self._address + self._places[number])
            except (ArgosyError, RuntimeError) as failure:
                self.failure = failure
            except BaseException as failure:
                # An interrupt of the thread that helps is that thread's; the copy is not whole all the same.
                self.failure = failure
                raise
            finally:
                with self._lock:
                    self._left -= 1
                    if not self._left:
                        self._are_copied.set()


class Gates:
    """Hooks before the steps of optimizers: each waits for the copy that is under way."""

    def __init__(self) -> None:
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = (
            weakref.WeakKeyDictionary()
        )
        self.copy: Copy | None = None

    def guard(self, optimizers: Iterable[torch.optim.Optimizer], copy: Copy) -> None:
        """From now on these wait for this copy."""
        self.copy = copy
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def wait(self) -> None:
        """Until what is being saved may change."""
        if self.copy is not None:
            self.copy.help()
            self.copy = None

    def open(self) -> None:
        """Take the hooks away."""
        self.wait()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _before_step(self, *_: Any) -> None:
        self.wait()


def _is_guarded(entry: Entry, guarded: Set[int]) -> bool:
    return bool(guarded) and all(
        not buffer.numel() or buffer.data_ptr() in guarded for buffer in entry.buffers
    )


def _set_aside(entries: Sequence[Entry], safe: set[str]) -> tuple[list[Entry], set[str]]:
    """Entries with copies of the small ones that may change at once, and the names of those."""
    loose = [entry for entry in entries if entry.name not in safe]
    taken = sum(buffer.nbytes for entry in loose for buffer in entry.buffers)
    if not safe or taken > MOST_CLONED_BYTES:
        return list(entries), set()
    cloned: set[str] = set()
    kept = []
    for entry in entries:
        if entry.name not in safe and all(one.is_contiguous() for one in entry.buffers):
            entry = replace(entry, buffers=[one.clone() for one in entry.buffers])
            cloned.add(entry.name)
        kept.append(entry)
    return kept, cloned


def _untouched(image: Image, duties: Sequence[Duty], safe: set[str]) -> set[int]:
    """Numbers of the duties in which nothing may change before the gate opens."""
    starts = [[slot.offset for slot in file.slots] for file in image.files]
    return {
        number
        for number, duty in enumerate(duties)
        if _is_safe(image.files[duty.file], starts[duty.file], duty, safe)
    }


def _is_safe(file: FileImage, starts: list[int], duty: Duty, safe: set[str]) -> bool:
    if duty.fragments is not None:
        own = [one.slot for one in duty.fragments if one.slot != HEADER]
        return all(file.slots[place].name in safe for place in own)
    first = max(0, bisect_right(starts, duty.start) - 1)
    for slot in islice(file.slots, first, None):
        if slot.offset >= duty.stop:
            break
        if slot.stop > duty.start and slot.name not in safe:
            return False
    return True
