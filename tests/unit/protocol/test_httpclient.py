"""The HTTP client against a real socket: whole answers, pieces, streams, and every kind of broken server."""

import contextlib
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.errors import ClusterError, ConfigError, NotFoundError, ProtocolError
from argosy.protocol.httpclient import ChunkDecoder, Client, EventParser, unreachable


@contextlib.contextmanager
def serving(tmp_path, *pieces):
    """A server that takes one request, sends these pieces of bytes one by one, and closes."""
    path = str(tmp_path / "http.sock")
    requests = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()

    def serve():
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(65536)
                head, _, body = data.partition(b"\r\n\r\n")
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        while len(body) < int(line.split(b":")[1]):
                            body += connection.recv(65536)
                requests.append((head.decode(), body))
                for piece in pieces:
                    connection.sendall(piece)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Client(path, timeout_seconds=10), requests
    finally:
        listener.close()
        thread.join(10)
        assert not thread.is_alive()


def answer(body, status="200 OK", headers="content-type: application/json"):
    return f"HTTP/1.1 {status}\r\n{headers}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def test_a_get_decodes_the_answer(tmp_path):
    with serving(tmp_path, answer(b'{"x": 1}')) as (client, requests):
        assert client.get("/v1/status") == {"x": 1}
    assert requests[0][0].startswith("GET /v1/status HTTP/1.1\r\n")


def test_a_post_sends_json_with_its_length(tmp_path):
    with serving(tmp_path, answer(b"{}", "201 Created")) as (client, requests):
        client.post("/v1/runs", {"a": "ü"})
    head, body = requests[0]
    assert f"content-length: {len(body)}" in head
    assert body == b'{"a":"\\u00fc"}'


def test_an_answer_in_many_pieces_is_put_together(tmp_path):
    whole = answer(b'{"long": "' + b"x" * 5000 + b'"}')
    pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    with serving(tmp_path, *pieces) as (client, _):
        assert len(client.get("/")["long"]) == 5000


def test_a_chunked_answer_is_decoded(tmp_path):
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    with serving(tmp_path, head, b'5\r\n{"x":\r\n', b"3;ext=1\r\n 1}\r\n0\r\n\r\n") as (client, _):
        assert client.get("/") == {"x": 1}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("422 Unprocessable", ConfigError),
        ("404 Not Found", NotFoundError),
        ("409 Conflict", ClusterError),
        ("503 Unavailable", ClusterError),
        ("426 Upgrade", ProtocolError),
    ],
)
def test_an_error_of_the_server_becomes_one_for_people(tmp_path, status, kind):
    described = answer(b'{"error": "count = -1", "fix": "use 1"}', status)
    with serving(tmp_path, described) as (client, _), pytest.raises(kind) as caught:
        client.get("/")
    assert (caught.value.what, caught.value.fix) == ("count = -1", "use 1")


@pytest.mark.parametrize(
    "broken",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        answer(b"not json"),
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"x" * (80 << 10),
    ],
)
def test_what_is_not_http_or_json_is_refused(tmp_path, broken):
    with serving(tmp_path, broken) as (client, _), pytest.raises(ProtocolError):
        client.get("/")


@pytest.mark.parametrize(
    "cut",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{}",
    ],
)
def test_a_connection_cut_in_the_middle_is_an_error_of_the_connection(tmp_path, cut):
    with serving(tmp_path, cut) as (client, _), pytest.raises(ConnectionError) as caught:
        client.get("/")
    assert "went away" in unreachable(caught.value, client.path).what


def test_no_socket_and_a_stale_socket_both_mean_no_cluster(tmp_path):
    path = tmp_path / "http.sock"
    with pytest.raises(FileNotFoundError) as caught:
        Client(str(path)).get("/")
    assert "no cluster" in unreachable(caught.value, str(path)).what
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(ConnectionRefusedError) as caught:
        Client(str(path)).get("/")
    assert "no cluster" in unreachable(caught.value, str(path)).what


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def read_stream(stream):
    events = []
    while not stream.is_closed:
        events += stream.wait(10)[0]
    return events


def test_a_stream_gives_events_with_kind_data_and_id(tmp_path):
    body = b": hi\n\nevent: line\nid: 5\ndata: {\ndata: }\n\ndata: 2\n\n"
    with (
        serving(tmp_path, STREAM_HEAD + b"\r\n", body) as (client, requests),
        client.stream("/v1/events", last_id="4") as stream,
    ):
        events = read_stream(stream)
    assert [(e.kind, e.data, e.id) for e in events] == [
        ("line", "{\n}", "5"),
        ("message", "2", "5"),
    ]
    assert "last-event-id: 4" in requests[0][0]


def test_a_chunked_stream_ends_with_its_last_chunk(tmp_path):
    head = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"
    whole = head + b"9\r\ndata: 1\n\n\r\n0\r\n\r\n"
    with serving(tmp_path, whole) as (client, _), client.stream("/") as stream:
        assert [event.json() for event in read_stream(stream)] == [1]


def test_a_refused_stream_is_an_error_for_people(tmp_path):
    refused = answer(b'{"error":"no run","fix":""}', "404 Not Found")
    with serving(tmp_path, refused) as (client, _), pytest.raises(NotFoundError, match="no run"):
        client.stream("/v1/runs/x/stream")


def test_waiting_for_a_stream_also_watches_other_descriptors(tmp_path):
    with serving(tmp_path, STREAM_HEAD + b"\r\n") as (client, _), client.stream("/") as stream:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"x")
            seen = []
            while not seen:
                _, seen = stream.wait(10, ours.fileno())
            assert seen == [ours.fileno()]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.integers(1, 13))
def test_chunks_survive_any_split(payloads, step):
    data = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in payloads) + b"0\r\n\r\n"
    decoder = ChunkDecoder()
    out = b"".join(decoder.feed(data[i : i + step]) for i in range(0, len(data), step))
    assert out == b"".join(payloads)
    assert decoder.is_complete


@given(st.lists(st.text(alphabet="ab:ü ", min_size=1), max_size=6), st.integers(1, 9))
def test_events_survive_any_split(texts, step):
    data = "".join(f"data: {text}\r\n\r\n" for text in texts).encode()
    parser = EventParser()
    events = [e for i in range(0, len(data), step) for e in parser.feed(data[i : i + step])]
    assert [event.data for event in events] == texts
