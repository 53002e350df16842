"""A worker that is asked to end and says for so many seconds that its save goes on; then it leaves, or hangs (`hang`)."""

import json
import os
import signal
import socket
import struct
import sys
import time

ADVANCE = {"step": 7, "num_bytes": 1, "total_bytes": 2, "what": "written"}
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["ARGOSY_KEEPER_SOCKET"])


def send(frame):
    body = json.dumps(frame).encode()
    link.sendall(struct.pack(">I", len(body)) + body)


who = {"attempt": os.environ["ARGOSY_ATTEMPT"], "token": os.environ["ARGOSY_TOKEN"]}
send({"type": "hello", "version": 1, "as": "worker", **who})
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
print("armed", flush=True)
while not asked:
    time.sleep(0.005)
while time.monotonic() < asked[0] + float(sys.argv[1]):
    send({"type": "say", "message": {"say": "saving", **ADVANCE}})
    time.sleep(0.02)
if sys.argv[2] == "hang":
    print("silent", flush=True)
    time.sleep(1000)
