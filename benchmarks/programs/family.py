"""A process with descendants that try to get away: a plain child, one with a session of its own, a double-forked daemon without
any environment.

Writes BENCH_DIR/family.PID: the attempt, then one line `pid start_time` for itself and each descendant.
"""

import os
import signal


def start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def sleep_forever() -> None:
    os.execve("/bin/sleep", ["sleep", "1000000"], {})


def plain() -> int:
    pid = os.fork()
    if pid == 0:
        sleep_forever()
    return pid


def in_own_session() -> int:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        sleep_forever()
    return pid


def daemon() -> int:
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            sleep_forever()
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(writer)
    pid = int(os.read(reader, 32))
    os.close(reader)
    os.waitpid(middle, 0)
    return pid


members = [os.getpid(), plain(), in_own_session(), daemon()]
lines = [os.environ["ARGOSY_ATTEMPT"]] + [f"{pid} {start_time(pid)}" for pid in members]
path = f"{os.environ['BENCH_DIR']}/family.{os.getpid()}"
with open(f"{path}.new", "w") as record:
    record.write("\n".join(lines) + "\n")
os.rename(f"{path}.new", path)
while True:
    signal.pause()
