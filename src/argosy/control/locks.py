"""Lock files: whoever holds one is the only one of its kind, until it ends.

Taken by the keeper, the controller, the agent, and whoever brings a cluster up or takes its rest away. They are removed with a cluster
that is down, so a lock counts only while its file is still the one at the path. Never waits by itself unless it is told to.
"""

from __future__ import annotations

import fcntl
import os


def take(path: str, *, should_wait: bool = False) -> int | None:
    """A close-on-exec descriptor that holds the lock; None when somebody else does and it is not to wait. Raises OSError."""
    how = fcntl.LOCK_EX if should_wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            # Whoever held it before may have removed the file: then others lock a new one.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
