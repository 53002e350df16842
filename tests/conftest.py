"""Tests start as from a terminal: with the signals that a background shell or a build server may have set to be ignored."""

import ctypes
import mmap
import os
import signal
import time
from pathlib import Path

import pytest

from argosy.native import loader

for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        is_interrupt = number is signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def _has_stopped(pid):
    """All its threads."""
    try:
        stats = [one.read_text() for one in Path(f"/proc/{pid}/task").glob("*/stat")]
    except FileNotFoundError:
        return False  # one of them was about to end
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@pytest.fixture
def halt():
    """Stop a process by SIGSTOP, and wait until it has: a thread that runs goes on for some milliseconds on a virtual machine."""

    def halted(pid):
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not _has_stopped(pid):
            assert time.monotonic() < deadline, f"process {pid} runs on"
            time.sleep(0.001)

    return halted


@pytest.fixture(params=["native", loader.WITHOUT])
def path(request, monkeypatch):
    """With native code, then without it."""
    if request.param == loader.WITHOUT:
        monkeypatch.setenv(loader.SWITCH, "0")
    loader.forget()
    assert (loader.library() is None) == (request.param == loader.WITHOUT)
    yield request.param
    monkeypatch.delenv(loader.SWITCH, raising=False)
    loader.forget()


@pytest.fixture
def memory():
    """A shared page: (address, descriptor)."""
    descriptor = os.memfd_create("words", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 4096)
    page = mmap.mmap(descriptor, 4096)
    held = ctypes.c_char.from_buffer(page)
    yield ctypes.addressof(held), descriptor
    del held
    page.close()
    os.close(descriptor)
