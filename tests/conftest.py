"""Tests start as from a terminal: with the signals that a background shell or a build server may have set to be ignored."""

import ctypes
import mmap
import os
import signal

import pytest

from argosy.native import loader

for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        is_interrupt = number is signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


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
