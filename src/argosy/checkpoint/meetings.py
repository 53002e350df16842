"""How the processes of a group come to a name that no other group has, over a board on which an earlier group of the same ranks may have left all that it said.

The store of torchrun outlives a restart: whatever is found there may be of the generation before. So each process says a word that nobody can have said before, the lowest rank says
a session with all the words it has heard, until every other has found its own among them and has said so. Called by groups.py when the ranks first need each other. No torch.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from argosy.checkpoint.boards import Board, longest_pause
from argosy.errors import TimedOut

_SESSION = "session"
_FIX = "make the Checkpointer on every rank and call it on all; group=Group() is for one that saves alone"


class _Invitation(msgspec.Struct, frozen=True):
    """What the lowest rank says."""

    session: str
    heard: tuple[str, ...]


_INVITATION = msgspec.json.Decoder(_Invitation)


def meet(board: Board, rank: int, size: int, seconds: float) -> str:
    """The session's name, the same in all processes that call this at once; TimedOut names who has not come."""
    deadline = time.monotonic() + seconds
    if rank == 0:
        return _invite(board, size, deadline)
    return _come(board, rank, deadline, longest_pause(size))


def _invite(board: Board, size: int, deadline: float) -> str:
    session = secrets.token_hex(6)
    heard = [""] * size
    missing = list(range(1, size))
    pause = 0.001
    is_said = False
    while missing:
        words = [(rank, _found(board, f"word-{rank:05d}")) for rank in missing]
        for rank, word in words:
            if word != heard[rank]:
                heard[rank], is_said = word, False
        if not is_said:
            board.post(_SESSION, msgspec.json.encode(_Invitation(session, tuple(heard))))
            is_said = True
        missing = [rank for rank in missing if _found(board, f"came-{rank:05d}") != session]
        if missing and time.monotonic() > deadline:
            raise TimedOut(
                f"ranks {missing} have not come to save or load",
                fix=_FIX,
            )
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
    return session


def _come(board: Board, rank: int, deadline: float, longest: float) -> str:
    key, word = f"word-{rank:05d}", secrets.token_hex(8).encode()
    pause = 0.001
    while True:
        said = board.find(_SESSION)
        invitation = None if said is None else _INVITATION.decode(said)
        if invitation is not None and invitation.heard[rank : rank + 1] == (word.decode(),):
            board.post(f"came-{rank:05d}", invitation.session.encode())
            return invitation.session
        if time.monotonic() > deadline:
            raise TimedOut(
                "rank 0 has not come to save or load",
                fix=_FIX,
            )
        if board.find(key) != word:
            board.post(key, word)  # first, or after one of the group before that was late
        time.sleep(pause)
        pause = min(longest, pause * 1.5)


def _found(board: Board, key: str) -> str:
    return (board.find(key) or b"").decode()
