"""Terminal: this terminal connected to a process that has one.

Called by `argosy attach`, `argosy run --tty` and `argosy exec --tty`. What is typed goes to the keeper; what is shown is read
from the process's log, which the keeper writes first, so nothing printed before the connection is missing or doubled.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from argosy.cli.output import write_all
from argosy.errors import ClusterError, ProtocolError

DETACH_KEY = b"\x1d"
"""Ctrl-]"""
VERSION = 1
_LENGTH = struct.Struct(">I")
_COPY_BYTES = 64 << 10


def converse(keeper_socket: str, attempt: str, log: str, *, show_from: int = 0) -> bool:
    """Connect until the process ends (True) or the person presses Ctrl-] (False). `show_from`: offset in the log."""
    connection = _attach(keeper_socket, attempt)
    if os.isatty(0):
        sys.stderr.write("argosy: attached; Ctrl-] detaches\n")
        sys.stderr.flush()
    position = show_from
    is_detached = False
    try:
        # Raw before the first byte is shown: what is typed at a prompt must not be meant for this command.
        with _raw_terminal() as winch:
            position = _copy(log, position)
            _send_size(keeper_socket, attempt)
            watched = [connection.fileno(), 0, winch]
            while not is_detached:
                readable, _, _ = select.select(watched, [], [])
                if winch in readable:
                    _empty(winch)
                    _send_size(keeper_socket, attempt)
                if 0 in readable:
                    typed = os.read(0, 4096)
                    before, key, _ = typed.partition(DETACH_KEY)
                    if before:
                        connection.sendall(before)
                    is_detached = bool(key)
                    if not typed:
                        watched.remove(0)
                if connection.fileno() in readable:
                    is_over = not _receive(connection)
                    position = _copy(log, position)
                    if is_over:
                        return True
    except (BrokenPipeError, ConnectionResetError):
        _copy(log, position)
        return True
    finally:
        connection.close()
    return False


def _attach(keeper_socket: str, attempt: str) -> socket.socket:
    connection, answer = _hello(keeper_socket, {"as": "attach", "attempt": attempt})
    if answer.get("type") != "welcome":
        connection.close()
        raise ClusterError(
            f"the keeper refused: {answer.get('what', answer)}",
            fix=str(
                answer.get("fix") or "a terminal is given with --tty when a process is started"
            ),
        )
    return connection


def _send_size(keeper_socket: str, attempt: str) -> None:
    try:
        size = os.get_terminal_size(1)
    except OSError:
        return
    hello = {"as": "resize", "attempt": attempt, "rows": size.lines, "columns": size.columns}
    try:
        connection, _ = _hello(keeper_socket, hello)
        connection.close()
    except (OSError, ProtocolError):
        # A wrong window size is no reason to end a conversation.
        pass


def _hello(keeper_socket: str, hello: dict[str, object]) -> tuple[socket.socket, dict[str, object]]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(10.0)
        connection.connect(keeper_socket)
        body = json.dumps({"type": "hello", "version": VERSION, **hello}).encode()
        connection.sendall(_LENGTH.pack(len(body)) + body)
        (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
        if length > 1 << 20:
            raise ProtocolError("the keeper's answer is no frame")
        answer = json.loads(_read_exactly(connection, length))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, answer


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ProtocolError(
                "the keeper closed the connection", fix="see keeper.log in the cluster's directory"
            )
        data += piece
    return data


def _receive(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(_COPY_BYTES))
    except ConnectionError:
        return False


def _copy(log: str, position: int) -> int:
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return position
    try:
        while data := os.pread(descriptor, _COPY_BYTES, position):
            write_all(1, data)
            position += len(data)
    finally:
        os.close(descriptor)
    return position


@contextmanager
def _raw_terminal() -> Iterator[int]:
    """Keys go through unread by this side; gives a descriptor that is readable after a change of window size."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    before_winch = signal.signal(signal.SIGWINCH, lambda *_: None)
    saved = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        if saved is not None:
            _make_raw()
        yield read_end
    finally:
        if saved is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)
        signal.set_wakeup_fd(before_wakeup)
        signal.signal(signal.SIGWINCH, before_winch)
        os.close(read_end)
        os.close(write_end)


def _make_raw() -> None:
    mode = termios.tcgetattr(0)
    mode[0] &= ~(termios.BRKINT | termios.ICRNL | termios.INPCK | termios.ISTRIP | termios.IXON)
    mode[1] &= ~termios.OPOST
    mode[2] = (mode[2] & ~(termios.CSIZE | termios.PARENB)) | termios.CS8
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
    termios.tcsetattr(0, termios.TCSADRAIN, mode)


def _empty(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1024):
            pass
    except BlockingIOError:
        pass


def size_of(path: str) -> int:
    """Bytes in a file, 0 when there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
