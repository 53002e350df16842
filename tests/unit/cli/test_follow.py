"""A run in the foreground: what its follower waits for."""

import json

from argosy.cli.follow import Follower
from argosy.cli.output import RawOutput
from argosy.protocol.httpclient import ServerEvent


class Stream:
    """What the controller says, in batches; remembers how long each was waited for."""

    is_closed = False

    def __init__(self, batches):
        self.batches = batches
        self.patiences = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, patience, _descriptor):
        self.patiences.append(patience)
        return self.batches.pop(0), False


class Controller:
    """Has one stream."""

    def __init__(self, stream):
        self._stream = stream

    def stream(self, target, *, last_id):
        return self._stream


def fact(seq, kind, **fields):
    about = {"kind": kind, "run": "r1", **fields}
    return ServerEvent("fact", json.dumps({"seq": seq, "at": 1.0, "fact": about}), "")


def planned(seq, number):
    name = {"role": "main", "index": 0, "number": number}
    return fact(seq, "attempt.planned", attempt=f"r1.main.0.{number}", host="h", **name)


def test_a_restarted_process_is_waited_for_though_the_one_before_had_last_words(
    tmp_path, capfdbinary
):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "main.0.0.out").write_bytes(b"last words\n")
    stream = Stream(
        [
            [planned(1, 0), fact(2, "attempt.exited", attempt="r1.main.0.0", code=1)],
            [planned(3, 1)],
            [ServerEvent("end", json.dumps({"outcome": "failed"}), "")],
        ]
    )
    follower = Follower(Controller(stream), {"run": "r1"}, RawOutput(str(tmp_path)))
    assert follower.follow() == {"outcome": "failed"}
    assert capfdbinary.readouterr().out == b"last words\n"
    assert stream.patiences == [0.25] * 3, "it looks again soon what the run waits for"
