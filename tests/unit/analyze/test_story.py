"""Every fact has a sentence, and the short ones are few."""

import msgspec
import pytest

from argosy.analyze.story import Story
from argosy.config.spec import RoleSpec, RunSpec
from argosy.protocol import facts

SAMPLES = [
    facts.HostJoined(host="h", keeper="k", cpus=2, memory_bytes=1 << 30),
    facts.HostLost(host="h", reason="silent"),
    facts.GangResized(run="r", role="train", size=6),
    facts.GangBounded(run="r", role="train", least=1, most=8, why="8 lanes", keeps_state=True),
    facts.StateSaved(run="r", attempt="a", step=40, path="/p"),
    facts.AttemptSaving(attempt="a", run="r", step=40, num_bytes=1 << 20),
    facts.AttemptEntered(attempt="a", run="r"),
    facts.AttemptSuspected(attempt="a", run="r", by="b", generation=1, reason="silent"),
    facts.EvidenceKept(attempt="a", run="r", path="/stacks.json"),
    facts.FaultInjected(run="r", number=7, fault="slow", rank=2, step=3, seconds=1.5),
    facts.FaultMet(run="r", attempt="a", number=7),
    facts.CommandAccepted(command="c", verb="stop", target="r"),
    facts.CommandDone(command="c", outcome="ok"),
    facts.RunSubmitted(
        run="r", name="n", spec=RunSpec(roles={"train": RoleSpec(count=4)}), env_blob="b"
    ),
    facts.RunAdmitted(run="r", hosts={"train": ["h"]}),
    facts.PortsReserved(run="r", host="h", ports={"web/0/http": 80}),
    facts.PortsRefused(run="r", host="h", reason="port 80 is in use"),
    facts.GenerationFormed(run="r", role="train", generation=1, members=[0], reason="start"),
    facts.AttemptPlanned(attempt="a", run="r", role="train", index=0, number=0, host="h", rank=0),
    facts.AttemptReleased(attempt="a", run="r", generation=2, rank=0),
    facts.AttemptStarted(attempt="a", run="r", pid=7, how="fork"),
    facts.AttemptReady(attempt="a", run="r"),
    facts.AttemptJoined(attempt="a", run="r", generation=1),
    facts.AttemptProgressed(attempt="a", run="r", step=1),
    facts.AttemptStopping(attempt="a", run="r", level="term", reason="asked"),
    facts.AttemptExited(attempt="a", run="r", signal=9),
    facts.StopRequested(run="r", hard=False, reason="argosy stop"),
    facts.RunEnded(run="r", outcome="failed", exit_code=137, reason="rank 0"),
    facts.RunsForgotten(runs=["r"], cursors={"k": 7}, num_submitted=9, num_ended=4),
    facts.Note(run="r", text="something"),
]


def as_event(fact, seq=1):
    event = facts.Event(seq=seq, at=1.0, fact=fact)
    return msgspec.json.decode(msgspec.json.encode(event))


def test_the_samples_cover_every_kind_of_fact():
    assert {type(sample) for sample in SAMPLES} == set(facts.AnyFact.__args__)


@pytest.mark.parametrize("fact", SAMPLES, ids=lambda fact: type(fact).__name__)
def test_every_fact_has_a_sentence_of_its_own(fact):
    sentence = Story().tell(as_event(fact))
    kind = fact.__struct_config__.tag
    assert sentence
    assert not sentence.startswith(f"{kind}:")


def test_a_fact_of_a_later_version_is_shown_plainly():
    event = {"seq": 1, "at": 1.0, "fact": {"kind": "moon.landed", "run": "r", "crew": 3}}
    assert Story().tell(event) == "moon.landed: run=r, crew=3"


def test_processes_are_called_by_their_rank():
    story = Story()
    planned = facts.AttemptPlanned(
        attempt="a", run="r", role="train", index=5, number=0, host="h", rank=2, generation=1
    )
    story.tell(as_event(planned))
    exited = as_event(facts.AttemptExited(attempt="a", run="r", signal=9, swept=2))
    assert story.tell(exited) == (
        "rank 2 (train/5) killed by SIGKILL; 2 descendants killed with it"
    )


def test_a_watcher_is_told_of_a_death_and_of_the_new_generation_but_not_of_the_stopped_ones():
    story = Story()
    told = []
    for index in range(2):
        planned = facts.AttemptPlanned(
            attempt=f"a{index}", run="r", role="train", index=index, number=0, host="h", rank=index
        )
        told.append(story.headline(as_event(planned)))
    told += [
        story.headline(as_event(facts.AttemptExited(attempt="a0", run="r", signal=9))),
        story.headline(
            as_event(facts.AttemptStopping(attempt="a1", run="r", level="kill", reason="gang"))
        ),
        story.headline(as_event(facts.AttemptExited(attempt="a1", run="r", signal=9))),
        story.headline(
            as_event(
                facts.GenerationFormed(
                    run="r", role="train", generation=2, members=[0, 1], reason="rank 0 died"
                )
            )
        ),
    ]
    assert [line for line in told if line] == [
        "rank 0 killed by SIGKILL",
        "generation 2: 2 ranks",
    ]


def test_a_watcher_is_told_which_restart_of_how_many_it_is():
    story = Story()
    died = facts.AttemptExited(attempt="a", run="r", code=1)
    planned = {"attempt": "a", "run": "r", "role": "web", "index": 0, "host": "h"}
    story.headline(as_event(facts.AttemptPlanned(**planned, number=0)))
    assert story.headline(as_event(died)) == "web/0 exited with code 1"
    formed = facts.GenerationFormed(
        run="r", role="train", generation=3, members=[0, 1], reason="x; restart 2 of 3"
    )
    assert story.headline(as_event(formed)) == "generation 3: 2 ranks (restart 2 of 3)"
    again = facts.AttemptPlanned(**planned, number=1, reason="exited with code 1; restart 1 of 2")
    assert "restart 1 planned" in story.tell(as_event(again))
    started = facts.AttemptStarted(attempt="a", run="r", pid=7, how="exec")
    assert story.headline(as_event(started)) == "web/0 started again (restart 1 of 2, pid 7)"


def test_a_new_generation_without_a_death_tells_its_reason():
    formed = facts.GenerationFormed(
        run="r", role="train", generation=2, members=[0, 1], reason="a host joined"
    )
    assert Story().headline(as_event(formed)) == "generation 2: 2 ranks (a host joined)"


def test_an_error_file_in_torchs_form_gives_the_last_line_of_its_stack():
    error = '{"message": {"message": "E: x", "extraInfo": {"py_callstack": "Traceback\\n  f\\nE: x\\n"}}}'
    exited = facts.AttemptExited(attempt="a", run="r", code=1, error=error)
    assert Story().tell(as_event(exited)) == "a exited with code 1: E: x"


def test_why_there_was_no_warm_parent_is_told_once():
    story = Story()
    told = [
        story.headline(
            as_event(facts.AttemptStarted(attempt=f"a{n}", run="r", pid=7, how="exec", note="why"))
        )
        for n in range(3)
    ]
    assert [bool(line) for line in told] == [True, False, False]


def test_a_stopped_run_says_where_it_is_saved_and_how_to_go_on():
    story = Story()
    role = {"script": "my train.py", "count": 4, "gang": True, "restart": "transient"}
    role["arguments"] = ["--resume", "/old", "--seed", "3"]
    saved = facts.StateSaved(run="r", attempt="a", step=40, path="/runs/r/checkpoints/step-40")
    told = [
        {"kind": "run.submitted", "name": "x", "spec": {"roles": {"train": role}}},
        {"kind": "attempt.planned", "attempt": "a", "role": "train", "index": 0, "rank": 0},
        msgspec.to_builtins(saved),
        {"kind": "run.stop_requested", "reason": "Ctrl-C"},
        msgspec.to_builtins(saved),
    ]
    events = [{"seq": number, "at": 0.0, "fact": fact} for number, fact in enumerate(told)]
    said = [line for line in map(story.headline, events) if line]
    where = "step 40 is saved in /runs/r/checkpoints/step-40"
    command = "argosy run -n 4 'my train.py' -- --seed 3 --resume /runs/r"
    assert said == [where, f"{where}; go on: {command}"]
    resized = {"kind": "gang.resized", "role": "train", "size": 6}
    assert story.headline(as_event(resized)) == "train is to have 6 ranks"
    assert "go on: argosy run -n 6 " in story.headline(events[-1])


def test_a_save_that_several_ranks_tell_of_is_told_once():
    story = Story()
    path = "/runs/r/checkpoints/step-000000010"
    saves = [
        facts.StateSaved(run="r", attempt=f"a{index}", step=10, path=path) for index in (1, 1, 0)
    ]
    told = [story.headline(as_event(save)) for save in saves]
    assert told == [f"step 10 is saved in {path}", "", ""]
