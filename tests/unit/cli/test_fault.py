"""`argosy fault` and `argosy scale` as they are typed."""

from __future__ import annotations

import pytest

from argosy.analyze.story import Story, fault_sentence
from argosy.cli.app import find_verb
from argosy.cli.arguments import parse
from argosy.cli.connection import Target
from argosy.cli.fault import read_orders
from argosy.errors import ConfigError

WHOLE_RUN = Target("r1", None, None)
VIEW = {"run": "r1", "roles": [{"role": "train", "gang": True, "count": 4}]}


def orders(text, view=VIEW, target=WHOLE_RUN):
    verb, rest = find_verb(text.split())
    return read_orders(parse(verb, rest), target, view)


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        orders(text)
    return caught.value


def test_a_fault_names_its_rank_and_when():
    assert orders("fault r1 --kill rank=2 --at-step 40 --point update") == [
        {"fault": "kill", "rank": 2, "role": None, "step": 40, "point": "update"}
    ]
    assert orders("fault r1 --slow 1 --seconds 1.5")[0]["seconds"] == 1.5
    assert orders("fault r1 --kill keeper") == [{"fault": "kill", "part": "keeper"}]


def test_random_faults_are_the_same_for_the_same_words():
    text = "fault r1 --random --seed 7 --count 5 --between 10 60"
    drawn = orders(text)
    assert drawn == orders(text)
    assert len(drawn) == 5
    assert all(10 <= order["step"] <= 60 and order["role"] == "train" for order in drawn)
    assert not any(order["from_now"] for order in drawn)
    assert all(o["fault"] == "raise" for o in orders("fault r1 --random --count 9 --kinds raise"))


def test_random_faults_without_steps_come_in_the_next_ones_wherever_the_run_is():
    drawn = orders("fault r1 --random --seed 7 --count 5")
    assert all(1 <= order["step"] <= 100 and order["from_now"] for order in drawn)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("fault r1", "no fault named"),
        ("fault r1 --kill rank=1 --stop rank=2", "several faults"),
        ("fault r1 --random --kill rank=1", "--random and --kill"),
        ("fault r1 --kill rank=x", "is no rank"),
        ("fault r1 --stop keeper", "is no rank"),
        ("fault r1 --kill rank=1 --seed 3", "--seed is for --random"),
        ("fault r1 --random --at-step 3", "--at-step with --random"),
        ("fault r1 --kill rank=1 --at-step 3 --point updat", "no point 'updat'"),
        ("fault r1 --random --kinds kill,burn", "no fault 'burn'"),
        ("fault r1 --random --between 9 3", "smaller one first"),
        ("fault r1 --random --between 9", "smaller one first"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, what):
    assert what in refusal(text).what


def test_an_index_is_not_taken_for_a_rank():
    with pytest.raises(ConfigError, match="by rank") as caught:
        orders("fault r1/train/2 --kill rank=1", target=Target("r1", "train", 2))
    assert caught.value.fix == "argosy fault r1/train --kill rank=N"


def test_events_of_resizes_suspicions_and_faults_are_sentences():
    story = Story()
    planned = {"kind": "attempt.planned", "attempt": "r1.train.2.0", "role": "train", "index": 2}
    story.tell({"seq": 1, "at": 1.0, "fact": {**planned, "rank": 2, "generation": 1}})

    def tell(**fact):
        return story.tell({"seq": 2, "at": 2.0, "fact": fact})

    attempt = "r1.train.2.0"
    assert tell(kind="gang.resized", role="train", size=6) == "train is to have 6 ranks"
    assert tell(kind="attempt.suspected", attempt=attempt, reason="silent") == (
        "rank 2 (train/2) is suspected to hang: silent"
    )
    assert "kept in /x.json" in tell(kind="attempt.evidence", attempt=attempt, path="/x.json")
    assert "nobody answered" in tell(kind="attempt.evidence", attempt=attempt)
    fault = {"kind": "fault.injected", "number": 7, "fault": "kill", "rank": 2, "step": 40}
    assert tell(**fault, point="vote") == "fault 7: rank 2 is killed at step 40, vote"
    assert fault_sentence({"number": 8, "fault": "kill", "part": "agent"}) == (
        "fault 8: the agent is killed"
    )
