"""Arenas: shared memory with a directory of named tensors, which several processes map.

`create` and `open` by name: of the keeper inside a run, so that an arena outlives the rank that made it, private to the process and its forks
otherwise. Allocations are aligned to 4 KiB and never move; each tensor has a storage of its own, which keeps the mapping alive.
Data is not guarded: who may write which tensor when is the caller's business.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator, Sequence

import torch

from argosy.errors import ArenaGone, ConfigError
from argosy.move import adoption, broker, hostmemory
from argosy.move.broker import SECONDS, Grant, Scope, release
from argosy.move.directory import Directory, Entry, Request, file_bytes
from argosy.move.mapping import WORD_BYTES, Mapping, Words, request_for
from argosy.move.pools import Pool

__all__ = ["Arena", "Pool", "Words", "attach", "create", "open", "release"]

_FUTURE_WRITE = 0x0010
"""F_SEAL_FUTURE_WRITE: who has it mapped writes on, nobody else ever can."""


def create(
    name: str,
    size: int,
    *,
    scope: Scope = "process",
    timeout: float = SECONDS,
    prefault: bool = True,
) -> Arena:
    """Make an arena with room for `size` bytes, or get the one that is there with this name, size and scope.

    `process`: it ends with its last user; `run`: it is kept until the run ends. All its memory is taken now, or NoRoom is raised.
    """
    size = broker.checked_size(name, size)
    grant = broker.create(name, file_bytes(size), scope=scope, timeout=timeout)
    with _given_back_on_failure(grant):
        hostmemory.reserve(grant.descriptor, grant.size, f"arena {name!r}")
        return Arena(grant, is_new=True, is_prefaulted=prefault)


def open(name: str, *, timeout: float = SECONDS, prefault: bool = True) -> Arena:
    """Map an arena that a process of this run has made; a sealed one is opened as a reader."""
    grant = broker.open(name, timeout=timeout)
    with _given_back_on_failure(grant):
        return Arena(grant, is_prefaulted=prefault)


def attach(descriptor: int, *, prefault: bool = True) -> Arena:
    """Map an arena whose descriptor a peer has handed over; the descriptor belongs to the arena, also when this fails."""
    try:
        size = os.fstat(descriptor).st_size
    except OSError as failure:
        raise ArenaGone(
            f"descriptor {descriptor} cannot be used: {failure.strerror}",
            fix="attach a descriptor once, while it is open",
        )
    grant = Grant("", descriptor, size, broker.current_run())
    with _given_back_on_failure(grant):
        return Arena(grant, is_prefaulted=prefault)


@contextlib.contextmanager
def _given_back_on_failure(grant: Grant) -> Iterator[None]:
    """Whatever ends the block early, Ctrl-C too: the grant does not stay behind."""
    try:
        yield
    except BaseException:
        broker.close(grant)
        raise


class Arena:
    """One mapped arena. Closing it gives up the name and the descriptor; tensors keep their memory."""

    def __init__(
        self,
        grant: Grant,
        *,
        is_new: bool = False,
        is_reader: bool = False,
        is_prefaulted: bool = True,
    ) -> None:
        self.is_reader = is_reader or is_sealed(grant.descriptor)
        """Whether writes stay in this process."""
        self._mapping: Mapping | None = Mapping(
            grant.descriptor, grant.size, is_private=self.is_reader, is_prefaulted=is_prefaulted
        )
        self._directory = Directory(self._mapping.memory, grant.descriptor)
        if is_new:
            self.identity = self._directory.initialise(grant.name, grant.run)
        else:
            self.identity = self._directory.identify(grant.name, grant.run)
        self.name = self.identity.name
        self.size = self._directory.capacity
        self._grant = grant
        self._finalizer = weakref.finalize(self, broker.abandon, grant)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        kind = "reader of " if self.is_reader else ""
        return f"<{kind}arena {self.name!r}, {self.size} bytes>"

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A new tensor; its bytes are zero, since memory of an arena is used once."""
        return self.empty_all([request_for(shape, dtype, name or "", strides)])[0]

    def empty_all(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """Several at once: all of them or none."""
        mapping = self._writable()
        if not requests:
            return []
        return [_tensor(mapping, entry) for entry in self._directory.append(requests)]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, made in whichever process."""
        return _tensor(self._open(), self._find(name, "tensor"))

    def words(self, name: str, count: int) -> Words:
        """The array of words of that name; made, all zero, by whoever asks first."""
        mapping = self._open()
        if count <= 0:
            raise ConfigError(f"words {name!r}: {count} of them", fix="ask for one or more")
        request = Request(num_bytes=count * WORD_BYTES, kind="words", name=name)
        if self._directory.find(name) is None:
            self._writable()
            try:
                self._directory.append([request])
            except ConfigError:
                pass  # another process was first
        entry = self._find(name, "words")
        if entry.num_bytes != request.num_bytes:
            raise ConfigError(
                f"arena {self.name!r} has {entry.num_bytes // WORD_BYTES} words {name!r}, not {count}",
                fix="ask for the same number everywhere",
            )
        return Words(mapping, entry.offset, count)

    def adopt(self, module: torch.nn.Module, *, prefix: str = "") -> list[str]:
        """Move a module's parameters and buffers in; the same Parameter objects, strides, ties and hooks. Their names."""
        return adoption.adopt(self, module, prefix)

    def bind(self, module: torch.nn.Module, *, prefix: str = "") -> list[str]:
        """Point a like module at what another process has adopted; nothing is copied."""
        return adoption.bind(self, module, prefix)

    def is_inside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's elements lie in this mapping."""
        return self._open().contains(tensor)

    def storage(self, entry: Entry) -> torch.UntypedStorage:
        """The storage of an entry."""
        return self._open().storage(entry.offset, entry.num_bytes)

    def allocate(self, requests: Sequence[Request]) -> list[Entry]:
        """Entries without tensors, for who lays several tensors into one of them."""
        self._writable()
        return self._directory.append(requests) if requests else []

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where in the memfd a tensor begins: with `at`, how a peer finds an unnamed one."""
        mapping = self._open()
        if not mapping.contains(tensor):
            raise ConfigError(f"the tensor does not lie in arena {self.name!r}", fix="use empty()")
        return mapping.offset_of(tensor)

    def at(
        self,
        offset: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The tensor at an offset that a peer has told."""
        return self._open().tensor(offset, shape, dtype, strides)

    def names(self) -> list[str]:
        """All names in the directory, in the order of their making."""
        self._open()
        return [entry.name for entry in self._directory.entries() if entry.name]

    def find(self, name: str) -> Entry | None:
        """The directory's entry of a name."""
        self._open()
        return self._directory.find(name)

    @property
    def memory(self) -> memoryview:
        """All bytes of the memfd: header, allocations, directory."""
        return self._open().memory

    @property
    def address(self) -> int:
        """Where the mapping begins in this process."""
        return self._open().address

    def fileno(self) -> int:
        """The memfd's descriptor."""
        self._open()
        return self._grant.descriptor

    def reader(self) -> Arena:
        """The same arena by a private mapping: reads share its pages, a stray write becomes a copy of this process alone.

        A page that was never written here still shows what the owner writes later.
        """
        self._open()
        grant = Grant("", os.dup(self._grant.descriptor), self._grant.size, self._grant.run)
        with _given_back_on_failure(grant):
            return Arena(grant, is_reader=True, is_prefaulted=False)

    def seal(self) -> None:
        """From now on nobody else can map it for writing; mappings that exist, this one too, stay writable."""
        self._writable()
        seals = _FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        try:
            fcntl.fcntl(self._grant.descriptor, fcntl.F_ADD_SEALS, seals)
        except PermissionError:
            raise ConfigError(
                f"arena {self.name!r} takes no further seals",
                fix="restart the cluster: argosy down",
            )

    def statistics(self) -> dict[str, int]:
        """Bytes and counts: size, used, free, directory, tensors, words."""
        self._open()
        return self._directory.statistics()

    def close(self) -> None:
        """Give it up here; tensors, words and views keep the mapping until they die. Again is fine."""
        if self._finalizer.detach() is not None:
            self._mapping = None
            del self._directory
            broker.close(self._grant)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _find(self, name: str, kind: str) -> Entry:
        entry = self._directory.find(name)
        if entry is None or entry.kind != kind:
            raise ArenaGone(
                f"arena {self.name!r} has no {kind} named {name!r}"
                + (f", but {entry.kind}" if entry is not None else ""),
                fix=f"it has: {', '.join(self.names()[:8]) or 'no names yet'}",
            )
        return entry

    def _open(self) -> Mapping:
        if self._mapping is None:
            raise ArenaGone(f"arena {self.name!r} is closed", fix="open it again by its name")
        return self._mapping

    def _writable(self) -> Mapping:
        mapping = self._open()
        if self.is_reader:
            raise ConfigError(
                f"arena {self.name!r} is a reader's view",
                fix="allocate in the process that owns it",
            )
        return mapping


def is_sealed(descriptor: int) -> bool:
    """Whether new writable mappings are refused; ArenaGone for a descriptor of something else than a memfd."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise ArenaGone(
            f"descriptor {descriptor} is no memfd", fix="hand over the fileno() of an arena"
        )
    return bool(seals & (_FUTURE_WRITE | fcntl.F_SEAL_WRITE))


def _tensor(mapping: Mapping, entry: Entry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ArenaGone(f"{entry.name!r} has dtype {entry.dtype!r}, which this torch does not know")
    return mapping.tensor(entry.offset, entry.shape, dtype, entry.strides)
