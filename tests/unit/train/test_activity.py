"""What is seen of a process from outside."""

import os
import subprocess
import sys
import time

from argosy.train.roster import activity


def test_work_of_a_child_counts_as_work_of_the_one_that_waits_for_it():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    parent = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        seen = set()
        while len(seen) < 5 and time.monotonic() < deadline:
            state, ticks = activity(parent.pid)
            if state == "S":
                seen.add(ticks)
            time.sleep(0.01)
        assert len(seen) >= 5
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
    assert activity(parent.pid) == ("", 0)
