from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from argosy.errors import ConfigError, MismatchError, PeerLost, TimedOut
from argosy.move import waits
from argosy.native import loader

pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture
def word(memory):
    return memory[0]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_a_posted_value_is_seen_and_ends_the_wait(word):
    assert waits.peek(word) == 0
    waits.post(word, 7)
    assert waits.peek(word) == 7
    waits.wait(word, 7, deadline=soon())
    waits.wait(word, 3, deadline=soon())


@pytest.mark.parametrize(
    ("value", "wanted", "is_reached"),
    [
        (5, 5, True),
        (5, 6, False),
        (0, 0xFFFF_FFFF, True),
        (3, 0xFFFF_FFF0, True),
        (0xFFFF_FFFF, 0, False),
        (0x7FFF_FFFF, 0, True),
        (0x8000_0000, 0x7FFF_FFFF, True),
        (2, 2 + (1 << 32), True),
    ],
)
def test_words_are_compared_with_wrap_around(word, value, wanted, is_reached):
    waits.post(word, value)
    if is_reached:
        waits.wait(word, wanted, deadline=0.0)
        return
    with pytest.raises(TimedOut):
        waits.wait(word, wanted, deadline=soon(0.02))


@pytest.mark.parametrize("spin_seconds", [0.0, 10.0])
def test_a_post_of_another_thread_wakes_the_waiter(word, spin_seconds):
    peers = waits.Peers([], spin_seconds=spin_seconds)
    poster = threading.Thread(target=lambda: [waits.post(word, i) for i in range(1, 4)])
    poster.start()
    waits.wait(word, 3, peers=peers, deadline=soon())
    poster.join()


def test_a_wait_ends_at_its_deadline_and_says_for_whom_and_for_what(word):
    peers = waits.Peers([-1, -1], ranks=[4, 6])
    start = time.monotonic()
    with pytest.raises(TimedOut, match="ranks 4, 6 during the meeting") as failure:
        waits.wait(word, 1, peers=peers, deadline=start + 0.3, what="the meeting")
    assert time.monotonic() >= start + 0.3
    assert "argosy stacks" in failure.value.fix


def test_a_deadline_that_has_passed_ends_the_wait_at_once(word):
    with pytest.raises(TimedOut):
        waits.wait(word, 1, deadline=0.0)
    with pytest.raises(TimedOut):
        waits.wait(word, 1, deadline=float("-inf"))


def test_the_broken_word_ends_every_wait_with_the_rank_it_names(word):
    peers = waits.Peers([-1], broken=word + 64)
    breaker = threading.Thread(target=waits.break_off, args=(peers, 5))
    breaker.start()
    with pytest.raises(PeerLost, match="rank 5 has ended during step 3") as failure:
        waits.wait(word, 1, peers=peers, deadline=soon(), what="step 3")
    assert failure.value.rank == 5
    breaker.join()


def test_the_first_reason_to_break_off_stays(word):
    peers = waits.Peers([-1], broken=word + 64)
    waits.break_off(peers, 2, loader.MISMATCH)
    waits.break_off(peers, 1)
    with pytest.raises(MismatchError, match="rank 2"):
        waits.wait(word, 1, peers=peers, deadline=soon())


def test_the_deadline_of_one_is_told_to_all(word):
    peers = waits.Peers([-1], broken=word + 64)
    waits.break_off(peers, 0, loader.TIMEOUT)
    with pytest.raises(TimedOut):
        waits.wait(word, 1, peers=peers, deadline=soon())


def test_a_reached_word_counts_more_than_a_broken_one(word):
    peers = waits.Peers([-1], broken=word + 64)
    waits.break_off(peers, 0)
    waits.post(word, 1)
    waits.wait(word, 1, peers=peers, deadline=soon())


def test_peers_without_a_broken_word_cannot_be_broken_off():
    with pytest.raises(ConfigError, match="no broken word"):
        waits.break_off(waits.Peers([-1]), 0)


def test_a_closed_process_descriptor_is_an_error_and_not_a_peer_that_lives(word):
    descriptor = os.pidfd_open(os.getpid())
    os.close(descriptor)
    with pytest.raises(ConfigError, match=f"process descriptor {descriptor} of a peer is not open"):
        waits.wait(word, 1, peers=waits.Peers([-1, descriptor]), deadline=soon())


def test_more_peers_than_are_asked_at_once_are_all_watched(word):
    child = os.fork()
    if child == 0:
        os._exit(0)
    descriptor = os.pidfd_open(child)
    try:
        peers = waits.Peers([-1] * 150 + [descriptor], ranks=range(100, 251))
        with pytest.raises(PeerLost) as failure:
            waits.wait(word, 1, peers=peers, deadline=soon())
        assert failure.value.rank == 250
    finally:
        os.waitpid(child, 0)
        os.close(descriptor)


def test_handlers_of_signals_run_during_a_wait(word):
    class Alarm(Exception):
        pass

    def ring(number, frame):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)

    def wait_until_it_rings():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        waits.wait(word, 1, deadline=soon(60.0))

    try:
        with pytest.raises(Alarm):
            wait_until_it_rings()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_does_not_end_a_wait_too_early(word):
    rung = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    start = time.monotonic()
    try:
        with pytest.raises(TimedOut):
            waits.wait(word, 1, deadline=start + 0.25)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung
    assert time.monotonic() >= start + 0.25


def test_words_of_64_bits_are_stored_loaded_and_swapped(memory):
    word, descriptor = memory
    value = 0xFEDC_BA98_7654_3210
    waits.store(word, value)
    assert waits.load(word) == value
    assert waits.compare_and_swap(word, value, 5, descriptor=descriptor)
    assert not waits.compare_and_swap(word, value, 6, descriptor=descriptor)
    assert waits.load(word) == 5


def test_threads_that_swap_lose_no_update(memory):
    word, descriptor = memory

    def count() -> None:
        for _ in range(50):
            while not waits.compare_and_swap(
                word, seen := waits.load(word), seen + 1, descriptor=descriptor
            ):
                pass

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waits.load(word) == 150


def test_a_swap_without_native_code_asks_for_the_descriptor(word, path):
    if path == "native":
        assert waits.compare_and_swap(word, 0, 1)
        return
    with pytest.raises(ConfigError, match="needs the descriptor"):
        waits.compare_and_swap(word, 0, 1)


@pytest.mark.parametrize("call", [waits.peek, waits.wake, waits.load])
@pytest.mark.parametrize("address", [0, -8, 2, 0x1001])
def test_what_is_no_address_of_a_word_is_refused(call, address):
    with pytest.raises(ConfigError, match="no address of a shared word"):
        call(address)


def test_every_descriptor_needs_its_rank():
    with pytest.raises(ConfigError, match="2 process descriptors, but 1 ranks"):
        waits.Peers([-1, -1], ranks=[0])


def test_processes_that_must_share_cores_do_not_spin():
    cores = len(os.sched_getaffinity(0))
    assert waits.Peers([-1] * (cores + 1)).spin_seconds == 0.0
    assert waits.Peers([-1] * cores).spin_seconds > 0.0
