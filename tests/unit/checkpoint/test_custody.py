"""Who keeps what for whom: every loss that the scheme allows is made good, and no other is promised."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint.peers import custody
from argosy.checkpoint.peers.labels import CHUNK_BYTES, Image, Label, Share
from argosy.errors import ConfigError

HOSTS = [f"host-{number}" for number in range(9)]


def label_of(owner, num_bytes, keeping, mark=1):
    image = Image(mark=mark, num_bytes=num_bytes, manifest_bytes=0, signature_bytes=0)
    return Label(
        run="run",
        step=7,
        owner=owner,
        members=keeping.members,
        share=Share(),
        image=image,
        start=keeping.start,
        stop=keeping.stop,
        is_folded=keeping.is_folded,
    )


@st.composite
def fleets(draw):
    hosts = HOSTS[: draw(st.integers(2, 9))]
    scheme = draw(st.sampled_from(["buddy", "parity"]))
    group = draw(st.integers(2, len(hosts)))
    sizes = {host: draw(st.integers(1, 5 * CHUNK_BYTES)) for host in hosts}
    lost = draw(st.sets(st.sampled_from(hosts)))
    return hosts, scheme, group, sizes, lost


class Fleet:
    """Hosts whose memory has one number for each chunk of what they keep."""

    def __init__(self, hosts, scheme, group, sizes):
        self.labels = {host: [] for host in hosts}
        self.wholes, self.parities = {}, {host: {} for host in hosts}
        self.parts = {
            host: {at: hash((host, at)) for at in range(-(-size // CHUNK_BYTES))}
            for host, size in sizes.items()
        }
        for owner, size in sizes.items():
            for one in custody.plan_keepings(hosts, owner, size, scheme, group):
                self.labels[one.host].append(label_of(owner, size, one))
                stretch = self.chunks(self.parts[owner], one.start, one.stop)
                if one.is_folded:
                    parity = self.parities[one.host]
                    for at, value in stretch.items():
                        parity[at] = parity.get(at, 0) ^ value
                else:
                    self.wholes[one.host, owner] = stretch

    @staticmethod
    def chunks(part, start, stop):
        if start == stop:
            return {}
        assert start % CHUNK_BYTES == 0
        first, last = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
        return {at - first: part[at] for at in range(first, last)}

    def rebuilt(self, source, lost):
        found = {}
        for stretch in source.stretches:
            pieces = []
            for piece in stretch.pieces:
                assert piece.host not in lost
                whole = self.wholes.get((piece.host, piece.address.owner))
                memory = whole if piece.address.owner else self.parities[piece.host]
                pieces.append(self.chunks(memory, piece.start, piece.stop))
            first = stretch.start // CHUNK_BYTES
            for at in self.chunks(dict.fromkeys(range(99)), stretch.start, stretch.stop):
                value = 0
                for piece in pieces:
                    value ^= piece.get(at, 0)
                found[first + at] = value
        return found


@settings(max_examples=100, deadline=None)
@given(fleets())
def test_a_part_comes_back_exactly_when_the_scheme_says_so(fleet):
    hosts, scheme, group, sizes, lost = fleet
    kept = Fleet(hosts, scheme, group, sizes)
    there = {host: labels for host, labels in kept.labels.items() if host not in lost}
    for owner in hosts:
        wanted = next(
            one for labels in kept.labels.values() for one in labels if one.owner == owner
        )
        sources = custody.plan_sources(there, wanted)
        expected = custody.is_recoverable(hosts, owner, lost, scheme, group)
        assert bool(sources) == expected
        for source in sources:
            assert kept.rebuilt(source, lost) == kept.parts[owner]


@given(st.integers(2, 9), st.data())
def test_groups_divide_the_hosts_and_have_at_least_the_size_that_was_asked_for(count, data):
    size = data.draw(st.integers(2, count))
    groups = custody.groups_of(HOSTS[:count], size)
    assert sorted(host for group in groups for host in group) == HOSTS[:count]
    assert all(size <= len(group) < 2 * size for group in groups)


@given(st.integers(2, 9))
def test_every_host_is_the_buddy_of_one_other(count):
    hosts = HOSTS[:count]
    buddies = [custody.buddy_of(hosts, host) for host in hosts]
    assert sorted(buddies) == hosts
    assert all(buddy != host for buddy, host in zip(buddies, hosts, strict=True))


@given(st.integers(2, 9), st.integers(1, 40))
def test_parity_costs_one_part_divided_by_the_other_members(count, chunks):
    hosts = HOSTS[:count]
    keepings = custody.plan_keepings(hosts, hosts[0], chunks * CHUNK_BYTES, "parity", count)
    folded = [one.stop - one.start for one in keepings if one.is_folded]
    assert sum(folded) == chunks * CHUNK_BYTES
    assert max(folded) <= -(-chunks // (count - 1)) * CHUNK_BYTES


@given(st.integers(0, 50 * CHUNK_BYTES), st.integers(1, 9))
def test_shares_divide_an_image(num_bytes, count):
    ranges = [Share(index=at, count=count).range_of(num_bytes) for at in range(count)]
    assert (ranges[0][0], ranges[-1][1]) == (0, num_bytes)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))


def test_a_part_is_not_rebuilt_with_another_save_than_is_in_the_parity():
    hosts, size = HOSTS[:3], 3 * CHUNK_BYTES
    kept = Fleet(hosts, "parity", 3, dict.fromkeys(hosts, size))
    wanted = kept.labels[hosts[0]][0]
    there = {host: kept.labels[host] for host in hosts[1:]}
    assert custody.plan_sources(there, wanted)
    other = custody.plan_keepings(hosts, hosts[1], size, "parity", 3)[0]
    saved_again = label_of(hosts[1], size, other, mark=2)
    there[hosts[1]] = [one if one.is_folded else saved_again for one in there[hosts[1]]]
    assert custody.plan_sources(there, wanted) == []


@pytest.mark.parametrize(
    ("hosts", "size"), [(["a"], 2), (["a", "a"], 2), (["a", ""], 2), (["a", "b"], 1)]
)
def test_hosts_that_cannot_keep_anything_for_each_other_are_refused(hosts, size):
    with pytest.raises(ConfigError):
        custody.groups_of(hosts, size)
