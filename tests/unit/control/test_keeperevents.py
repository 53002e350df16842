import msgspec
import pytest

from argosy.control.keeperevents import observation_of

HALF = "caf\udce9"
ATTEMPT = {"attempt": "r1.train.0.0", "run": "r1"}


@pytest.mark.parametrize(
    "event",
    [
        {"event": "note", "text": HALF, "level": HALF},
        {"event": "started", "pid": 7, "how": "exec", "note": HALF},
        {"event": "exited", "code": 1, "error": f"FileNotFoundError: {HALF}"},
        {"event": "link", "message": {"say": "error", "text": HALF}},
        {"event": "link", "message": {"say": "error", "text": {"not": ["text"]}}},
    ],
)
def test_whatever_a_program_says_can_be_told_to_the_controller(event):
    observed = observation_of(1, {**ATTEMPT, **event})
    assert observed is not None
    msgspec.json.encode(observed)


@pytest.mark.parametrize("number", [-1, 1 << 63, 1 << 200, 1.5, "3", None])
@pytest.mark.parametrize("said", ["step", "join", "fault"])
def test_a_number_beyond_bounds_is_not_told(said, number):
    message = {"say": said, "step": number, "generation": number, "number": number}
    event = {**ATTEMPT, "event": "link", "message": message}
    assert observation_of(1, event, is_first_step=True) is None


def test_a_fault_that_was_met_is_told():
    event = {**ATTEMPT, "event": "link", "message": {"say": "fault", "number": 7}}
    observed = observation_of(1, event)
    assert (observed.kind, observed.data) == ("met", {"number": 7})


def test_steps_and_joins_are_told():
    step = {**ATTEMPT, "event": "link", "message": {"say": "step", "step": 3}}
    assert observation_of(1, step, is_first_step=True).data == {"step": 3}
    assert observation_of(2, step) is None
    join = {**ATTEMPT, "event": "link", "message": {"say": "join", "generation": 2}}
    assert observation_of(3, join).data == {"generation": 2}


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_what_a_program_says_of_itself_is_a_note_of_that_level(level):
    event = {**ATTEMPT, "event": "link", "message": {"say": level, "text": "step 3 is durable"}}
    observed = observation_of(1, event)
    assert (observed.kind, observed.data) == ("note", {"level": level, "text": "step 3 is durable"})


ADVANCE = {"say": "saving", "step": 3, "num_bytes": 5, "total_bytes": 0, "what": "uploaded"}


def test_how_far_a_save_is_is_told():
    observed = observation_of(1, {**ATTEMPT, "event": "link", "message": ADVANCE})
    assert observed.kind == "saving"
    assert observed.data == {"step": 3, "num_bytes": 5, "total_bytes": 0, "what": "uploaded"}


@pytest.mark.parametrize(
    "wrong", [{"step": -1}, {"num_bytes": "5"}, {"what": HALF}, {"what": None}]
)
def test_an_advance_that_makes_no_sense_is_not_told(wrong):
    event = {**ATTEMPT, "event": "link", "message": {**ADVANCE, **wrong}}
    assert observation_of(1, event) is None
