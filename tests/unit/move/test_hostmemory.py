"""Page tables are filled the way that is quicker for what the memory has."""

import mmap
import os

import pytest

from argosy.move import hostmemory

PAGES = 64
READ, WRITE = 22, 23


class Told(mmap.mmap):
    """A mapping that remembers what it was asked for."""

    def madvise(self, advice):
        self.advice = advice
        return super().madvise(advice)


@pytest.fixture
def descriptor():
    found = os.memfd_create("argosy-test", os.MFD_CLOEXEC)
    os.ftruncate(found, PAGES * hostmemory.PAGE)
    hostmemory.reserve(found, PAGES * hostmemory.PAGE, "a test")
    yield found
    os.close(found)


def fill(descriptor, pages):
    for page in pages:
        os.pwrite(descriptor, b"x", page * hostmemory.PAGE)


@pytest.mark.parametrize(
    ("pages", "advice"),
    [(range(0), WRITE), (range(PAGES // 2), WRITE), (range(PAGES), READ)],
)
def test_reserved_pages_are_written_and_those_with_contents_read(descriptor, pages, advice):
    fill(descriptor, pages)
    with Told(descriptor, PAGES * hostmemory.PAGE) as memory:
        hostmemory.populate(memory, is_writing=True)
        assert memory.advice == advice
        assert memory[:: hostmemory.PAGE] == b"x" * len(pages) + bytes(PAGES - len(pages))


def test_pages_that_were_read_in_can_be_written_and_others_see_it(descriptor):
    fill(descriptor, range(PAGES))
    size = PAGES * hostmemory.PAGE
    with Told(descriptor, size) as memory, Told(descriptor, size) as other:
        hostmemory.populate(memory, is_writing=True)
        memory[0] = memory[size - 1] = 7
        assert (other[0], other[size - 1]) == (7, 7)


def test_a_private_mapping_is_only_read(descriptor):
    size = PAGES * hostmemory.PAGE
    with Told(descriptor, size, flags=mmap.MAP_PRIVATE) as memory:
        hostmemory.populate(memory, is_writing=False)
        assert memory.advice == READ


def test_one_page_is_enough(descriptor):
    with Told(descriptor, hostmemory.PAGE) as memory:
        hostmemory.populate(memory, is_writing=True)
        assert memory.advice == WRITE
        assert hostmemory.has_contents(memory)
