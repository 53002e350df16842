import json

import pytest

from argosy.protocol.peerloss import is_peer_loss

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/gloo-nccl/train.py", line 7, in <module>
    step("connection refused")
{}
"""


def error_file(message, stack=""):
    inside = {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": "1"}}
    return json.dumps({"message": inside})


@pytest.mark.parametrize(
    "last",
    [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error",
        "torch.distributed.DistNetworkError: The client socket has failed to connect",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "argosy.errors.GenerationChanged: a member left",
    ],
)
def test_a_lost_peer_is_told_by_the_exception(last):
    assert is_peer_loss(TRACEBACK.format(last))
    assert is_peer_loss(error_file(last))
    assert is_peer_loss(json.dumps({"message": last}))


def test_names_in_the_frames_are_no_evidence():
    text = TRACEBACK.format("ValueError: bad batch 17")
    assert not is_peer_loss(text)
    assert not is_peer_loss(error_file("ValueError: bad batch 17", text))
    assert not is_peer_loss("")


def test_an_error_that_was_cut_is_read_as_it_is():
    assert is_peer_loss('{"message": {"message": "RuntimeError: Broken pipe", "extra')
    assert not is_peer_loss('{"other": 1}')
