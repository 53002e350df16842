"""Checkpoints in the memory of other hosts: several holders on this machine, some of which are killed, full, damaged or missing."""

import contextlib
import io
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from argosy.checkpoint import Checkpointer, Objects, Peers, names, signatures, sockets
from argosy.checkpoint.boards import FileBoard, Group
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.opened import Opened
from argosy.checkpoint.peers import copies, messages, notes
from argosy.checkpoint.peers.labels import CHUNK_BYTES, Address, Image, Label, Share
from argosy.checkpoint.peers.messages import Block, Put, Ready, Refused
from argosy.checkpoint.peers.recalls import PeerListing
from argosy.checkpoint.peers.serving import Serving
from argosy.checkpoint.peers.settings import Copying
from argosy.checkpoint.peers.shelves import Shelves
from argosy.checkpoint.peers.unixroute import UnixRoute
from argosy.checkpoint.tiers.remotes import RemoteListing
from argosy.cli.app import main
from argosy.errors import CheckpointDamaged, ConfigError, NoRoom, PeerAbsent, TimedOut

HOSTS = ("a", "b", "c")
SIZES = {"a": 700_000, "b": 900_000, "c": 100, "d": 400_000}


def state(host, step):
    generator = torch.Generator().manual_seed(1000 * ord(host) + step)
    return {"x": torch.randn(SIZES[host], generator=generator), "note": f"{host}{step}"}


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Fleet:
    """Hosts with a store each; holders in threads of this process, or in processes of their own."""

    def __init__(self, path, hosts=HOSTS, **settings):
        self.path = path
        self.hosts = hosts
        self.settings = {"directory": str(path / "sockets"), "run": "run", **settings}
        self.shelves = {}
        self.threads = {}
        self.route = UnixRoute(self.peers(hosts[0]))
        self.route.directory.mkdir(parents=True, exist_ok=True)

    def peers(self, host, **more):
        return Peers(hosts=self.hosts, host=host, **self.settings | more)

    def hold(self, *hosts, most_bytes=200 * CHUNK_BYTES):
        """Holders in threads, whose memory a test can reach."""
        for host in hosts or self.hosts:
            directory = os.open(self.route.directory, os.O_RDONLY | os.O_DIRECTORY)
            shelves = self.shelves[host] = Shelves(most_bytes=most_bytes, keep=2)
            listener = sockets.listen(directory, names.holder_name(host))
            serving = Serving(listener, directory, names.holder_name(host), shelves)

            def serve(serving=serving, directory=directory):
                serving.serve(3600)
                os.close(directory)

            self.threads[host] = threading.Thread(target=serve)
            self.threads[host].start()

    def copy(self, host, step, route=None, asked=None):
        """As the process that copies does it."""
        copying = Copying(peers=self.peers(host), run="run", share=Share())
        with Folder(self.path / host / names.step_name(step)) as folder:
            return copies.copy(folder, route or self.route, copying, asked=asked)

    def save(self, *steps):
        for step in steps:
            for host in self.hosts:
                with Checkpointer(self.path / host) as checkpointer:
                    checkpointer.save(step, state(host, step))
                self.copy(host, step)

    def lose(self, *hosts):
        """Memory and disk."""
        for host in hosts:
            self.route.end(host)
            shutil.rmtree(self.path / host)

    def listing(self, host):
        return PeerListing(self.route, self.hosts, "run", host)

    def load(self, host, **more):
        """A replacement comes up in the place of a host; None when it finds nothing."""
        found = {"x": torch.zeros(SIZES[host]), "note": ""}
        with Checkpointer(self.path / host, peers=self.peers(host, **more)) as checkpointer:
            loaded = checkpointer.load(found)
        if loaded is not None:
            assert loaded.values["note"] == f"{host}{loaded.step}"
            assert torch.equal(found["x"], state(host, loaded.step)["x"])
        return loaded

    def end(self):
        for host in self.hosts:
            self.route.end(host)
        for thread in self.threads.values():
            thread.join(20)
        self.route.close()


@pytest.fixture
def fleet(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(**settings):
            found = Fleet(tmp_path, **settings)
            stack.callback(found.end)
            return found

        yield make


@pytest.mark.parametrize("scheme", ["buddy", "parity"])
def test_a_host_that_has_lost_memory_and_disk_gets_the_same_bits_back(fleet, scheme, caplog):
    caplog.set_level(logging.INFO, "argosy.checkpoint")
    hosts = fleet(scheme=scheme, hosts=("a", "b", "c", "d"))
    hosts.hold()
    hosts.save(1, 2)
    for lost in hosts.hosts:
        kept = hosts.path / "kept"
        shutil.copytree(hosts.path / lost, kept)
        hosts.lose(lost)
        hosts.hold(lost)
        listing = hosts.listing(lost)
        assert listing.steps() == [1, 2]
        assert listing.verify(2).faults == []
        with listing.folder(2) as found, Folder(kept / names.step_name(2)) as original:
            assert found.manifest_bytes == original.manifest_bytes
        loaded = hosts.load(lost)
        assert (loaded.step, loaded.where) == (2, "the memory of a, b, c, d")
        assert f"the part of {lost} of step 2 is read" in caplog.text
        assert ("rebuilt from" in caplog.text) == (scheme == "parity")
        # What the lost host kept for others comes again with their next saves; here it is put again at once.
        kept.rename(hosts.path / lost)
        for host in hosts.hosts:
            hosts.shelves[host].forget_newer(label_of(1, owner=host, step=0))
        for step in (1, 2):
            for host in hosts.hosts:
                hosts.copy(host, step)


def test_parity_takes_a_part_of_a_part_and_a_buddy_all_of_it(fleet, tmp_path):
    used = {}
    for scheme in ("buddy", "parity"):
        hosts = Fleet(tmp_path / scheme, scheme=scheme)
        hosts.hold()
        hosts.save(1)
        parts = {host: hosts.listing(host).place_of(1)._image.num_bytes for host in HOSTS}
        used[scheme] = sum(one.statistics()["num_bytes"] for one in hosts.shelves.values())
        hosts.end()
    chunks = [-(-size // CHUNK_BYTES) for size in parts.values()]
    assert used["buddy"] == sum(chunks) * CHUNK_BYTES
    # The hosts' own parts, and at each the longest of the others' halves.
    assert used["parity"] == (sum(chunks) + 2 + 2 + 2) * CHUNK_BYTES


def test_two_hosts_of_a_group_are_too_many_and_the_disk_is_what_is_left(fleet, caplog):
    hosts = fleet(scheme="parity")
    hosts.hold()
    hosts.save(1, 2)
    hosts.lose("a", "b")
    assert hosts.listing("a").steps() == []
    assert hosts.listing("c").steps() == [1, 2]
    with pytest.raises(CheckpointDamaged, match="too little of step 2 of a: b did not answer"):
        hosts.load("a")
    with Checkpointer(hosts.path / "b") as checkpointer:
        checkpointer.save(1, state("b", 1))
    assert hosts.load("b").step == 1
    assert "nobody holds memory for a" in caplog.text


def test_a_host_whose_buddy_is_lost_too_begins_anew_and_is_told(fleet, caplog):
    hosts = fleet()
    hosts.hold()
    hosts.save(1)
    hosts.lose("a", "b")
    hosts.hold("a", "b")
    assert hosts.load("a") is None
    assert "peers have step 1 of others and nothing of a" in caplog.text


MEMORY = "the memory of a, b, c"


def damage(path):
    (largest,) = sorted(path.glob("*.safetensors"), key=lambda one: one.stat().st_size)[-1:]
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)


def test_the_chain_goes_by_memory_disk_older_ones_and_the_object_store(fleet, caplog):
    """Hop by hop: what was best is taken away or damaged, one after the other."""
    caplog.set_level(logging.INFO, "argosy.checkpoint")
    hosts = fleet()
    hosts.hold()
    disk, objects = hosts.path / "a", Objects(f"file://{hosts.path}/far", every=2)
    with Checkpointer(disk, objects=objects) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state("a", step))
    for step in (2, 3):
        hosts.copy("a", step)

    def went():
        caplog.clear()
        found = {"x": torch.zeros(SIZES["a"]), "note": ""}
        with Checkpointer(disk, peers=hosts.peers("a"), objects=objects) as checkpointer:
            loaded = checkpointer.load(found)
        assert torch.equal(found["x"], state("a", loaded.step)["x"])
        assert f"step {loaded.step} loaded from {loaded.where}" in caplog.text
        assert caplog.text.count("cannot be used") == len(loaded.skipped)
        return loaded.step, loaded.where, len(loaded.skipped)

    assert went() == (3, MEMORY, 0)
    tried = [f"step 3 of {MEMORY}, step 3 of {disk}, step 2 of {MEMORY}, step 2 of {disk}"]
    tried += [f"step 2 of {objects.url}, step 1 of {disk}"]
    assert f"to be tried, in this order: {', '.join(tried)}" in caplog.text
    whole = Address(run="run", step=3, members=("a",), owner="a")
    hosts.shelves["b"].memory_of(whole).bytes[1_000_000] ^= 4
    assert went() == (3, str(disk), 1)
    damage(disk / names.step_name(3))
    assert went() == (2, MEMORY, 2)
    hosts.route.end("b")
    assert went() == (2, str(disk), 1)
    assert "nobody holds memory for b" in caplog.text
    assert f"{MEMORY} has nothing of a" in caplog.text
    damage(disk / names.step_name(2))
    assert went() == (2, objects.url, 2)
    shutil.rmtree(hosts.path / "far")
    assert went() == (1, str(disk), 2)


def test_memory_that_has_too_little_is_left_for_the_disk_and_said(fleet, caplog):
    hosts = fleet(scheme="parity")
    hosts.hold()
    hosts.save(1)
    hosts.route.end("a")
    hosts.route.end("b")
    loaded = hosts.load("a")
    assert (loaded.step, loaded.where, loaded.skipped) == (1, str(hosts.path / "a"), [])
    assert f"{MEMORY} has too little of step 1 of a" in caplog.text


def test_memory_that_has_another_save_of_a_step_is_not_preferred_to_the_disk(fleet, caplog):
    hosts = fleet()
    hosts.hold()
    hosts.save(1, 2)
    disk = hosts.path / "a"
    shutil.rmtree(disk / names.step_name(2))
    with Checkpointer(disk) as checkpointer:
        checkpointer.save(2, {"x": torch.ones(SIZES["a"]), "note": "again"})
    found = {"x": torch.zeros(SIZES["a"]), "note": ""}
    with Checkpointer(disk, peers=hosts.peers("a")) as checkpointer:
        loaded = checkpointer.load(found)
    assert (loaded.step, loaded.where, loaded.values["note"]) == (2, str(disk), "again")
    assert f"peers have another save of step 2 than {disk}" in caplog.text


@contextlib.contextmanager
def standing_still(hosts, host):
    """A holder that is there and does not answer."""
    hosts.route.end(host)
    path = hosts.route.directory / names.holder_name(host)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(64)
        yield
        path.unlink()


def test_a_holder_that_stands_still_is_waited_for_once(fleet, caplog):
    hosts = fleet()
    hosts.hold()
    hosts.save(1, 2)
    silence = "the holder of b is there and does not answer"
    with standing_still(hosts, "b"):
        loaded = hosts.load("a", patience_seconds=1.0)
        assert (loaded.step, loaded.where) == (2, str(hosts.path / "a"))
        assert caplog.text.count(silence) == 1
        caplog.clear()
        # What others have can be had; no later hop asks it again.
        route = UnixRoute(hosts.peers("b", patience_seconds=1.0))
        listing = PeerListing(route, HOSTS, "run", "b")
        assert listing.steps() == [1, 2]
        assert [listing.verify(step).faults for step in (2, 1)] == [[], []]
        assert caplog.text.count(silence) == 1
        route.close()
        shutil.rmtree(hosts.path / "a")
        with pytest.raises(TimedOut, match="the memory of b may have a checkpoint"):
            hosts.load("a", patience_seconds=1.0)


def test_after_a_load_from_memory_the_object_store_goes_on_with_what_it_had(fleet):
    hosts = fleet()
    hosts.hold()
    objects = Objects(f"file://{hosts.path}/far", raises=True)
    with Checkpointer(hosts.path / "a", objects=objects) as checkpointer:
        checkpointer.save(1, state("a", 1))
    hosts.copy("a", 1)
    shutil.rmtree(hosts.path / "a")
    with Checkpointer(hosts.path / "a", peers=hosts.peers("a"), objects=objects) as checkpointer:
        found = {"x": torch.zeros(SIZES["a"]), "note": ""}
        assert checkpointer.load(found).where == MEMORY
        checkpointer.save(2, state("a", 2))
        checkpointer.wait_uploaded(60)
    assert RemoteListing.of(objects).steps() == [1, 2]


def test_damaged_memory_is_gone_around(fleet, caplog):
    hosts = fleet(scheme="parity")
    hosts.hold()
    hosts.save(1, 2)
    shutil.rmtree(hosts.path / "a" / names.step_name(2))
    members = ("a", "b", "c")
    whole = Address(run="run", step=2, members=members, owner="a")
    hosts.shelves["a"].memory_of(whole).bytes[1_000_000] ^= 4
    loaded = hosts.load("a")
    assert (loaded.step, loaded.skipped) == (2, [])
    assert "have changed in memory" in caplog.text
    # No way is left to that step: the next hop is tried.
    parity = Address(run="run", step=2, members=members)
    hosts.shelves["b"].memory_of(parity).bytes[1_000_000] ^= 4
    loaded = hosts.load("a")
    assert loaded.step == 1
    assert "the part of a of step 2 cannot be had any more" in loaded.skipped[0]


def test_a_peer_that_dies_while_it_is_read_from_ends_that_hop_alone(fleet):
    hosts = fleet()
    hosts.hold()
    hosts.save(1, 2)
    shutil.rmtree(hosts.path / "a" / names.step_name(2))
    with hosts.listing("a").folder(2) as folder:
        hosts.route.end("b")
        with pytest.raises(CheckpointDamaged, match="the part of a of step 2"):
            folder.trees()
    assert hosts.load("a").step == 1


def test_a_part_of_a_small_checkpoint_may_be_empty(fleet):
    hosts = fleet(scheme="parity")
    hosts.hold()
    with Checkpointer(hosts.path / "a") as checkpointer:
        checkpointer.save(1, {"x": torch.arange(10)})
    for index, host in enumerate(HOSTS):
        copying = Copying(peers=hosts.peers(host), run="run", share=Share(index=index, count=3))
        with Folder(hosts.path / "a" / names.step_name(1)) as folder:
            copies.copy(folder, hosts.route, copying)
    hosts.route.end("a")
    assert hosts.listing("c").verify(1).faults == []


def test_columns_of_a_matrix_are_read_from_memory(fleet):
    hosts = fleet(scheme="buddy")
    hosts.hold()
    matrix = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    with Checkpointer(hosts.path / "a") as checkpointer:
        checkpointer.save(1, {"x": matrix})
    hosts.copy("a", 1)
    with Opened(hosts.listing("a").place_of(1)) as opened:
        assert torch.equal(opened.tensor("x")[:, 256:512], matrix[:, 256:512])


def test_hosts_that_share_a_store_keep_a_part_each(fleet):
    hosts = fleet(scheme="parity")
    hosts.hold()
    store = hosts.path / "shared"
    failures, loaded = [], {}
    big = torch.arange(1_500_000)

    def run(rank, session, save):
        try:
            group = Group(rank, 3, session, FileBoard(hosts.path / session), seconds=30)
            peers = hosts.peers(HOSTS[rank])
            with Checkpointer(store, group=group, peers=peers) as checkpointer:
                if save:
                    checkpointer.save(5, {"x": big})
                    checkpointer.wait_uploaded(30)
                found = {"x": torch.zeros_like(big)}
                loaded[session, rank] = checkpointer.load(found), torch.equal(found["x"], big)
        except BaseException as failure:
            failures.append(failure)

    def together(session, save):
        (hosts.path / session).mkdir()
        threads = [threading.Thread(target=run, args=(at, session, save)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures

    together("first", save=True)
    kept = [label for host in HOSTS for label in hosts.route.list(host, "run")]
    assert sorted(one.share.index for one in kept if one.is_whole) == [0, 1, 2]
    hosts.route.end("b")
    hosts.hold("b")
    shutil.rmtree(store)
    together("second", save=False)
    for rank in range(3):
        found, is_equal = loaded["second", rank]
        assert (found.step, is_equal) == (5, True)
        assert found.where == "the memory of a, b, c"


def test_what_is_signed_on_disk_is_trusted_from_memory(fleet, tmp_path):
    hosts = fleet()
    hosts.hold()
    private, public, other = (tmp_path / name for name in ("key.pem", "key.pub", "other.pub"))
    signatures.make_keys(private, public)
    signatures.make_keys(tmp_path / "other.pem", other)
    with Checkpointer(hosts.path / "a") as checkpointer:
        checkpointer.sign_with(private)
        checkpointer.save(1, state("a", 1))
    hosts.copy("a", 1)
    hosts.lose("a")
    with Checkpointer(hosts.path / "a", peers=hosts.peers("a")) as checkpointer:
        checkpointer.trust(public)
        assert checkpointer.load({"x": torch.zeros(SIZES["a"]), "note": ""}).step == 1
        checkpointer.trust(other)
        with pytest.raises(CheckpointDamaged):
            checkpointer.load({"x": torch.zeros(SIZES["a"]), "note": ""})


def test_full_memory_is_told_and_what_was_there_stays(fleet):
    hosts = fleet()
    hosts.hold("a", "c")
    hosts.hold("b", most_bytes=4 * CHUNK_BYTES)
    hosts.save(1)
    with Checkpointer(hosts.path / "a") as checkpointer:
        checkpointer.save(2, state("a", 2))
    with pytest.raises(NoRoom, match="the memory of b: step 2 of a needs"):
        hosts.copy("a", 2)
    assert hosts.listing("a").steps() == [1]


def test_a_missing_peer_does_not_keep_the_others_from_their_stretches(fleet):
    hosts = fleet(scheme="parity")
    hosts.hold("a", "c")
    with Checkpointer(hosts.path / "a") as checkpointer:
        checkpointer.save(1, state("a", 1))
    with pytest.raises(PeerAbsent, match="nobody holds memory for b"):
        hosts.copy("a", 1)
    assert [(one.owner, one.is_folded) for one in hosts.route.list("a", "run")] == [("a", False)]
    assert [(one.owner, one.is_folded) for one in hosts.route.list("c", "run")] == [("a", True)]
    hosts.hold("b")
    assert hosts.copy("a", 1).found_bytes > 0
    assert [(one.owner, one.is_folded) for one in hosts.route.list("b", "run")] == [("a", True)]


@pytest.mark.parametrize("step", [105, 110])
def test_who_goes_back_among_other_hosts_gets_nothing_newer_from_the_former_ones(fleet, step):
    former = fleet(hosts=("a", "b", "c", "d"))
    former.hold()
    with Checkpointer(former.path / "a") as checkpointer:
        for left in (100, 110, 120):
            checkpointer.save(left, state("a", left + 1))
            former.copy("a", left)
    assert former.listing("a").steps() == [110, 120]
    for left in (110, 120):
        shutil.rmtree(former.path / "a" / names.step_name(left))
    hosts = fleet(hosts=("a", "b", "c", "d", "e", "f"))
    hosts.hold("e", "f")
    with Checkpointer(hosts.path / "a", peers=hosts.peers("a")) as checkpointer:
        checkpointer.save(step, state("a", step))
        checkpointer.wait_uploaded(30)
    hosts.lose("a")
    kept = [label for host in hosts.hosts[1:] for label in hosts.route.list(host, "run")]
    assert [label.step for label in kept] == [step]
    assert hosts.load("a").step == step


def test_each_host_that_gets_nothing_is_asked_until_it_answers_and_when_its_owner_goes_back(fleet):
    hosts = fleet(hosts=("a", "b", "c", "d"))
    hosts.hold("a", "c", "d")
    with Checkpointer(hosts.path / "a") as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state("a", step))
    newer = label_of(10, step=9)
    asked = {}
    hosts.copy("a", 2, asked=asked)
    assert asked == {"a": 2, "d": 2}
    hosts.hold("b")
    for host in ("b", "d"):
        hosts.route.put(host, newer, lambda start, into: None)
    hosts.copy("a", 3, asked=asked)
    assert (hosts.route.list("b", "run"), hosts.route.list("d", "run")) == ([], [newer])
    hosts.copy("a", 1, asked=asked)
    assert hosts.route.list("d", "run") == []
    hosts.route.end("d")
    hosts.copy("a", 4, asked=asked)
    assert asked == {"a": 4, "b": 4, "d": 4}
    hosts.copy("a", 1, asked=asked)
    assert asked == {"a": 1, "b": 1}


def test_a_holder_gives_the_room_of_runs_that_are_over_to_those_that_go_on(fleet):
    hosts = fleet()
    hosts.hold("b", most_bytes=4 * CHUNK_BYTES)

    def put(route, run, step):
        route.put("b", label_of(10, run=run, step=step), lambda *_: None)

    def kept():
        return {run: [one.step for one in hosts.route.list("b", run)] for run in ("used", "over")}

    other = UnixRoute(hosts.peers("a"))
    for step in (1, 2):
        put(other, "used", step)
    for step in (1, 2):
        put(hosts.route, "over", step)
    for step in (1, 2, 3):
        put(hosts.route, "run", step)
    assert kept() == {"used": [1, 2], "over": []}
    other.close()
    wait_for(lambda: "used" not in hosts.shelves["b"]._users.values())
    put(hosts.route, "last", 1)
    assert kept()["used"] == [2]


def label_of(num_bytes, run="run", step=1, owner="a"):
    image = Image(mark=1, num_bytes=num_bytes, manifest_bytes=0, signature_bytes=0)
    return Label(
        run=run,
        step=step,
        owner=owner,
        members=(owner,),
        share=Share(),
        image=image,
        start=0,
        stop=num_bytes,
    )


def test_bytes_that_are_not_what_their_checksum_says_are_refused(fleet):
    hosts = fleet()
    hosts.hold("b")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        sockets.connect(link, hosts.route.directory, names.holder_name("b"))
        messages.send(link, Put(label=label_of(10)))
        assert isinstance(messages.receive_answer(link), Ready)
        messages.send(link, Block(num_bytes=10, crc32c=1), memoryview(b"0123456789"))
        answer = messages.receive_answer(link)
    assert isinstance(answer, Refused)
    assert answer.kind == "CheckpointDamaged"
    assert hosts.route.list("b", "run") == []
    assert hosts.shelves["b"].statistics()["num_bytes"] == 0


SAVER = """
import sys, time
from argosy.checkpoint.peers.labels import Label
from argosy.checkpoint.peers.settings import Peers
from argosy.checkpoint.peers.unixroute import UnixRoute
import msgspec

def fill(start, into):
    if start:
        print("half", flush=True)
        time.sleep(600)

peers = Peers(hosts=("a", "b"), host="a", directory=sys.argv[1])
UnixRoute(peers).put("b", msgspec.json.decode(sys.argv[2], type=Label), fill)
"""


def test_a_saver_that_is_killed_in_the_middle_of_a_put_leaves_nothing(fleet):
    hosts = fleet()
    hosts.hold("b")
    label = label_of(20 << 20)
    argument = msgspec.json.encode(label).decode()
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(hosts.route.directory), argument], stdout=subprocess.PIPE
    )
    with saver:
        assert saver.stdout.readline() == b"half\n"
        assert hosts.shelves["b"].statistics()["num_bytes"] == 20 << 20
        saver.kill()
    wait_for(lambda: hosts.shelves["b"].statistics()["coming"] == 0)
    assert hosts.shelves["b"].statistics()["num_bytes"] == 0
    assert hosts.route.list("b", "run") == []
    hosts.route.put("b", label, lambda start, into: None)
    assert hosts.route.list("b", "run") == [label]


def holder_pid(hosts, host):
    """Of a holder that is a process of its own: by its command line."""
    wanted = [str(hosts.route.directory.absolute()), host]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                said = (entry / "cmdline").read_bytes().decode().split("\0")
                if "argosy.checkpoint.peers" in said and said[3:5] == wanted:
                    return int(entry.name)
    return None


def test_holders_outlive_the_session_and_a_killed_one_is_told_and_replaced(fleet):
    hosts = fleet(hosts=("a", "b"), memory_bytes=64 << 20, every=2)
    events = []
    with Checkpointer(hosts.path / "b", peers=hosts.peers("b")):
        pass
    first = Checkpointer(hosts.path / "a", peers=hosts.peers("a"), listener=events.append)
    with first:
        for step in (1, 2, 3, 4):
            first.save(step, state("a", step))
            first.wait_uploaded(30)
        assert [one.step for one in events if one.what == "copied"] == [2, 4]
        assert hosts.listing("a").steps() == [2, 4]
        os.kill(holder_pid(hosts, "b"), signal.SIGKILL)
        wait_for(lambda: holder_pid(hosts, "b") is None)
        first.save(6, state("a", 6))
        first.wait_uploaded(30)
        failed = [one for one in events if one.what == "copy_failed"]
        assert [one.step for one in failed] == [6]
        assert "holder of b" in failed[0].detail or "memory for b" in failed[0].detail
        # The host's own checkpointer brings its holder back.
        with Checkpointer(hosts.path / "b", peers=hosts.peers("b")):
            pass
        first.save(8, state("a", 8))
        first.wait_uploaded(30)
    shutil.rmtree(hosts.path / "a")
    assert hosts.listing("a").steps() == [8]
    assert hosts.load("a").step == 8
    pids = [holder_pid(hosts, host) for host in ("a", "b")]
    assert all(pids)
    hosts.end()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert list(hosts.route.directory.iterdir()) == []


def test_a_holder_can_stay_under_a_supervisor(fleet):
    hosts = fleet(hosts=("a", "b"))
    command = [sys.executable, "-m", "argosy.checkpoint.peers", str(hosts.route.directory), "a"]
    with subprocess.Popen([*command, "--stay"]) as holder:
        wait_for((hosts.route.directory / names.holder_name("a")).exists)
        hosts.route.start("a")
        assert (
            subprocess.run([*command, "--stay"], check=False, stderr=subprocess.DEVNULL).returncode
            == 64
        )
        assert holder.poll() is None
        hosts.route.end("a")
        assert holder.wait(20) == 0


def argosy(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["checkpoint", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


def asked(*words, code=0):
    found, out, err = argosy(*words, "--json")
    assert found == code, err
    return json.loads(out)


def test_the_command_line_says_what_peers_hold_of_a_store_that_is_lost(fleet):
    hosts = fleet()
    hosts.hold()
    run = hosts.path / "run"
    store = run / "checkpoints"
    with Checkpointer(store, peers=hosts.peers("a")) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state("a", step))
            checkpointer.wait_uploaded(30)
    for step in (1, 2):
        shutil.rmtree(store / names.step_name(step))
    found = asked("ls", store, "--peers")
    assert (found["store"], found["silent"]) == (MEMORY, [])
    assert [(row["step"], row["fault"], row["pinned"]) for row in found["checkpoints"]] == [
        (1, None, None),
        (2, None, None),
    ]
    assert all(row["bytes"] > 4 * SIZES["a"] for row in found["checkpoints"])
    # The run's own note does when the store is gone; steps are named as elsewhere.
    (store / notes.NOTE).rename(run / notes.NOTE)
    shutil.rmtree(store)
    assert asked("show", store, 1, "--peers")["step"] == 1
    assert asked("show", store / names.step_name(2), "--peers")["step"] == 2
    reports = asked("verify", run, "--peers", "--all")["checkpoints"]
    assert [(one["step"], one["is_good"]) for one in reports] == [(1, True), (2, True)]
    whole = Address(run="run", step=2, members=("a",), owner="a")
    hosts.shelves["b"].memory_of(whole).bytes[1_000_000] ^= 4
    (report,) = asked("verify", run, "--peers", code=65)["checkpoints"]
    assert "have changed in memory" in " ".join(report["faults"])
    hosts.route.end("b")
    found = asked("ls", run, "--peers")
    assert (found["checkpoints"], found["silent"]) == ([], ["b"])
    assert argosy("ls", run, "--peers")[1] == f"no checkpoints in {MEMORY}\n"
    assert asked("show", run, "--peers", code=66)["error"]["code"] == 66
    assert "has no peers.json" in argosy("ls", hosts.path / "sockets", "--peers")[2]


def test_a_copy_that_failed_is_raised_where_that_is_wanted(fleet):
    hosts = fleet(hosts=("a", "b"), raises=True)
    hosts.hold("a")
    with Checkpointer(hosts.path / "a", peers=hosts.peers("a")) as checkpointer:
        checkpointer.save(1, state("a", 1))
        with pytest.raises(PeerAbsent, match="nobody holds memory for b"):
            checkpointer.wait_uploaded(30)
    assert hosts.load("a").step == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "z"},
        {"hosts": ("a",)},
        {"scheme": "mirror"},
        {"every": 0},
        {"keep": 0},
        {"patience_seconds": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        Peers(**{"hosts": HOSTS, "host": "a"} | wrong)
