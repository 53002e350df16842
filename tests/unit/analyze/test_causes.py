"""The first cause is found by what failures are, not by the order in which they were seen."""

import itertools

import pytest

from argosy.analyze.causes import final_incident, find_incidents, rank_of_failure

GLOO = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:41234"


class Log:
    """Builds events of one run."""

    def __init__(self):
        self.events = []

    def add(self, at, kind, /, **fields):
        fact = {"kind": kind, "run": "r1", **fields}
        self.events.append({"seq": len(self.events) + 1, "at": at, "fact": fact})
        return self

    def gang(self, at, generation, count=4, number=0):
        self.add(
            at,
            "gang.formed",
            role="train",
            generation=generation,
            members=list(range(count)),
            reason="",
        )
        for rank in range(count):
            self.add(
                at,
                "attempt.planned",
                attempt=f"a{generation}.{rank}",
                role="train",
                index=rank,
                number=number,
                host="h",
                generation=generation,
                rank=rank,
            )
            self.add(
                at, "attempt.started", attempt=f"a{generation}.{rank}", pid=100 + rank, how="fork"
            )
        return self

    def exit(self, at, attempt, **how):
        return self.add(at, "attempt.exited", attempt=attempt, at=at, **how)


def test_the_killed_rank_is_the_cause_even_when_survivors_were_seen_to_exit_first():
    log = Log().gang(1.0, 1)
    log.exit(5.000, "a1.0", code=1, error=GLOO).exit(5.001, "a1.3", code=1, error=GLOO)
    log.exit(5.002, "a1.2", signal=9)
    log.add(5.1, "attempt.stopping", attempt="a1.1", level="kill", reason="its gang failed")
    log.exit(5.2, "a1.1", signal=9)
    (incident,) = find_incidents(log.events)
    assert incident.cause.id == "a1.2"
    assert sorted(a.id for a in incident.failed_after) == ["a1.0", "a1.3"]
    assert [a.id for a in incident.stopped] == ["a1.1"]
    assert incident.sentence == "rank 2 on h was killed by SIGKILL (train/2, pid 102)"
    assert "ranks 0,3 failed after losing it" in incident.collateral


@pytest.mark.parametrize(("stop_signal", "is_ours"), [("SIGTERM", False), ("SIGINT", True)])
def test_a_rank_that_ends_by_a_signal_that_nobody_sent_was_not_stopped_by_argosy(
    stop_signal, is_ours
):
    spec = {"roles": {"train": {"stop_signal": stop_signal}}}
    log = Log().add(0.5, "run.submitted", spec=spec).gang(1.0, 1, count=2)
    log.exit(5.0, "a1.0", signal=2)
    log.add(5.1, "attempt.stopping", attempt="a1.1", level="term", reason="its gang failed")
    log.exit(5.2, "a1.1", signal=2)
    (incident,) = find_incidents(log.events)
    assert ("stopped by Argosy" in incident.collateral) == is_ours
    assert ("failed before Argosy could stop" in incident.collateral) != is_ours


def test_an_exception_outside_a_collective_beats_the_connection_errors_it_causes():
    for order in itertools.permutations(range(3)):
        log = Log().gang(1.0, 1, count=3)
        for place, rank in enumerate(order):
            error = "ValueError: bad batch" if rank == 1 else GLOO
            log.exit(5.0 + place / 1000, f"a1.{rank}", code=1, error=error)
        (incident,) = find_incidents(log.events)
        assert incident.cause.rank == 1


def test_an_end_of_its_own_is_not_said_to_follow_from_another():
    log = Log().gang(1.0, 1)
    log.add(4.9, "fault.injected", number=3, attempt="a1.2", fault="kill")
    log.exit(5.0, "a1.2", signal=9).exit(5.001, "a1.0", signal=10).exit(5.002, "a1.1", signal=9)
    log.exit(5.003, "a1.3", code=1, error=GLOO)
    (incident,) = find_incidents(log.events)
    assert incident.sentence.endswith("(train/2, pid 102, a fault was injected: kill)")
    assert incident.collateral == (
        "rank 0 was killed by SIGUSR1 itself; rank 1 ended in the same way; rank 3 failed too after losing it"
    )


def named_fault(*met, **how):
    """Which fault `why` names when a rank that was told one of each kind has met these, and ended so."""
    log = Log().gang(1.0, 1)
    kinds = {"stop": 1, "kill": 2, "raise": 3, "nan": 4, "slow": 5}
    for kind, number in kinds.items():
        step = 10 * number
        log.add(2.0, "fault.injected", number=number, attempt="a1.0", fault=kind, step=step)
    for kind in met:
        log.add(3.0, "fault.met", number=kinds[kind], attempt="a1.0")
    (incident,) = find_incidents(log.exit(5.0, "a1.0", **how).events)
    return incident.sentence.partition("a fault was injected: ")[2].rstrip(")")


@pytest.mark.parametrize(
    ("met", "how", "named"),
    [
        ((), {"signal": 9}, ""),
        (("kill",), {"signal": 9}, "kill"),
        (("slow",), {"signal": 9}, ""),
        (("kill",), {"signal": 9, "is_oom": True}, ""),
        (("stop",), {"signal": 9, "hung": True}, "stop"),
        (("stop", "slow"), {"signal": 9, "hung": True}, "slow"),
        (("slow", "raise"), {"code": 1, "error": "InjectedError: asked for"}, "raise"),
        (("kill",), {"code": 1}, ""),
        (("kill",), {"lost": True}, ""),
        ((), {"lost": True, "fault": 9}, "the keeper was killed"),
    ],
)
def test_only_a_fault_that_has_happened_and_explains_the_end_is_named(met, how, named):
    assert named_fault(*met, **how) == named


def test_who_failed_by_itself_was_not_stopped_by_argosy():
    log = Log().gang(1.0, 1, count=3).exit(5.0, "a1.0", code=1, error="SyntaxError: no")
    for rank in (1, 2):
        log.add(5.1, "attempt.stopping", attempt=f"a1.{rank}", level="term", reason="its gang")
    log.exit(5.2, "a1.1", code=1, error="SyntaxError: no").exit(5.3, "a1.2", signal=15)
    (incident,) = find_incidents(log.events)
    assert incident.collateral == (
        "rank 1 failed before Argosy could stop the rest (exited with code 1); "
        "rank 2 was stopped by Argosy (killed by SIGTERM)"
    )


def test_each_generation_has_an_incident_of_its_own():
    log = Log().gang(1.0, 1).exit(2.0, "a1.2", signal=9)
    log.gang(2.5, 2, number=1).exit(3.0, "a2.0", code=1, error="KeyError: 'x'")
    log.add(3.1, "run.ended", outcome="failed", exit_code=1, reason="budget", first_cause="a2.0")
    first, second = find_incidents(log.events)
    assert (first.cause.id, second.cause.id) == ("a1.2", "a2.0")
    assert first.remedy == ["generation 2 of train formed with 4 ranks"]
    assert second.remedy == ["the run ended: budget"]
    assert final_incident(log.events).cause.id == "a2.0"


def test_the_cause_that_the_controller_named_wins():
    log = Log().gang(1.0, 1).exit(5.0, "a1.0", code=1).exit(5.0, "a1.1", code=1)
    log.add(5.1, "run.ended", outcome="failed", exit_code=1, first_cause="a1.1")
    assert final_incident(log.events).cause.id == "a1.1"


def test_what_argosy_stopped_is_no_failure():
    log = Log().gang(1.0, 1, count=1)
    log.add(2.0, "attempt.stopping", attempt="a1.0", level="term", reason="argosy stop")
    log.exit(2.1, "a1.0", signal=15)
    log.add(2.2, "run.ended", outcome="stopped", exit_code=143)
    assert find_incidents(log.events) == []
    assert final_incident(log.events) is None


@pytest.mark.parametrize(
    ("fact", "rank"),
    [
        ({"signal": 9}, 0),
        ({"signal": 9, "is_oom": True, "error": GLOO}, 0),
        ({"signal": 6, "error": "terminate called: NCCL communicator was aborted"}, 2),
        ({"signal": 11}, 0),
        ({"code": 1, "error": "ZeroDivisionError"}, 1),
        ({"code": 1, "error": GLOO}, 2),
        ({"code": 1, "error": "torch.distributed.DistBackendError: x"}, 2),
        ({"lost": True}, 0),
    ],
)
def test_failures_are_ranked_by_what_they_are(fact, rank):
    assert rank_of_failure(fact) == rank


def test_each_start_of_a_process_that_fails_again_is_a_failure_of_its_own():
    log = Log()
    for number in range(3):
        at = 1.0 + number / 10
        log.add(
            at,
            "attempt.planned",
            attempt=f"w{number}",
            role="web",
            index=0,
            number=number,
            host="h",
        )
        log.exit(at + 0.05, f"w{number}", code=1)
    log.add(2.0, "run.ended", outcome="failed", exit_code=1, first_cause="w2")
    incidents = find_incidents(log.events)
    assert [incident.cause.id for incident in incidents] == ["w0", "w1", "w2"]
    assert [incident.failed_after for incident in incidents] == [[], [], []]
    assert final_incident(log.events).collateral == ""


def test_a_suspect_that_was_killed_as_hung_is_a_first_cause_with_its_evidence():
    log = Log().gang(1.0, 1)
    log.add(5.0, "attempt.suspected", attempt="a1.2", by="a1.0", generation=1, reason="silent")
    log.add(5.3, "attempt.evidence", attempt="a1.2", path="/stacks.json")
    log.add(5.3, "attempt.stopping", attempt="a1.2", level="kill", reason="silent", failure="hang")
    log.add(5.4, "attempt.exited", attempt="a1.2", signal=9, hung=True, at=5.4)
    log.add(5.5, "gang.formed", role="train", generation=2, members=[0, 1, 2, 3], reason="it hung")
    [incident] = find_incidents(log.events)
    assert incident.cause.rank == 2
    assert "killed as hung: silent" in incident.sentence
    assert incident.cause.evidence == "/stacks.json"
    assert incident.remedy == ["generation 2 of train formed with 4 ranks"]


def test_who_gave_the_run_up_is_its_first_cause_however_it_ended():
    log = Log().gang(1.0, 1)
    log.add(5.0, "run.stop_requested", reason="rank 1: no use", cause="a1.1", declared=True)
    for rank in range(4):
        log.add(5.0, "attempt.stopping", attempt=f"a1.{rank}", level="term", reason="no use")
        log.add(5.1, "attempt.exited", attempt=f"a1.{rank}", signal=15, at=5.1)
    log.add(5.2, "run.ended", outcome="failed", exit_code=1, first_cause="a1.1", reason="no use")
    incident = final_incident(log.events)
    assert incident is not None
    assert incident.cause.rank == 1
    assert "gave the run up" in incident.sentence
    assert len(incident.stopped) == 3


def test_members_removed_by_a_resize_are_no_incident():
    log = Log().gang(1.0, 1)
    log.add(2.0, "gang.resized", role="train", size=3)
    log.add(2.0, "attempt.stopping", attempt="a1.3", level="kill", reason="resized to 3")
    log.add(2.1, "attempt.exited", attempt="a1.3", signal=9, at=2.1)
    assert find_incidents(log.events) == []
