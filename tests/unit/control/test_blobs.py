import socket

from argosy.config.spec import RoleSpec, RunSpec
from argosy.control.blobs import Blobs
from argosy.control.keeper.frames import FrameBuffer
from argosy.control.tally import Tally
from argosy.protocol.facts import Event, RunEnded, RunSubmitted

SPEC = RunSpec(roles={"a": RoleSpec(command=["true"])})


def submitted(seq, run, env_blob, **secrets):
    fact = RunSubmitted(run=run, name=run, spec=SPEC, env_blob=env_blob, secret_blobs=secrets)
    return Event(seq=seq, at=0.0, fact=fact)


def ended(seq, run):
    return Event(seq=seq, at=0.0, fact=RunEnded(run=run, outcome="succeeded", exit_code=0))


def test_what_live_runs_need_is_held_and_what_is_not_known_is_named():
    tally = Tally()
    blobs = Blobs(tally)
    blobs.pin("e1", "one")
    blobs.pin("s1", "secret")
    tally.apply(submitted(1, "r1", "e1", KEY="s1"))
    blobs.unpin(["e1", "s1"])
    tally.apply(submitted(2, "r2", "e2"))
    assert blobs.missing() == ["e2"]
    held = blobs.hold_all()
    assert held.read_blob("e1") == b"one"
    assert held.read_blob("s1") == b"secret"
    assert held.read_blob("e2") is None
    held.close()
    tally.apply(ended(3, "r1"))
    assert len(blobs.hold_all()) == 0


def test_environments_of_roles_are_needed_as_long_as_their_run_lives():
    tally = Tally()
    fact = RunSubmitted(run="r", name="r", spec=SPEC, env_blob="e", role_env_blobs={"a": "own"})
    tally.apply(Event(seq=1, at=0.0, fact=fact))
    assert tally.blobs() == {"e", "own"}
    tally.apply(ended(2, "r"))
    assert tally.blobs() == set()


def test_values_are_forgotten_with_the_last_run_that_needs_them():
    tally = Tally()
    blobs = Blobs(tally)
    blobs.pin("shared", "s")
    tally.apply(submitted(1, "r1", "shared"))
    tally.apply(submitted(2, "r2", "shared"))
    blobs.unpin(["shared"])
    tally.apply(ended(3, "r1"))
    assert blobs.take_unneeded() == []
    tally.apply(ended(4, "r2"))
    assert blobs.take_unneeded() == ["shared"]
    assert blobs.take_unneeded() == []
    blobs.learn("shared", "late")
    assert "late" not in blobs._values.values()


def test_values_of_a_submission_under_way_stay_and_those_of_a_refused_one_go():
    tally = Tally()
    blobs = Blobs(tally)
    tally.apply(submitted(1, "r1", "e"))
    blobs.pin("e", "x")
    tally.apply(ended(2, "r1"))
    assert blobs.take_unneeded() == []
    tally.apply(submitted(3, "r2", "e"))
    blobs.unpin(["e"])
    assert blobs.take_unneeded() == []
    blobs.pin("refused", "y")
    blobs.unpin(["refused"])
    assert blobs.take_unneeded() == ["refused"]
    assert blobs.missing() == []


def test_a_new_keeper_is_given_descriptors_it_can_read():
    tally = Tally()
    blobs = Blobs(tally)
    tally.apply(submitted(1, "r1", "e1"))
    blobs.learn("e1", "value" * 1000)
    held = blobs.hold_all()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert held.hand_over(ours) == 1
        held.close()
        data, descriptors, _, _ = socket.recv_fds(theirs, 65536, 8)
        buffer = FrameBuffer(1 << 20)
        buffer.feed(data)
        frame = buffer.next()
        assert (frame["type"], frame["kind"], frame["name"]) == ("hold", "blob", "e1")
        if (end := buffer.next()) is None:
            buffer.feed(theirs.recv(65536))
            end = buffer.next()
        assert end == {"type": "end"}
        with open(descriptors[0], "rb") as file:
            assert file.read() == b"value" * 1000
