"""Ctrl-C around a submission: from the question until somebody looks after the run."""

import os
import signal

import pytest

from argosy.cli.follow import Interrupts
from argosy.cli.shield import Shield


def press():
    os.kill(os.getpid(), signal.SIGINT)


def press_and_fail(error):
    with Shield():
        press()
        raise error


def test_the_first_is_noted_and_the_shield_stays_up(capfd):
    before = signal.getsignal(signal.SIGINT)
    shield = Shield()
    try:
        with shield:
            press()
        assert shield.lift() == 1
        assert signal.getsignal(signal.SIGINT) == shield._note
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Ctrl-C again: at once" in capfd.readouterr().err


def test_one_that_is_lifted_interrupts_as_before():
    shield = Shield()
    with shield, shield:
        pass
    assert shield.lift() == 0
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_question_that_nobody_heard_is_left_at_once():
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            press_and_fail(ConnectionRefusedError())
        with pytest.raises(ConnectionResetError):
            press_and_fail(ConnectionResetError())
    finally:
        signal.signal(signal.SIGINT, before)
    shield = Shield()
    with pytest.raises(ConnectionRefusedError), shield:
        raise ConnectionRefusedError
    assert signal.getsignal(signal.SIGINT) == before


def test_who_takes_over_hears_the_next_and_gives_back_what_was_before():
    shield = Shield()
    with shield:
        pass
    interrupts = Interrupts()
    assert shield.lift() == 0
    press()
    assert (interrupts.take(), shield.num_interrupts) == (1, 0)
    interrupts.close()
    with pytest.raises(KeyboardInterrupt):
        press()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_after_the_second_a_copy_goes_on_without_the_terminal(capfd):
    """What is behind the block happens in a process of its own, in no session of ours."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        shield = Shield()
        with shield:
            try:
                press()
                press()
            except KeyboardInterrupt:
                os._exit(130)
            press()  # ignored
            os.write(1, b"nobody reads this")
            os.write(writing, f"{os.getsid(0) == os.getpid()} {shield.num_interrupts}".encode())
            os._exit(0)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    with os.fdopen(reading, "rb") as said:
        assert said.read() == b"True 2"
    assert "nobody" not in capfd.readouterr().out
