"""Arenas of one process: allocation, directory, views, ends; without a cluster every arena is a private memfd."""

import gc
import mmap
import os
import signal
import struct
import threading
import time
import warnings

import pytest

torch = pytest.importorskip("torch")

from argosy.errors import ArenaGone, ClusterError, ConfigError, NoRoom, TimedOut  # noqa: E402
from argosy.move import arenas, broker, directory, hostmemory  # noqa: E402

PAGE = 4096


@pytest.fixture(autouse=True)
def nothing_left():
    """No descriptor and no mapping of an arena outlives the test."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    if mapped():
        gc.collect()  # a traceback may hold a tensor
    assert len(os.listdir("/proc/self/fd")) <= before
    assert mapped() == []


def mapped():
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "memfd:argosy-" in line]


@pytest.fixture
def arena():
    with arenas.create("weights", 1 << 20) as made:
        yield made


def test_a_tensor_is_aligned_zero_and_has_its_own_storage(arena, tmp_path):
    first = arena.empty((3, 4), torch.bfloat16, name="a")
    second = arena.empty((5,), name="b")
    for tensor in (first, second):
        assert tensor.data_ptr() % PAGE == 0
        assert not tensor._is_view()
        assert tensor.count_nonzero() == 0
        assert arena.is_inside(tensor)
    assert first.untyped_storage().nbytes() == 24
    assert second.dtype == torch.float32
    torch.save(second, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size < PAGE
    assert torch.load(tmp_path / "b.pt").shape == (5,)


def test_a_tensor_is_found_again_by_its_name(arena):
    made = arena.empty((3, 4), torch.bfloat16, name="a").fill_(2.5)
    with arenas.open("weights") as again:
        assert again.address != arena.address
        assert torch.equal(again.tensor("a"), made)
        late = again.empty((2,), torch.int64, name="late").fill_(7)
        assert arena.tensor("late").tolist() == [7, 7]
        assert arena.names() == again.names() == ["a", "late"]
        assert late.data_ptr() - again.address != made.data_ptr() - arena.address


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3, 4, 5), (60, 1, 15, 3)),
        ((4, 6), (1, 4)),
        ((), ()),
        ((0, 3), (3, 1)),
        ((1, 5), (99, 1)),
    ],
)
def test_strides_and_odd_shapes_are_kept(arena, shape, strides):
    made = arena.empty(shape, torch.float64, name="t", strides=strides)
    assert made.stride() == strides
    made.copy_(torch.randn(shape))
    found = arena.tensor("t")
    assert found.stride() == strides
    assert torch.equal(found, made)
    assert arena.is_inside(found)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.complex64])
def test_every_dtype_comes_back(arena, dtype):
    made = arena.empty((7,), dtype, name="t")
    made.copy_(torch.arange(7))
    assert torch.equal(arena.tensor("t"), made)
    assert arena.tensor("t").dtype == dtype


def test_an_unnamed_tensor_is_reached_by_its_offset(arena):
    made = arena.empty((4,), torch.int32).copy_(torch.arange(4))
    with arenas.attach(os.dup(arena.fileno())) as peer:
        assert peer.name == "weights"
        assert peer.at(arena.offset_of(made), (4,), torch.int32).tolist() == [0, 1, 2, 3]
        with pytest.raises(ArenaGone):
            peer.at(len(peer.memory) - 4, (4,), torch.int32)
    with pytest.raises(ConfigError):
        arena.offset_of(torch.zeros(3))


def test_all_the_room_that_was_asked_for_is_there():
    with arenas.create("exact", 8 * PAGE) as arena:
        assert arena.size == 8 * PAGE
        for index in range(8):
            arena.empty((PAGE,), torch.uint8, name=f"page{index}").fill_(index + 1)
        assert arena.statistics()["free"] == 0
        with pytest.raises(NoRoom, match=r"1 bytes for 'one more'|one more") as failure:
            arena.empty((1,), torch.uint8, name="one more")
        assert "larger size" in failure.value.fix
        assert [int(arena.tensor(f"page{index}")[-1]) for index in range(8)] == list(range(1, 9))


def test_a_full_directory_takes_from_the_room_and_then_says_so():
    with arenas.create("many", 4 * PAGE) as arena:

        def fill():
            for index in range(100_000):
                arena.empty((0,), name=f"{index}-{'n' * 400}")

        with pytest.raises(NoRoom):
            fill()
        assert 100 < len(arena.names()) < 1000


def test_several_are_made_together_or_not_at_all(arena):
    requests = [directory.Request(num_bytes=100, name="x"), directory.Request(num_bytes=1 << 30)]
    with pytest.raises(NoRoom, match="x and 1 more"):
        arena.empty_all(requests)
    assert arena.names() == []
    assert arena.statistics()["used"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((2, 3), torch.float32, "x", (0, 1)), "one place"),
        (((4, 4), torch.float32, "x", (1, 2)), "one place"),
        (((2, -3),), "sizes from 0"),
        (((2, 3), torch.float32, "x", (1,)), "strides"),
        (((4.7,),), "whole numbers"),
        (((2,), torch.float32, "there"), "already"),
    ],
)
def test_what_cannot_be_made_is_refused_with_its_name(arena, arguments, words):
    arena.empty((1,), name="there")
    with pytest.raises(ConfigError) as failure:
        arena.empty(*arguments)
    assert words in str(failure.value)
    assert len(arguments) < 3 or arguments[2] in str(failure.value)
    assert arena.names() == ["there"]


def test_words_are_made_once_and_a_cache_line_apart(arena):
    words = arena.words("done", 3)
    assert [words[index] - words[0] for index in range(3)] == [0, 64, 128]
    assert len(words) == 3
    with pytest.raises(IndexError):
        words[3]
    with arenas.open("weights") as peer:
        same = peer.words("done", 3)
        offset = words[2] - arena.address
        assert same[2] - peer.address == offset
        assert words[0] % 64 == 0
        struct.pack_into("<I", arena.memory, offset, 77)
        assert struct.unpack_from("<I", peer.memory, offset) == (77,)
    with pytest.raises(ConfigError, match="3 words"):
        arena.words("done", 4)
    with pytest.raises(ArenaGone):
        arena.tensor("done")


def test_an_arena_that_dies_while_the_names_are_locked_waits_for_nobody():
    arena = arenas.create("forgotten-while-locked", 4096)
    with broker._lock:  # a collection can come in the middle of any call
        del arena
        gc.collect()
    with arenas.create("another", 4096):
        pass
    with pytest.raises(ArenaGone):
        arenas.open("forgotten-while-locked")


def test_a_closed_arena_says_so_whatever_it_is_asked():
    arena = arenas.create("asked-when-closed", 4096)
    arena.close()
    for ask in (arena.names, lambda: arena.find("x"), lambda: arena.tensor("x"), arena.statistics):
        with pytest.raises(ArenaGone, match="closed"):
            ask()


def test_a_tensor_keeps_its_memory_when_the_arena_is_closed():
    arena = arenas.create("short", 1 << 16)
    tensor = arena.empty((1000,), name="t").fill_(3)
    view, words = tensor[10:20].numpy(), arena.words("w", 1)
    arena.close()
    arena.close()
    del tensor
    assert view.sum() == 30
    assert len(mapped()) == 1
    assert words.address > 0
    with pytest.raises(ArenaGone, match="closed"):
        arena.tensor("t")
    with pytest.raises(ArenaGone):
        arenas.open("short")


def test_nobody_can_unmap_memory_under_a_tensor(arena):
    tensor = arena.empty((10,), name="t").fill_(1)
    with pytest.raises(BufferError):
        arena.memory.obj.close()
    assert tensor.sum() == 10


def test_a_forgotten_arena_gives_everything_back():
    arena = arenas.create("forgotten", 1 << 16)
    tensor = arena.empty((10,))
    del arena
    assert tensor.sum() == 0
    with pytest.raises(ArenaGone):
        arenas.open("forgotten")


def test_a_name_with_scope_run_stays_until_it_is_released():
    with arenas.create("kept", 1 << 16, scope="run") as arena:
        arena.empty((3,), name="t").fill_(5)
    with arenas.open("kept") as again:
        assert again.tensor("t").tolist() == [5, 5, 5]
    arenas.release("kept")
    with pytest.raises(ArenaGone):
        arenas.open("kept")
    with pytest.raises(ArenaGone):
        arenas.release("kept")


def test_the_same_name_is_the_same_arena_unless_size_or_scope_differ(arena):
    arena.empty((1,), name="t").fill_(9)
    with arenas.create("weights", 1 << 20) as again:
        assert again.tensor("t") == 9
        assert again.identity == arena.identity
    for size, scope in ((1 << 21, "process"), (1 << 20, "run")):
        with pytest.raises(ClusterError, match="exists with"):
            arenas.create("weights", size, scope=scope)
    for name, size, scope in (
        ("", 1, "run"),
        ("n" * 600, 1, "run"),
        ("n", 0, "run"),
        ("n", 1, "x"),
        ("a\0b", 1, "run"),
        (b"n", 1, "run"),
        ("n", 4.5, "run"),
        ("n", "1", "run"),
    ):
        with pytest.raises(ConfigError):
            arenas.create(name, size, scope=scope)


def test_a_reader_keeps_its_stray_writes_to_itself(arena):
    tensor = arena.empty((2 * PAGE,), torch.uint8, name="t").fill_(1)
    with warnings.catch_warnings(), arena.reader() as reader:
        warnings.simplefilter("error")
        seen = reader.tensor("t")
        seen[:PAGE] = 9
        assert tensor.sum() == 2 * PAGE
        assert seen[:PAGE].sum() == 9 * PAGE
        # An untouched page goes on showing what the owner writes.
        tensor[PAGE:] = 2
        assert seen[PAGE:].sum() == 2 * PAGE
        assert reader.is_reader
        for attempt in (lambda: reader.empty((1,)), lambda: reader.words("w", 1), reader.seal):
            with pytest.raises(ConfigError, match="reader"):
                attempt()


def test_a_sealed_arena_is_written_by_its_owner_alone(arena):
    tensor = arena.empty((4,), name="t").fill_(1)
    arena.seal()
    tensor.fill_(2)
    with arenas.open("weights") as other:
        assert other.is_reader
        seen = other.tensor("t")
        assert seen.tolist() == [2] * 4
        seen.zero_()
    assert tensor.tolist() == [2] * 4
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fileno(), PAGE)


def test_memory_of_another_kind_run_or_layout_is_refused(arena, monkeypatch):
    plain = os.memfd_create("argosy-plain")
    os.ftruncate(plain, 1 << 16)
    for descriptor in (plain, os.memfd_create("argosy-empty")):
        with pytest.raises(ArenaGone):
            arenas.attach(descriptor)
    with open(os.devnull) as other:
        number = os.dup(other.fileno())
    with pytest.raises(ArenaGone, match="no memfd"):
        arenas.attach(number)
    with pytest.raises(ArenaGone, match="Bad file descriptor"):
        arenas.attach(number)
    for change in ({"LAYOUT": 2}, {"_MAGIC": 1}):
        for name, value in change.items():
            monkeypatch.setattr(directory, name, value)
        with pytest.raises(ArenaGone):
            arenas.open("weights")
        monkeypatch.undo()
    monkeypatch.setattr(broker, "current_run", lambda: "run-7")
    with pytest.raises(ArenaGone, match="run-7"):
        arenas.attach(os.dup(arena.fileno()))


def test_a_damaged_directory_is_not_believed(arena):
    arena.empty((4,), name="t")
    struct.pack_into("<Q", arena.memory, len(arena.memory) - 16, 0xDEADBEEF)
    with arenas.open("weights") as other, pytest.raises(ArenaGone, match="damaged"):
        other.tensor("t")
    struct.pack_into("<Q", arena.memory, PAGE - 64, 1 << 50)
    with pytest.raises(ArenaGone, match="claims"):
        arena.names()


def test_an_entry_counts_only_when_the_length_includes_it(arena):
    arena.empty((4,), name="first")
    length = struct.unpack_from("<Q", arena.memory, PAGE - 64)
    arena.empty((4,), name="second")
    # As a writer that died between the entry and the length would leave it.
    struct.pack_into("<Q", arena.memory, PAGE - 64, *length)
    with arenas.open("weights") as other:
        assert other.names() == ["first"]
        other.empty((8,), name="third").fill_(1)
    with arenas.open("weights") as other:
        assert other.names() == ["first", "third"]


def test_a_second_writer_waits_and_is_refused_when_the_first_does_not_end(arena, monkeypatch):
    monkeypatch.setattr(directory, "_LOCK_SECONDS", 0.05)
    with directory.locked(arena.fileno()), pytest.raises(TimedOut, match="another process"):
        arena.empty((1,))
    arena.empty((1,))


def test_a_crash_frees_the_writers_lock(arena):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with directory.locked(arena.fileno()):
            os.write(write, b"x")
            signal.pause()
    assert os.read(read, 1) == b"x"
    was_free = can_lock(arena)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not was_free
    assert can_lock(arena)
    os.close(read)
    os.close(write)


def test_a_fork_does_not_inherit_the_writers_lock(arena):
    with directory.locked(arena.fileno()):
        pid = os.fork()
        if pid == 0:
            signal.pause()
    deadline = time.monotonic() + 10
    while not (is_free := can_lock(arena)) and time.monotonic() < deadline:
        os.sched_yield()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert is_free


def can_lock(arena):
    own = os.open(f"/proc/self/fd/{arena.fileno()}", os.O_RDWR)
    try:
        return directory._try_lock(own)
    finally:
        os.close(own)


def test_threads_that_allocate_at_once_never_share_bytes(arena):
    made = []

    def allocate(worker):
        with arenas.open("weights") as own:
            tensors = [own.empty((PAGE,), torch.uint8, name=f"{worker}/{n}") for n in range(10)]
            made.extend(own.offset_of(tensor) for tensor in tensors)

    threads = [threading.Thread(target=allocate, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(made)) == 40
    assert len(arena.names()) == 40


def test_a_host_without_memory_says_so_before_anything_is_taken(monkeypatch):
    monkeypatch.setattr(hostmemory, "available_bytes", lambda: 100 << 20)
    before = hostmemory.available_bytes()
    with pytest.raises(NoRoom, match=r"arena 'big' needs 1024.1 MiB .* 100.0 MiB"):
        arenas.create("big", 1 << 30)
    with pytest.raises(ArenaGone):
        arenas.open("big")
    assert hostmemory.available_bytes() == before


def test_a_size_beyond_any_host_is_no_room():
    with pytest.raises(NoRoom):
        arenas.create("endless", 1 << 55)
    with pytest.raises(NoRoom):
        arenas.create("beyond", 1 << 70)


@pytest.mark.parametrize("name", ["", 3, ["x"], "a\0b", "x" * 600])
def test_what_is_no_name_is_refused(name):
    for call in (lambda: arenas.create(name, 4096), lambda: arenas.open(name)):
        with pytest.raises(ConfigError, match="name"):
            call()


def test_a_name_is_free_again_after_there_was_no_room(monkeypatch):
    with pytest.raises(NoRoom):
        arenas.create("huge", 1 << 45, scope="run")
    with arenas.create("huge", 1 << 16, scope="run") as arena:
        assert arena.size == 1 << 16
    arenas.release("huge")


def test_the_kernel_refusing_pages_is_no_room(monkeypatch):
    def refuse(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(NoRoom, match="No space left"):
        arenas.create("refused", 1 << 20)


def test_all_pages_are_there_before_the_first_write(arena):
    assert os.fstat(arena.fileno()).st_blocks * 512 >= len(arena.memory)


def test_a_cgroups_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100\nactive_file 50\n")
    assert hostmemory._cgroup_room(tmp_path, "memory.max", "memory.current") == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert hostmemory._cgroup_room(tmp_path, "memory.max", "memory.current") is None
    assert 0 < hostmemory.available_bytes() < 1 << 50


def test_statistics_add_up(arena):
    arena.empty((10,), name="a")
    arena.empty((2 * PAGE,), torch.uint8)
    arena.words("w", 2)
    found = arena.statistics()
    assert found["size"] == 1 << 20
    assert found["used"] == 4 * PAGE
    assert found["used"] + found["free"] == found["size"]
    assert (found["tensors"], found["words"]) == (2, 1)
