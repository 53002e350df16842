"""A process with a link to its keeper, standard library alone: writes down when it is told that a peer has exited.

Lines of BENCH_DIR/member.PID: `up ATTEMPT`, then `told ATTEMPT MONOTONIC_NS`.
"""

import json
import os
import socket
import struct
import sys
import time


def send(link: socket.socket, message: dict[str, object]) -> None:
    body = json.dumps(message).encode()
    link.sendall(struct.pack(">I", len(body)) + body)


def receive(link: socket.socket) -> dict[str, object]:
    (size,) = struct.unpack(">I", exactly(link, 4))
    message: dict[str, object] = json.loads(exactly(link, size))
    return message


def exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            sys.exit(3)
        data += more
    return data


attempt = os.environ["ARGOSY_ATTEMPT"]
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["ARGOSY_KEEPER_SOCKET"])
send(
    link,
    {
        "type": "hello",
        "version": 1,
        "as": "worker",
        "attempt": attempt,
        "token": os.environ["ARGOSY_TOKEN"],
    },
)
welcome = receive(link)
if welcome.get("type") != "welcome":
    sys.exit(f"no welcome: {welcome}")
# A step reported is progress: the next restart does not wait.
send(link, {"type": "say", "message": {"say": "step", "step": 1}})
with open(f"{os.environ['BENCH_DIR']}/member.{os.getpid()}", "w", buffering=1) as record:
    record.write(f"up {attempt}\n")
    while True:
        message = receive(link)
        if message.get("type") == "peer":
            record.write(f"told {message['attempt']} {time.monotonic_ns()}\n")
