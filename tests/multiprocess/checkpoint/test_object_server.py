"""A real S3 server, and a proxy before it that fails: what is committed is whole, what is cut off goes on, and training never hears of it."""

import http.client
import http.server
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from argosy.checkpoint import Checkpointer, Keep, Objects, Opened
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.tiers import claims, uploads
from argosy.checkpoint.tiers.orders import Uploaded
from argosy.checkpoint.tiers.remotes import RemoteListing
from argosy.checkpoint.tiers.uploader import Uploader
from argosy.errors import ArgosyError, ConfigError, NotFoundError, TimedOut

pytestmark = pytest.mark.multiprocess

WEED = Path(sys.executable).with_name("weed")


def free_ports(count):
    """Ports whose partner, ten thousand up, is free too: the server takes both."""
    found, held = [], []
    while len(found) < count:
        one = socket.create_server(("127.0.0.1", 0))
        port = one.getsockname()[1]
        held.append(one)
        try:
            held.append(socket.create_server(("127.0.0.1", port + 10000)))
        except (OSError, OverflowError):
            continue
        found.append(port)
    for one in held:
        one.close()
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The port of a SeaweedFS with two users: one may make buckets, the other only use `runs`."""
    if not WEED.exists():
        pytest.skip("weed is not installed: make setup")
    path = tmp_path_factory.mktemp("weed")
    users = [("admin", ["Admin"]), ("user", ["Read:runs", "Write:runs", "List:runs"])]
    known = {
        "identities": [
            {
                "name": name,
                "credentials": [{"accessKey": name, "secretKey": "secret"}],
                "actions": actions,
            }
            for name, actions in users
        ]
    }
    (path / "s3.json").write_text(json.dumps(known))
    master, volume, filer, s3 = ports = free_ports(4)
    command = [WEED, "server", f"-dir={path}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-master.port={master}", f"-volume.port={volume}", "-filer", "-s3"]
    command += [f"-filer.port={filer}", f"-s3.port={s3}", f"-s3.config={path}/s3.json"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=8"]
    with open(path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not answers(s3):
            assert process.poll() is None, (path / "log").read_text()
            assert time.monotonic() < deadline, (path / "log").read_text()
            time.sleep(0.05)
        RemoteListing.of(objects(s3, "made", user="admin")).bucket.create("made", b"")
        yield s3
    finally:
        process.kill()
        process.wait()
        for port in ports:
            for number in (port, port + 10000):
                for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    left.unlink()


def answers(port):
    try:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        link.request("GET", "/")
        return link.getresponse().status < 500
    except OSError:
        return False


def objects(port, prefix, user="user", **more):
    options = {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", "timeout": "2s"}
    options |= {"access_key_id": user, "secret_access_key": "secret"}
    return Objects(f"s3://runs/{prefix}", options=options | more.pop("options", {}), **more)


def define_methods(handler):
    for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
        setattr(handler, f"do_{method}", handler.hand_on)
    return handler


class Proxy(http.server.ThreadingHTTPServer):
    """Hands requests on, but for those that `fault` names: "500", "cut", "deaf" (done, but nobody hears of it), "late"."""

    daemon_threads = True

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), Handing)
        self.upstream = port
        self.fault = lambda method, path: ""
        self.faults = 0
        self.answered_bytes = 0
        self.received = []
        self.is_over = threading.Event()

    def handle_error(self, request, client_address):
        pass


@define_methods
class Handing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def hand_on(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault(self.command, self.path)
        self.server.received.append((self.command, self.path, len(data)))
        self.server.faults += bool(fault)
        if fault == "500":
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "cut":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "late":
            self.server.is_over.wait(4)
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        link = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=30)
        link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            link.putheader(name, value)
        link.endheaders(data)
        answer = link.getresponse()
        body = answer.read()
        link.close()
        if fault == "deaf":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        self.server.answered_bytes += len(body)
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def proxy(server):
    found = Proxy(server)
    thread = threading.Thread(target=found.serve_forever, args=(0.02,))
    thread.start()
    yield found
    found.is_over.set()
    found.shutdown()
    thread.join()
    found.server_close()


def model(step):
    """A frozen part of 4 MB, and one that changes."""
    torch.manual_seed(0)
    base = torch.nn.Linear(1024, 1024)
    base.requires_grad_(False)
    found = torch.nn.Sequential(base, torch.nn.Linear(1024, 600))
    with torch.no_grad():
        found[1].weight.fill_(float(step))
    return found


def saved(path, *steps):
    with Checkpointer(path) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"model": model(step)})
    return path


def push(path, remote, step, **more):
    number = claims.claim(remote.bucket, path, "")
    with Listing(path).folder(step) as folder:
        return uploads.upload(folder, remote, claim=number, **more)


def test_a_store_that_fails_often_gets_whole_checkpoints_all_the_same(tmp_path, proxy):
    draw, late = random.Random(3), iter([True])

    def fault(method, path):
        if draw.random() > 0.12:
            return ""
        return "late" if next(late, False) else draw.choice(["500", "cut", "deaf"])

    proxy.fault = fault
    (tmp_path / "key").write_bytes(os.urandom(32))
    more = {"key": str(tmp_path / "key"), "keep": Keep(last=1), "raises": True}
    far = objects(proxy.server_port, "often", options={"timeout": "1s"}, **more)
    events = []
    with Checkpointer(tmp_path / "disk", objects=far, listener=events.append) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": model(step)}, wait=False).wait()
            checkpointer.wait_uploaded(60)
    assert [event.step for event in events if event.what == "uploaded"] == [1, 2]
    assert proxy.faults > 2
    new = model(0)
    loaded = Checkpointer(tmp_path / "new", objects=far).load({"model": new})
    assert (loaded.step, loaded.where) == (2, "s3://runs/often")
    assert torch.equal(new[1].weight, model(2)[1].weight)
    proxy.fault = lambda method, path: ""
    remote = RemoteListing.of(far)
    # The frozen file lies in step 1, which stays for that.
    assert remote.steps() == [1, 2]
    assert remote.verify(2).faults == []
    sent = [
        path for method, path, _ in proxy.received if method == "PUT" and "step-000000002" in path
    ]
    assert sent
    assert not [path for path in sent if "model-00001" in path]


def test_a_killed_upload_goes_on_where_it_was(tmp_path, proxy):
    disk = saved(tmp_path / "disk", 1)
    far = objects(proxy.server_port, "killed", bytes_per_second=8e6, files_at_once=1)
    told = []
    uploader = Uploader(disk, "", far, told.append)
    uploader.offer(1)

    def has(name):
        return any(method == "PUT" and name in path for method, path, _ in list(proxy.received))

    deadline = time.monotonic() + 20
    while not has("model-00001"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # The first of the large files is there; the rate keeps the second back.
    remote = RemoteListing.of(objects(proxy.server_port, "killed"))
    while not [path for path in remote.objects() if "model-00001" in path]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(uploader.statistics()["process"], signal.SIGKILL)
    assert remote.steps() == []
    uploader.wait(30)
    uploader.close()
    assert isinstance(told[0], Uploaded)
    assert told[0].found_bytes > 4_000_000
    assert told[0].sent_bytes < 4_000_000
    assert remote.verify(1).faults == []
    # An upload of another size or with another mark is not taken for it.
    assert push(disk, remote, 1).is_new is False


def test_a_commit_whose_answer_is_lost_counts_once(tmp_path, proxy):
    disk = saved(tmp_path / "disk", 1)
    lost = iter(["deaf"])
    proxy.fault = lambda method, path: (
        next(lost, "") if method == "PUT" and path.endswith("MANIFEST.json") else ""
    )
    remote = RemoteListing.of(objects(proxy.server_port, "lost"))
    assert push(disk, remote, 1).is_new
    assert proxy.faults == 1
    assert remote.verify(1).faults == []


def test_two_runs_that_race_for_a_prefix_leave_one_whole_checkpoint(tmp_path, server):
    stores = [saved(tmp_path / name, 1) for name in ("a", "b")]
    remote = RemoteListing.of(objects(server, "race"))
    errors, barrier = [], threading.Barrier(2)

    def run(store):
        own = RemoteListing.of(objects(server, "race"))
        barrier.wait()
        try:
            push(store, own, 1)
        except ArgosyError as failure:
            errors.append(failure)

    threads = [threading.Thread(target=run, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(one) for one in errors] == [ConfigError]
    assert remote.verify(1).faults == []


def test_a_quarter_of_a_tensor_is_about_a_quarter_of_the_bytes(tmp_path, proxy):
    disk = saved(tmp_path / "disk", 1)
    remote = RemoteListing.of(objects(proxy.server_port, "quarter"))
    push(disk, remote, 1)
    with Opened(remote.place_of(1)) as opened:
        before = proxy.answered_bytes
        part = opened.tensor("0.weight")[256:512]
        assert torch.equal(part, model(1)[0].weight[256:512])
        assert proxy.answered_bytes - before <= 1.1 * part.nbytes


def test_what_the_store_refuses_is_told_at_once(tmp_path, server):
    disk = saved(tmp_path / "disk", 1)
    wrong = RemoteListing.of(objects(server, "x", options={"secret_access_key": "no"}))
    with pytest.raises(ConfigError, match="not allowed") as caught:
        push(disk, wrong, 1)
    assert "credentials" in caught.value.fix
    missing = Objects("s3://nothere/x", options=objects(server, "x", user="admin").options)
    with pytest.raises((NotFoundError, ConfigError), match="nothere"):
        RemoteListing.of(missing).steps()


def test_a_store_that_never_answers_is_given_up_at_the_deadline(tmp_path, proxy):
    disk = saved(tmp_path / "disk", 1)
    proxy.fault = lambda method, path: "500"
    remote = RemoteListing.of(objects(proxy.server_port, "never"), patience_seconds=0.5)
    with pytest.raises(TimedOut, match="cannot be listed"):
        push(disk, remote, 1)
