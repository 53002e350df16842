"""Checkpoints in an object store, here a directory: what is sent, what is not, what is committed, loaded, refused and removed."""

import json
import os
import shutil
import signal
import time

import pytest
import torch

from argosy.checkpoint import Checkpointer, Keep, Objects, Opened, Writing, manifests, signatures
from argosy.checkpoint.commits import Store
from argosy.checkpoint.directio import Files
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.tiers import claims, uploads
from argosy.checkpoint.tiers.buckets import Bucket
from argosy.checkpoint.tiers.chain import Hop, order
from argosy.checkpoint.tiers.keeping import Keeper
from argosy.checkpoint.tiers.pulls import pull
from argosy.checkpoint.tiers.remotes import RemoteListing
from argosy.errors import CheckpointDamaged, ConfigError, NotFoundError, TimedOut

EXTRA = "extra-00001-of-00001.safetensors"


def tensors(step):
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(640, 512, generator=generator), "b": torch.randn(7)}


def save(store, *steps, **more):
    with Checkpointer(store, **more) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"user": tensors(step), "note": f"é{step}"})


class Far:
    """A store on disk, and an address to send it to."""

    def __init__(self, path, key=""):
        self.disk = path / "disk"
        self.far = path / "far"
        self.url = f"file://{self.far}"
        self.objects = Objects(self.url, key=key)
        self.remote = RemoteListing.of(self.objects)

    def push(self, step, pace=lambda num_bytes: None):
        number = claims.claim(self.remote.bucket, self.disk, "")
        with Listing(self.disk).folder(step) as folder:
            return uploads.upload(folder, self.remote, claim=number, pace=pace)

    def file(self, step, name=EXTRA):
        return self.far / f"step-{step:09d}" / name


@pytest.fixture(params=["plain", "encrypted"])
def far(request, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    found = Far(tmp_path, str(key) if request.param == "encrypted" else "")
    save(found.disk, 1, 2)
    return found


def loaded(path, objects=None, step=None, **more):
    user = {}
    found = Checkpointer(path, objects=objects, **more).load({"user": user, "note": ""}, step)
    if found is not None:
        assert torch.equal(user["w"], tensors(found.step)["w"])
        assert found.values["note"] == f"é{found.step}"
    return found


def test_a_step_is_whole_there_and_loads_into_an_empty_place(far, tmp_path):
    sent = far.push(2)
    assert sent.sent_bytes == sum(
        one.stat().st_size
        for one in (far.disk / "step-000000002").iterdir()
        if one.name != "MANIFEST.json"
    )
    assert far.remote.steps() == [2]
    report = far.remote.verify(2)
    assert (report.faults, report.bytes_read) == ([], sent.sent_bytes)
    found = loaded(tmp_path / "new", far.objects)
    assert (found.step, found.where, found.skipped) == (2, far.url, [])


def test_a_plain_copy_of_the_objects_is_a_store(tmp_path):
    far = Far(tmp_path)
    save(far.disk, 1, 2)
    far.push(1)
    far.push(2)
    shutil.copytree(far.far, tmp_path / "copy")
    assert loaded(tmp_path / "copy").step == 2
    assert Listing(tmp_path / "copy").verify(2).faults == []
    # And a plain copy of a store can be read as objects.
    assert RemoteListing.of(Objects(f"file://{far.disk}")).verify(1).faults == []


def test_a_slice_reads_about_what_it_needs(far):
    far.push(2)
    with Opened(far.remote.place_of(2)) as opened:
        lazy = opened.tensor("user/w")
        assert torch.equal(lazy[0:160], tensors(2)["w"][0:160])
        needed = 160 * 512 * 4
        assert lazy.statistics.bytes_read <= 1.25 * needed
        assert torch.equal(lazy[:, 128:256], tensors(2)["w"][:, 128:256])


class Interrupted(Exception):
    pass


def test_an_upload_that_was_cut_off_sends_only_the_rest(far):
    def stop(num_bytes):
        deadline = time.monotonic() + 10
        if num_bytes > 100_000:
            while not far.file(2, "extra.json").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise Interrupted

    with pytest.raises(Interrupted):
        far.push(2, stop)
    assert far.remote.steps() == []
    small = far.file(2, "extra.json").stat().st_size
    assert not far.file(2).exists()
    sent = far.push(2)
    assert 0 < sent.found_bytes <= small
    assert sent.sent_bytes > 100_000
    assert far.remote.verify(2).faults == []
    again = far.push(2)
    assert (again.is_new, again.sent_bytes) == (False, 0)


def test_an_object_of_the_right_size_with_other_bytes_is_sent_again(far):
    far.push(2)
    far.file(2, "MANIFEST.json").unlink()
    data = bytearray(far.file(2).read_bytes())
    data[-5] ^= 1
    far.file(2).write_bytes(data)
    assert far.push(2).sent_bytes > 100_000
    assert far.remote.verify(2).faults == []


def test_a_file_that_is_damaged_on_disk_is_not_sent(far):
    path = far.disk / "step-000000002" / EXTRA
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="user/w"):
        far.push(2)
    assert far.remote.steps() == []


def test_unchanged_files_are_referred_to_and_what_is_referred_to_stays(tmp_path):
    base = torch.nn.Linear(512, 1024)
    base.requires_grad_(False)
    model = torch.nn.Sequential(base, torch.nn.Linear(1024, 8))
    far = Far(tmp_path)
    with Checkpointer(far.disk) as checkpointer:
        for step in (1, 2, 3):
            with torch.no_grad():
                model[1].weight += 1
            checkpointer.save(step, {"model": model})
    sent = [far.push(step) for step in (1, 2, 3)]
    assert sent[0].referred_bytes == 0
    assert sent[1].referred_bytes == sent[2].referred_bytes > 2_000_000
    assert sent[2].sent_bytes < 0.05 * sent[0].sent_bytes
    with far.remote.folder(3) as folder:
        (record,) = [one for one in folder.manifest.files.values() if one.kind == "frozen"]
        assert (record.stored, record.origin.step) == ("origin", 1)
    removed = Keeper(far.remote, Keep(last=1)).clean(3)
    assert [one.step for one in removed] == [2]
    assert far.remote.steps() == [1, 3]
    assert not (far.far / "step-000000002").exists()
    assert far.remote.verify(3).faults == []
    again = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 8))
    assert Checkpointer(tmp_path / "new", objects=far.objects).load({"model": again}).step == 3
    assert torch.equal(again[0].weight, model[0].weight)


class NoLinks(Files):
    def link(self, name, source, directory):
        raise PermissionError(1, "no links here")


def test_files_that_the_disk_refers_to_are_sent_with_the_step(tmp_path):
    far = Far(tmp_path)
    model = torch.nn.Linear(8, 8)
    model.requires_grad_(False)
    with Checkpointer(far.disk, writing=Writing(files=NoLinks())) as checkpointer:
        checkpointer.save(1, {"model": model})
        checkpointer.save(2, {"model": model})
    far.push(2)
    assert far.remote.verify(2).faults == []


def test_retention_removes_what_was_given_up_and_keeps_pins(far):
    save(far.disk, 3, 4)
    for step in (1, 3):
        far.push(step)
    far.remote.pin(1, "table 2")
    assert far.remote.pins() == {1: "table 2"}
    shutil.copytree(far.far / "step-000000001", far.far / "step-000000002")
    far.file(2, "MANIFEST.json").unlink()
    far.push(4)
    removed = Keeper(far.remote, Keep(last=1)).clean(4)
    assert [one.step for one in removed] == [3]
    assert far.remote.steps() == [1, 4]
    assert not (far.far / "step-000000002").exists()
    far.remote.unpin(1)
    with pytest.raises(NotFoundError):
        far.remote.unpin(1)


def test_nothing_is_removed_when_the_step_is_not_committed(far):
    far.push(1)
    assert Keeper(far.remote, Keep(last=1)).clean(2) == []
    assert far.remote.steps() == [1]


def test_another_save_of_the_step_is_refused_and_untouched(far, tmp_path):
    far.push(2)
    before = {one.name: one.read_bytes() for one in (far.far / "step-000000002").iterdir()}
    save(tmp_path / "other", 2)
    shutil.copy(far.disk / ".identity", tmp_path / "other")
    with (
        Listing(tmp_path / "other").folder(2) as folder,
        pytest.raises(ConfigError, match="another save of step 2"),
    ):
        uploads.upload(folder, far.remote, claim=99)
    after = {one.name: one.read_bytes() for one in (far.far / "step-000000002").iterdir()}
    assert before == after


@pytest.mark.parametrize("runs", [("a", "b", "c"), ("", "", "")])
def test_a_run_that_goes_on_elsewhere_inherits_the_prefix_once(far, tmp_path, runs):
    far.push(1)
    bucket = far.remote.bucket
    a, b, c = (far.disk, tmp_path / "b", tmp_path / "c")
    claims.claim(bucket, a, runs[0])
    for heir in (b, c):
        claims.inherit(bucket, a, heir)
    claims.claim(bucket, b, runs[1])
    claims.claim(bucket, b, runs[1])
    for run, store in ((runs[2], c), (runs[0], a)):
        assert claims.owner_if_foreign(bucket, store, has_steps=True)
        with pytest.raises(ConfigError, match="is uploaded into by"):
            claims.claim(bucket, store, run)
    assert not claims.owner_if_foreign(bucket, b, has_steps=True)


def test_an_heir_that_uploaded_nothing_hands_on_what_it_may_take(far, tmp_path):
    bucket = far.remote.bucket
    claims.claim(bucket, far.disk, "a")
    claims.inherit(bucket, far.disk, tmp_path / "b")
    claims.inherit(bucket, tmp_path / "b", tmp_path / "b")
    claims.inherit(bucket, tmp_path / "b", tmp_path / "c")
    assert claims.claim(bucket, tmp_path / "c", "c") == 2
    with pytest.raises(ConfigError, match="is uploaded into by the run 'c'"):
        claims.claim(bucket, tmp_path / "b", "b")


def test_a_run_may_go_on_in_place_under_another_name(far):
    bucket = far.remote.bucket
    claims.claim(bucket, far.disk, "a")
    with pytest.raises(ConfigError, match="is uploaded into by the run 'a'"):
        claims.claim(bucket, far.disk, "b")
    claims.inherit(bucket, far.disk, far.disk)
    assert claims.claim(bucket, far.disk, "b") == 2
    with pytest.raises(ConfigError, match="is uploaded into by the run 'b'"):
        claims.claim(bucket, far.disk, "a")


def test_an_heir_is_noted_while_the_store_is_away(far, tmp_path, monkeypatch):
    bucket = far.remote.bucket
    claims.claim(bucket, far.disk, "a")

    def away(prefix):
        raise TimedOut("the object store does not answer", fix="wait")

    for old, new in ((far.disk, tmp_path / "b"), (tmp_path / "b", tmp_path / "b")):
        with monkeypatch.context() as patch:
            patch.setattr(bucket, "list", away)
            with pytest.raises(TimedOut):
                claims.inherit(bucket, old, new)
    assert claims.claim(bucket, tmp_path / "b", "b") == 2
    with pytest.raises(ConfigError, match="is uploaded into by the run 'b'"):
        claims.claim(bucket, far.disk, "a")


def test_a_store_that_adopts_a_prefix_may_be_of_a_run_of_another_name(far, tmp_path):
    bucket = far.remote.bucket
    claims.claim(bucket, far.disk, "a")
    claims.adopt(bucket, tmp_path / "b")
    assert claims.claim(bucket, tmp_path / "b", "b") == 2
    assert claims.identity_of(tmp_path / "b") != claims.identity_of(far.disk)


def test_another_run_is_refused_before_a_byte_is_sent(far, tmp_path):
    far.push(1)
    with pytest.raises(ConfigError, match="is uploaded into by another run"):
        claims.claim(far.remote.bucket, tmp_path, "")
    number = claims.claim(far.remote.bucket, far.disk, "")
    claims.claim(far.remote.bucket, far.disk, "")
    with (
        Listing(far.disk).folder(2) as folder,
        pytest.raises(ConfigError, match="taken over by"),
    ):
        uploads.upload(folder, far.remote, claim=number)
    assert far.remote.steps() == [1]


def test_an_object_that_changes_before_the_commit_is_noticed(far):
    def meddle(num_bytes):
        other = far.file(2)
        if num_bytes < 100_000:
            other.write_bytes(bytes(other.stat().st_size))

    number = claims.claim(far.remote.bucket, far.disk, "")
    with (
        Listing(far.disk).folder(2) as folder,
        pytest.raises(ConfigError, match="has changed while step 2 was sent"),
    ):
        uploads.upload(folder, far.remote, claim=number, pace=meddle, files_at_once=1)
    assert far.remote.steps() == []


def test_order_is_newest_first_and_of_one_step_peers_the_disk_then_objects():
    steps = {"disk": [1, 3], "objects": [2, 3, 4], "peers": [1, 3]}
    rest = [Hop(2, "objects"), Hop(1, "peers"), Hop(1)]
    step_3 = [Hop(3, "peers"), Hop(3), Hop(3, "objects")]
    assert order(steps) == [Hop(4, "objects"), *step_3, *rest]
    # Peers that have another save of it come behind all others.
    step_3 = [Hop(3), Hop(3, "objects"), Hop(3, "peers")]
    assert order(steps, odd=[3]) == [Hop(4, "objects"), *step_3, *rest]


def test_the_newest_step_is_loaded_wherever_it_lies(far):
    far.push(1)
    far.push(2)
    assert loaded(far.disk, far.objects).where == str(far.disk)
    # Damaged on disk: the same step from the object store, then the older one from the disk.
    path = far.disk / "step-000000002" / EXTRA
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)
    found = loaded(far.disk, far.objects)
    assert (found.step, found.where) == (2, far.url)
    assert "checksum" in found.skipped[0]
    assert loaded(far.disk, far.objects, step=2).where == far.url
    far.file(2).write_bytes(far.file(2).read_bytes()[:-1])
    found = loaded(far.disk, far.objects)
    assert (found.step, found.where, len(found.skipped)) == (1, str(far.disk), 2)
    shutil.rmtree(far.disk / "step-000000002")
    assert loaded(far.disk, far.objects).step == 1
    with pytest.raises(NotFoundError):
        loaded(far.disk, far.objects, step=7)


@pytest.mark.parametrize("how", ["cut", "missing", "flipped", "swapped", "lying", "renamed"])
def test_objects_that_are_not_as_sent_are_refused(far, tmp_path, how):
    far.push(1)
    far.push(2)
    path = far.file(2)
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[:-1])
    elif how == "missing":
        path.unlink()
    elif how == "flipped":
        path.write_bytes(data[:80_000] + bytes([data[80_000] ^ 1]) + data[80_001:])
    elif how == "swapped":
        shutil.copy(far.file(1), path)
    elif how == "lying":
        plain = json.loads((far.disk / "step-000000002" / "MANIFEST.json").read_bytes())
        plain["files"][EXTRA]["size"] += 65536
        far.file(2, "MANIFEST.json").write_bytes(json.dumps(plain).encode())
    else:
        (far.far / "step-000000002").rename(far.far / "step-000000003")
    step = 3 if how == "renamed" else 2
    new = tmp_path / "new"
    assert len(far.remote.verify(step).faults) >= 1
    found = loaded(new, far.objects)
    assert (found.step, found.where) == (1, far.url)
    with pytest.raises((CheckpointDamaged, ConfigError)):
        loaded(tmp_path / "other", far.objects, step=step)


def test_a_manifest_that_escapes_its_directory_is_refused(tmp_path):
    far = Far(tmp_path)
    save(far.disk, 1)
    far.push(1)
    text = far.file(1, "MANIFEST.json").read_bytes()
    manifest = json.loads(text)
    manifest["files"]["../../etc/passwd"] = manifest["files"].pop("extra.json")
    del manifest["crc32c"]
    body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    crc = manifests.checksums.of_bytes(body)
    far.file(1, "MANIFEST.json").write_bytes(body + b',"crc32c":%d}\n' % crc)
    with pytest.raises(CheckpointDamaged, match="no plain name"):
        far.remote.folder(1)


def test_the_wrong_key_and_no_key_are_told(tmp_path):
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(os.urandom(32))
    other.write_bytes(os.urandom(32))
    far = Far(tmp_path, str(key))
    save(far.disk, 1)
    far.push(1)
    assert b"user/w" not in far.file(1, "MANIFEST.json").read_bytes()
    assert tensors(1)["w"].numpy().tobytes()[:64] not in far.file(1).read_bytes()
    with pytest.raises(ConfigError, match="this one is"):
        RemoteListing.of(Objects(far.url, key=str(other))).folder(1)
    with pytest.raises(ConfigError, match="is encrypted") as caught:
        RemoteListing.of(Objects(far.url)).folder(1)
    assert "--secret" in caught.value.fix
    with pytest.raises(ConfigError, match="is encrypted"):
        Listing(far.far).folder(1)
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(ConfigError, match="has 1 bytes, not 32"):
        RemoteListing.of(Objects(far.url, key=str(tmp_path / "short")))
    plain = Far(tmp_path / "plain")
    save(plain.disk, 1)
    plain.push(1)
    with pytest.raises(ConfigError, match="not encrypted"):
        RemoteListing.of(Objects(plain.url, key=str(key))).folder(1)


def test_sealed_chunks_cannot_be_moved_and_no_two_objects_share_a_key(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    far = Far(tmp_path, str(key))
    save(far.disk, 1)
    far.push(1)
    first = far.file(1).read_bytes()
    shutil.rmtree(far.far)
    far.push(1)
    second = far.file(1).read_bytes()
    assert first[:16] == second[:16] == b"argosy-aes-gcm-1"
    assert first[16:48] != second[16:48]
    assert first[48:96] != second[48:96]
    step = 65536 + 16
    swapped = second[:48] + second[48 + step : 48 + 2 * step] + second[48 : 48 + step]
    far.file(1).write_bytes(swapped + second[48 + 2 * step :])
    assert any("chunk 0 is not what was encrypted" in one for one in far.remote.verify(1).faults)


def test_a_signed_checkpoint_stays_signed(tmp_path):
    signatures.make_keys(tmp_path / "key.pem", tmp_path / "key.pub")
    far = Far(tmp_path)
    with Checkpointer(far.disk) as checkpointer:
        checkpointer.sign_with(tmp_path / "key.pem")
        checkpointer.save(1, {"user": tensors(1), "note": "é1"})
    far.push(1)
    trusting = Checkpointer(tmp_path / "new", objects=far.objects)
    trusting.trust(tmp_path / "key.pub")
    user = {}
    assert trusting.load({"user": user, "note": ""}).step == 1
    far.file(1, "MANIFEST.sig").unlink()
    with pytest.raises(CheckpointDamaged, match="not signed"):
        trusting.load({"user": user, "note": ""}, step=1)


def test_a_pulled_checkpoint_is_an_ordinary_one(far, tmp_path):
    far.push(1)
    far.push(2)
    store = Store(tmp_path / "pulled")
    store.lock("test")
    with far.remote.folder(2) as folder:
        pull(folder, store)
    with far.remote.folder(2) as folder, pytest.raises(ConfigError, match="exists"):
        pull(folder, store)
    store.close()
    assert loaded(tmp_path / "pulled").step == 2
    assert Listing(tmp_path / "pulled").verify(2).faults == []


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(tmp_path):
    options = {"endpoint": "http://127.0.0.1:1", "region": "r", "connect_timeout": "1s"}
    options |= {"access_key_id": "a", "secret_access_key": "b"}
    objects = Objects("s3://bucket/prefix", options=options)
    checkpointer = Checkpointer(tmp_path / "empty", objects=objects)
    checkpointer._chain.remote.bucket.patience_seconds = 0.1
    with pytest.raises(TimedOut, match="cannot be listed"):
        checkpointer.load({"user": {}, "note": ""})
    save(tmp_path / "some", 1)
    checkpointer = Checkpointer(tmp_path / "some", objects=objects)
    checkpointer._chain.remote.bucket.patience_seconds = 0.1
    assert checkpointer.load({"user": {}, "note": ""}).step == 1
    assert "secret" not in repr(objects)


def test_a_fork_of_a_process_that_has_used_a_store_is_refused_and_does_not_hang():
    options = {"endpoint": "http://127.0.0.1:1", "region": "r", "skip_signature": "true"}
    bucket = Bucket("s3://bucket/prefix", options, patience_seconds=0)
    with pytest.raises(TimedOut):
        bucket.list()
    for use in (bucket.list, lambda: Bucket("s3://other", options).list()):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                use()
            except ConfigError as failure:
                os._exit("in a fork of process" in failure.what)
            finally:
                os._exit(70)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_objects_of_another_run_are_not_loaded(far, tmp_path):
    far.push(2)
    save(tmp_path / "own", 1)
    assert loaded(tmp_path / "own", far.objects).step == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Objects("bucket/prefix"),
        lambda: Objects("s3://b", every=0),
        lambda: Objects("s3://b", deadline_seconds=0),
        lambda: Objects("s3://b", keep=Keep(free_bytes=1)),
        lambda: Objects("s3://b", keep=Keep(last=0)),
        lambda: RemoteListing.of(Objects("ftp://host/x")),
        lambda: RemoteListing.of(Objects("s3://b/x", options={"nonsense": "1"})),
        lambda: RemoteListing.of(Objects("file://host/x")),
    ],
)
def test_what_cannot_work_is_refused_at_once(make):
    with pytest.raises(ConfigError):
        make()


def test_a_key_beside_the_script_is_found_by_the_process_that_uploads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.key").write_bytes(bytes(range(32)))
    objects = Objects(f"file://{tmp_path}/far", key="secret.key")
    with Checkpointer(tmp_path / "disk", objects=objects) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(10)})
        checkpointer.wait_uploaded(30)
    x = torch.zeros(10)
    with Checkpointer(tmp_path / "elsewhere", objects=objects) as checkpointer:
        assert checkpointer.load({"x": x}).step == 1
    assert float(x.sum()) == 10.0
    # Without it nothing is damaged: the key is what is lacking.
    bare = Objects(f"file://{tmp_path}/far")
    with pytest.raises(ConfigError, match="is encrypted with the key") as caught:
        Checkpointer(tmp_path / "third", objects=bare).load({"x": x})
    assert "give the key's file" in caught.value.fix
