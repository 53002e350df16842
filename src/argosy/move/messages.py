"""Messages from one rank to another, over Gloo: checked before they are taken, with errors that say who is lost.

groups.py hands every send and receive to the group's `Mail`; pipelining, batches and plain `dist.send` all come through it. Gloo ends the process of a receiver
that has less room than was sent, and fills what it can otherwise. So each message begins with a frame that says what it is (dtype, size, where it was sent): a
small one is all in its frame, a larger one follows without a copy in a slot that the frame names, once the receiver has found it to be what it expects.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from argosy.errors import ArgosyError, ConfigError, MismatchError, NoRoute, PeerLost, TimedOut
from argosy.move import arguments, callsites, counters, torchgroup
from argosy.move.calls import DTYPE_CODES

_HEADER = struct.Struct("<QIHH")
"""Bytes of the message, its slot (0: it is in the frame), its dtype, bytes of the text that follows."""
_FRAME_BYTES = 16 << 10
_MOST_TEXT = 512
SMALL_BYTES = _FRAME_BYTES - _HEADER.size - _MOST_TEXT
"""Up to here a message is in its frame."""
_FIRST_SLOT, _NUM_SLOTS = 1 << 30, 1 << 28
"""Tags from here on are our own."""

Lost = Callable[[Exception, int | None], int | None]


def explained(what: str, failure: Exception, lost: int | None) -> ArgosyError:
    """The error of a failed connection; `lost` is the rank that has ended, if one has."""
    if lost is not None:
        return PeerLost(lost, what)
    if torchgroup.has_timed_out(failure):
        return TimedOut(
            f"{what}: nothing came in time",
            fix="see where that rank is (`argosy stacks`), or give the group a longer timeout",
        )
    return NoRoute(
        f"{what}: Gloo's connection has failed: {failure}",
        fix="see the other ranks' output: one has left the group or failed before",
    )


class Mail:
    """One rank's messages in a group.

    `is_lost` tells whether a rank has ended, and `who_is_lost` which one a failure is due to; for a message from any rank they are asked with None.
    """

    def __init__(
        self,
        gloo: torchgroup.Gloo,
        birth: torchgroup.Birth,
        is_lost: Callable[[int | None], bool],
        who_is_lost: Lost,
    ) -> None:
        self.gloo = gloo
        self._group, self._ranks, self._rank = birth.name, birth.ranks, birth.rank
        self.is_lost = is_lost
        self._who_is_lost = who_is_lost
        self._numbers = itertools.count()

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Message:
        """Begin to send a tensor."""
        _check_tag(tag)
        given = arguments.outgoing(tensors)
        counters.own.gloo_calls += 1
        counters.own.gloo_bytes += given.nbytes
        data = as_bytes(given)
        text = f"send of {_told(given)} at {callsites.find(3)}".encode()[:_MOST_TEXT]
        is_small = given.nbytes <= SMALL_BYTES
        slot = 0 if is_small else _FIRST_SLOT + next(self._numbers) % _NUM_SLOTS
        head = _HEADER.pack(given.nbytes, slot, DTYPE_CODES[given.dtype], len(text)) + text
        frame = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        message = Message(self, "send to", peer)
        if is_small:
            return message.begin(lambda: [self.gloo.send([torch.cat((frame, data))], peer, tag)])
        return message.begin(
            lambda: [self.gloo.send([frame], peer, tag), self.gloo.send([data], peer, slot)],
            is_watched=True,
        )

    def receive(self, tensors: Sequence[torch.Tensor], peer: int | None, tag: int) -> Message:
        """Begin to receive into a tensor, from a rank or from any."""
        _check_tag(tag)
        message = Arrival(self, *arguments.incoming(tensors), peer)
        counters.own.gloo_calls += 1
        counters.own.gloo_bytes += message.num_bytes
        if peer is None:
            message.begin(lambda: [self.gloo.recv_anysource([message.frame], tag)])
        else:
            message.begin(lambda: [self.gloo.recv([message.frame], peer, tag)])
        message.listen()
        return message

    def failure_of(self, verb: str, peer: int | None, failure: Exception) -> Exception:
        """What a failed message raises."""
        if isinstance(failure, torchgroup.Stuck):
            torchgroup.abandon(self.gloo)
        elif isinstance(failure, ArgosyError) or not torchgroup.is_of_wire(failure):
            return failure
        lost = self._who_is_lost(failure, peer)
        name = None if lost is None else self._ranks[lost]
        return explained(f"{verb} {self.name_of(peer)}", failure, name)

    def name_of(self, peer: int | None) -> str:
        """A rank, or any, for people."""
        who = "any rank" if peer is None else f"rank {self._ranks[peer]}"
        return f"{who} in group {self._group}"

    def mismatch(self, source: int, theirs: str, mine: str) -> MismatchError:
        """A message that is not what its receiver expects."""
        return MismatchError(
            f"a message of group {self._group} is not what its receiver expects:\n"
            f"    rank {self._ranks[source]}: {theirs}\n    rank {self._ranks[self._rank]}: {mine}",
            fix="send and receive as many elements of one dtype, in the same order for each tag",
        )


class Message(dist.Work):
    """One message as torch sees it. Where Gloo may not notice its peer's end it is waited for in a thread and the peer is watched."""

    def __init__(self, mail: Mail, verb: str, peer: int | None) -> None:
        super().__init__()
        self._mail, self._verb, self._peer = mail, verb, peer
        self._works: list[Any] = []
        self._is_watched = False
        self._thread: torchgroup.InThread | None = None
        self._is_over = False
        self._failure: Exception | None = None

    def begin(self, start: Callable[[], list[Any]], *, is_watched: bool = False) -> Message:
        """Hand it to Gloo, which may refuse it at once: its peer may be gone already."""
        self._is_watched = is_watched
        try:
            self._works = start()
        except RuntimeError as failure:
            raise self._explained(failure) from failure
        return self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it has been sent or received. After a TimedOut of this wait alone it goes on, and may be waited for again."""
        if self._failure is not None:
            raise self._failure
        seconds = 0.0 if timeout is None else timeout.total_seconds()  # torch says 0 for none
        if not self._is_over:
            try:
                with counters.own.waiting():
                    self._is_over = self._wait(timeout if seconds > 0 else None)
            except (RuntimeError, torchgroup.Stuck, ArgosyError) as failure:
                self._failure = self._explained(failure)
                if self._failure is failure:
                    raise
                raise self._failure from failure
        if not self._is_over:
            raise TimedOut(
                f"{self._verb} {self._mail.name_of(self._peer)}: not over in {seconds:g} s",
                fix="wait for it again: it goes on",
            )
        return True

    def _wait(self, timeout: timedelta | None) -> bool:
        """Whether it is over. Never with a timeout of Gloo's own: that would close the connections of the whole group."""
        if self._thread is None and (self._is_watched or timeout is not None):
            self._thread = torchgroup.InThread(self._finish)
        if self._thread is not None:
            return self._thread.wait(self._is_lost, timeout)
        self._finish()
        return True

    def _finish(self) -> None:
        for work in self._works:
            work.wait()

    def _is_lost(self) -> bool:
        return self._mail.is_lost(self._peer)

    def _explained(self, failure: Exception) -> Exception:
        return self._mail.failure_of(self._verb, self._peer, failure)

    def synchronize(self) -> None:
        """Nothing remains to be waited for on a CPU but the message itself."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, as far as that is known before `wait`: Gloo does not say so."""
        has_ended = self._thread is not None and self._thread.has_ended
        return has_ended or self._is_over or self._failure is not None

    def is_success(self) -> bool:
        """Whether it is over, and well."""
        return self._is_over and self._failure is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._failure

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return []

    def get_future(self) -> torch.futures.Future[Any]:
        """Gloo has none for messages, and says so."""
        future: torch.futures.Future[Any] = self._works[0].get_future()
        return future


class Arrival(Message):
    """A message that comes in: its frame, then perhaps the rest."""

    def __init__(
        self, mail: Mail, memory: torch.Tensor, request: arguments.Request, peer: int | None
    ) -> None:
        super().__init__(mail, "recv from", peer)
        self.frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self.num_bytes = memory.nbytes
        self._memory, self._request = memory, request
        self._site = callsites.find(4)

    def listen(self) -> None:
        """What comes in two parts is received in a thread from now on: the sender may wait for it while this rank does something else."""
        if self._peer is None or self.num_bytes > SMALL_BYTES:
            self._thread = torchgroup.InThread(self._finish)

    def _finish(self) -> None:
        super()._finish()
        num_bytes, slot, code, text_bytes = _HEADER.unpack_from(self.frame.numpy().data)
        start = _HEADER.size + text_bytes
        if (num_bytes, code) != (self.num_bytes, DTYPE_CODES[self._memory.dtype]):
            if slot:
                # Taken and dropped: the sender is not kept waiting, and the connection stays in order.
                self._receive_rest(torch.empty(num_bytes, dtype=torch.uint8), slot)
            theirs = self.frame[_HEADER.size : start].numpy().tobytes().decode(errors="replace")
            mine = f"recv of {_told(self._memory)} at {self._site}"
            raise self._mail.mismatch(self._source_rank(), theirs, mine)
        # In whichever thread this runs: the caller's tensors may be of its inference mode.
        with torch.inference_mode():
            data = as_bytes(self._memory)
            if slot:
                self._receive_rest(data, slot)
            else:
                data.copy_(self.frame[start : start + num_bytes])
        self._request.finish()

    def _receive_rest(self, into: torch.Tensor, slot: int) -> None:
        self._mail.gloo.recv([into], self._source_rank(), slot).wait()

    def result(self) -> list[torch.Tensor]:
        """The tensor."""
        return list(self._request.result)

    def _source_rank(self) -> int:
        return torchgroup.source_of(self._works[0]) if self._peer is None else self._peer


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Gloo does not know all dtypes; bytes it does."""
    return tensor.view(-1).view(torch.uint8)


def _told(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tensor.numel()} x {dtype}, shape {tuple(tensor.shape)}"


def _check_tag(tag: int) -> None:
    if not 0 <= tag < _FIRST_SLOT:
        raise ConfigError(f"tag {tag} of a message", fix=f"use 0 to {_FIRST_SLOT - 1}")
