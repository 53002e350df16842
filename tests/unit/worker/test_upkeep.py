import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.errors import InvariantError
from argosy.worker.members import Exit
from argosy.worker.upkeep import (
    SIGHUP,
    SIGINT,
    SIGKILL,
    SIGTERM,
    Announce,
    End,
    Signal,
    Start,
    TakeStacks,
    Tell,
    Upkeep,
)

WELL, KILLED = Exit(0, None), Exit(None, SIGKILL)


class World:
    """Carries actions out and checks what must hold of any sequence of them."""

    def __init__(self, num_ranks):
        self.upkeep = Upkeep(num_ranks)
        self.num_ranks = num_ranks
        self.living = {}
        self.doomed = set()
        self.seen = set()
        self.told = {}
        self.generation = 0
        self.end = None
        self.said = []
        self.do(self.upkeep.begin())

    def do(self, actions):
        assert self.end is None or not actions, "nothing follows the end"
        formed = {}
        for action in actions:
            if isinstance(action, Start):
                assert action.attempt not in self.seen
                assert action.rank not in self.living.values(), "one process per rank"
                assert not self.doomed, "all who leave are gone before a generation begins"
                self.seen.add(action.attempt)
                self.living[action.attempt] = action.rank
                formed[action.rank] = action.generation
            elif isinstance(action, Tell):
                assert action.attempt in self.living
                self.told.setdefault(action.attempt, []).append(action.frame)
                if action.frame["type"] == "told":
                    message = action.frame["message"]
                    formed[message["rank"]] = message["generation"]
            elif isinstance(action, Signal):
                assert action.attempt in self.living
                if action.number == SIGKILL:
                    self.doomed.add(action.attempt)
            elif isinstance(action, End):
                assert not self.living
                self.end = action
            else:
                assert isinstance(action, TakeStacks | Announce)
                self.said.append(action)
        if formed:
            self.generation += 1
            assert formed == dict.fromkeys(range(self.num_ranks), self.generation)

    def say(self, attempt, **message):
        self.do(self.upkeep.said(attempt, message))

    def exit(self, attempt, exit, at=0.0):
        del self.living[attempt]
        self.doomed.discard(attempt)
        others = list(self.living)
        self.do(self.upkeep.exited(attempt, exit, at))
        for other in others:
            ends = [f for f in self.told.get(other, []) if f["type"] == "peer"]
            assert [f for f in ends if f["attempt"] == attempt], "an end is told to all who live"
        if self.upkeep.due is not None and self.end is None:
            self.do(self.upkeep.passed(self.upkeep.due))

    def of(self, rank):
        return next(attempt for attempt, own in self.living.items() if own == rank)

    def join_all(self):
        for attempt in list(self.living):
            self.say(attempt, say="join", generation=self.generation)


def test_all_ending_well_is_success():
    world = World(3)
    for attempt in list(world.living):
        assert world.end is None
        world.exit(attempt, WELL)
    assert world.end == End(0)


def test_joined_members_are_told_at_once_and_the_place_is_filled():
    world = World(3)
    world.join_all()
    dead, staying = world.of(1), world.of(0)
    world.exit(dead, KILLED)
    assert world.generation == 2
    peer, told = world.told[staying]
    assert (peer["rank"], peer["generation"], peer["signal"]) == (1, 1, SIGKILL)
    assert told["message"] == {"tell": "reform", "generation": 2, "rank": 0, "world_size": 3}
    assert world.of(0) == staying
    assert world.of(1) != dead


def test_members_that_have_not_joined_are_started_again_together():
    world = World(3)
    first = dict(world.living)
    world.exit(world.of(1), KILLED)
    assert world.generation == 1
    assert len(world.doomed) == 2
    for attempt in list(world.doomed):
        world.exit(attempt, KILLED)
    assert world.generation == 2
    assert not set(first) & set(world.living)
    assert world.upkeep.failures.statistics() == {"user": 0, "host": 1, "hang": 0}


def test_a_newcomer_that_has_not_joined_yet_is_told_when_it_connects():
    world = World(3)
    world.join_all()
    world.exit(world.of(1), KILLED)
    newcomer = world.of(1)
    world.exit(world.of(2), KILLED)
    assert world.of(1) == newcomer
    frames = world.upkeep.welcome_frames(newcomer)
    assert frames[-1]["message"]["generation"] == 3


def test_the_end_of_one_who_was_told_a_newer_generation_names_its_older_place():
    world = World(3)
    world.join_all()
    world.exit(world.of(1), KILLED)
    world.exit(world.of(2), KILLED)
    ends = [frame for frame in world.told[world.of(0)] if frame["type"] == "peer"]
    assert ends[-1]["generation"] == 2
    assert ends[-1]["places"] == [[1, 2], [2, 2]]


def test_the_same_failure_twice_without_a_step_ends_it_with_the_cause():
    world = World(2)
    world.join_all()
    error = "Traceback\n  File x\nValueError: boom"
    world.exit(world.of(1), Exit(1, None, error))
    assert world.generation == 2
    world.exit(world.of(1), Exit(1, None, error))
    assert len(world.doomed) == 1
    world.exit(world.of(0), KILLED)
    assert (world.end.code, world.end.error) == (1, error)
    assert "failed twice in the same way" in world.end.text


def test_a_restart_is_told_with_its_number_and_how_many_there_may_be():
    upkeep = Upkeep(1)
    actions, told = upkeep.begin(), []
    for number, end in enumerate([Exit(1, None, "E: a"), Exit(1, None, "E: b"), KILLED]):
        attempt = next(each.attempt for each in actions if isinstance(each, Start))
        actions = upkeep.exited(attempt, end, 1.0 + number)
        told += [each.text.partition("; ")[2] for each in actions if isinstance(each, Announce)]
        if upkeep.due is not None:
            actions += upkeep.passed(upkeep.due)
    assert told == [
        "it is started again (restart 1 of 3); its traceback is in errors.txt",
        "it is started again (restart 2 of 3); its traceback is in errors.txt",
        "it is started again (restart 1 of 100 after failures of the host)",
    ]


def test_ranks_that_fail_together_have_failed_once():
    world = World(2)
    world.join_all()
    error = "Traceback\n  File x\nAttributeError: no such thing"
    world.exit(world.of(0), Exit(1, None, error))
    world.exit(world.of(1), Exit(1, None, error))
    assert world.end is None
    world.exit(world.of(1), Exit(1, None, error))
    assert "failed twice in the same way" in world.upkeep.end.text


def test_an_error_of_the_source_before_the_first_step_is_not_tried_again():
    for has_stepped in (False, True):
        world = World(2)
        world.join_all()
        if has_stepped:
            world.say(world.of(0), say="step", step=0)
        world.exit(world.of(1), Exit(1, None, "NameError: name 'x' is not defined"))
        assert (world.upkeep.end is None) == has_stepped


def test_steps_between_two_like_failures_are_progress_and_the_budget_still_holds():
    world = World(2)
    world.join_all()
    for number in range(4):
        assert world.end is None
        assert world.generation == number + 1
        world.say(world.of(0), say="step", step=number)
        world.exit(world.of(1), Exit(7, None, "ValueError: boom"))
    world.exit(world.of(0), KILLED)
    assert world.end.code == 7
    assert "budget of 3 restarts" in world.end.text


def test_failures_of_another_hour_are_forgotten():
    world = World(2)
    world.join_all()
    for number in range(8):
        world.say(world.of(0), say="step", step=number)
        world.exit(world.of(1), Exit(7, None, "ValueError: boom"), at=1800.0 * number)
    assert world.end is None
    assert world.generation == 9


def test_a_lost_peers_consequences_are_not_charged_to_the_program():
    world = World(3)
    world.exit(world.of(1), KILLED)
    world.exit(world.of(0), Exit(1, None, "RuntimeError: Connection closed by peer"))
    world.exit(world.of(2), KILLED)
    assert world.generation == 2
    assert world.upkeep.failures.statistics()["user"] == 0


def test_input_that_the_program_refuses_is_not_tried_again():
    world = World(2)
    world.join_all()
    world.exit(world.of(0), Exit(64, None, "batch_size = 3", is_refusal=True))
    world.exit(world.of(1), KILLED)
    assert world.end == End(64, "", "batch_size = 3", is_refusal=True)


def test_an_exit_code_like_that_of_a_refusal_is_none():
    upkeep = Upkeep(1)
    (start,) = upkeep.begin()
    for _ in range(4):
        actions = upkeep.exited(start.attempt, Exit(75, None), 0.0)
        actions += upkeep.passed(upkeep.due) if upkeep.due is not None else []
        start = next((action for action in actions if isinstance(action, Start)), start)
    assert (upkeep.end.code, upkeep.end.is_refusal) == (75, False)


def test_a_suspect_is_killed_once_after_stacks_are_taken():
    world = World(3)
    world.join_all()
    suspect = {"say": "suspect", "rank": 2, "generation": 1, "reason": "no lane for 3 s"}
    actions = world.upkeep.said(world.of(0), suspect)
    assert [type(action) for action in actions] == [TakeStacks, Announce, Signal]
    assert actions[-1].attempt == world.of(2)
    assert world.upkeep.said(world.of(1), suspect) == []
    assert world.upkeep.said(world.of(1), {**suspect, "generation": 7}) == []


def test_what_cannot_succeed_is_ended_with_its_reason():
    world = World(2)
    world.say(world.of(0), say="fail", reason="loss is not finite")
    for attempt in list(world.living):
        world.exit(attempt, KILLED)
    assert world.end == End(1, "the run cannot succeed: loss is not finite")
    world = World(1)
    world.say(world.of(0), say="fail", reason="unknown key", code=64)
    world.exit(world.of(0), KILLED)
    assert (world.end.code, world.end.is_refusal) == (64, True)


@pytest.mark.parametrize("is_seen_first", [True, False])
def test_a_run_that_ends_because_a_rank_has_ended_shows_how_that_one_did(is_seen_first):
    world = World(3)
    world.join_all()
    dead, saying = world.of(1), world.of(0)
    raised = Exit(1, None, "Traceback\n  a frame\nValueError: label 11")
    if is_seen_first:
        world.exit(dead, raised)
    world.say(saying, say="fail", reason="rank 1 has ended", rank=1)
    if not is_seen_first:
        world.exit(dead, raised)
    for attempt in list(world.living):
        world.exit(attempt, KILLED)
    what = (
        "the run cannot succeed: rank 1 has ended (rank 1 exited with code 1: ValueError: label 11)"
    )
    assert world.end == End(1, what, raised.error)


def test_asked_to_stop_nobody_is_started_again_and_asked_twice_all_are_killed():
    world = World(2)
    world.join_all()
    asked = world.upkeep.interrupted(SIGINT)
    assert {action.number for action in asked if isinstance(action, Signal)} == {15}
    world.exit(world.of(1), KILLED)
    assert world.generation == 1
    assert world.upkeep.interrupted(SIGINT) == [Signal(world.of(0), SIGKILL)]
    world.exit(world.of(0), WELL)
    assert world.end.code == 130


def signals_in(actions):
    return {action.number for action in actions if isinstance(action, Signal)}


@pytest.mark.parametrize("first", [SIGHUP, SIGINT, SIGTERM])
def test_a_terminal_that_closes_asks_once_however_often_it_signals(first):
    upkeep = World(2).upkeep
    assert signals_in(upkeep.interrupted(first, 5.0)) == {SIGTERM}
    for at in (5.0002, 6.5, 600.0):
        assert upkeep.interrupted(SIGHUP, at) == []


@pytest.mark.parametrize(("first", "second"), [(SIGHUP, SIGTERM), (SIGINT, SIGTERM)])
def test_another_signal_ends_at_once_only_if_it_is_another_wish(first, second):
    upkeep = World(2).upkeep
    upkeep.interrupted(first, 5.0)
    assert upkeep.interrupted(second, 5.5) == []
    assert signals_in(upkeep.interrupted(second, 6.0)) == {SIGKILL}


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_the_same_wish_a_second_time_ends_at_once(number):
    upkeep = World(2).upkeep
    upkeep.interrupted(number, 5.0)
    assert signals_in(upkeep.interrupted(number, 5.1)) == {SIGKILL}


@pytest.mark.parametrize(
    ("number", "again"),
    [(SIGHUP, "SIGTERM"), (SIGINT, "Ctrl-C again"), (SIGTERM, "a second SIGTERM")],
)
def test_what_ends_at_once_is_said(number, again):
    (said,) = said_by(World(1).upkeep.interrupted(number))
    assert said == f"stopping ({again} stops at once)"


def test_the_ranks_are_asked_to_stop_before_anything_is_said():
    world = World(2)
    world.join_all()
    asked = world.upkeep.interrupted(SIGINT)
    assert [type(action) for action in asked] == [Signal, Signal, Announce]


def test_a_save_that_fails_while_stopping_is_the_cause():
    world = World(2)
    world.do(world.upkeep.interrupted(SIGINT))
    world.exit(world.of(0), Exit(1, None, "OSError: no space"))
    world.exit(world.of(1), WELL)
    assert (world.end.code, world.end.error) == (1, "OSError: no space")


def test_deaths_in_a_row_without_a_step_are_answered_later_and_later():
    world = World(1)
    waits = []
    for number in range(6):
        actions = world.upkeep.exited(world.of(0), KILLED, 100.0 * number)
        world.living.clear()
        due = world.upkeep.due
        waits.append(0.0 if due is None else due - 100.0 * number)
        world.do(actions if due is None else world.upkeep.passed(due))
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert 0 < waits[-1] <= 5.0


def test_an_impossible_event_tells_its_story():
    upkeep = Upkeep(1)
    (start,) = upkeep.begin()
    upkeep.exited(start.attempt, WELL, 0.0)
    with pytest.raises(InvariantError, match="ended twice"):
        upkeep.exited(start.attempt, WELL, 0.0)


EXITS = st.sampled_from(
    [
        WELL,
        WELL,
        KILLED,
        KILLED,
        Exit(None, 11),
        Exit(1, None, "ValueError: boom"),
        Exit(1, None, "RuntimeError: gloo: connection closed by peer"),
        Exit(64, None, "no", is_refusal=True),
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_it_ends_with_nobody_left(data):
    world = World(data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(0, 60))):
        if world.end is not None:
            break
        attempt = data.draw(st.sampled_from(sorted(world.living)))
        what = data.draw(
            st.sampled_from(["exit", "exit", "exit", "join", "step", "suspect", "stop", "fail"])
        )
        if what == "exit":
            exit = KILLED if attempt in world.doomed else data.draw(EXITS)
            world.exit(attempt, exit)
        elif what == "suspect":
            rank, generation = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
            world.say(attempt, say="suspect", rank=rank, generation=generation, reason="silent")
        elif what == "stop" and data.draw(st.integers(0, 3)) == 0:
            world.do(world.upkeep.interrupted(SIGINT))
        elif what == "fail" and data.draw(st.integers(0, 5)) == 0:
            world.say(attempt, say="fail", reason="hopeless")
        elif what in ("join", "step"):
            world.say(attempt, say=what)
        for frame in world.upkeep.welcome_frames(attempt) if attempt in world.living else ():
            assert frame["type"] in ("peer", "told")
    for _ in range(200):
        if world.end is not None:
            break
        attempt = min(world.living)
        world.exit(attempt, KILLED if attempt in world.doomed else WELL)
    assert world.end is not None


def test_only_the_newest_places_of_a_long_life_are_told():
    world = World(2)
    world.join_all()
    for _ in range(20):
        world.exit(world.of(1), KILLED)
        world.join_all()
    frame = world.upkeep.welcome_frames(world.of(0))[-1]
    assert frame["message"]["generation"] == world.generation == 21
    assert sorted(world.upkeep.members[0].places) == list(range(6, 22))


# --- training ---------------------------------------------------------------------------------------


BOUNDS = {"say": "bounds", "least": 1, "most": 8, "keeps_state": True, "hang_seconds": 10.0}


def training(num_ranks=2, **more):
    """A world whose members have made three steps."""
    world = World(num_ranks)
    world.join_all()
    for attempt in list(world.living):
        world.say(attempt, **{**BOUNDS, **more})
        world.say(attempt, say="enter")
    world.say(world.of(0), say="step", step=3)
    return world


def vanish(world):
    """All living die before they can save; what follows."""
    actions = []
    for attempt in list(world.living):
        del world.living[attempt]
        actions = world.upkeep.exited(attempt, KILLED, 0.0)
    return actions


def said_by(actions):
    return [action.text for action in actions if isinstance(action, Announce)]


def test_nobody_being_left_to_save_one_process_is_started_that_does():
    world = training()
    (said,) = said_by(world.upkeep.interrupted(SIGINT))
    assert said == "saving what is committed (Ctrl-C again stops without saving)"
    (start,) = vanish(world)
    assert (start.rank, start.world_size, start.is_saving, start.generation) == (0, 1, True, 2)
    actions = world.upkeep.said(start.attempt, {"say": "saved", "step": 3, "path": "/p/step-3"})
    assert said_by(actions) == ["step 3 is saved in /p/step-3"]
    (end,) = world.upkeep.exited(start.attempt, Exit(None, 15), 0.0)
    assert (end.code, end.text, end.is_stop) == (130, "stopped", True)
    assert world.upkeep.saved_step == 3


def test_a_save_is_told_once_and_by_those_that_stop_themselves():
    world = training()
    world.do(world.upkeep.interrupted(SIGINT))
    save = {"say": "saved", "step": 3, "path": "/p"}
    told = [said_by(world.upkeep.said(attempt, save)) for attempt in list(world.living)]
    assert sorted(map(len, told)) == [0, 1]
    for attempt in list(world.living):
        world.exit(attempt, Exit(None, 15))
    assert world.end == End(130, "stopped", is_stop=True)


def test_a_second_interrupt_ends_all_and_says_that_nothing_was_saved():
    world = training()
    world.do(world.upkeep.interrupted(SIGINT))
    world.do(world.upkeep.interrupted(SIGINT))
    for attempt in list(world.living):
        world.exit(attempt, KILLED)
    assert world.end.text == "stopped; nothing was saved at its end"
    assert world.upkeep.saved_step is None


def test_nobody_is_started_to_save_what_could_not_be_saved_or_what_is_finished():
    for codes in ((1, 143), (0, 0)):
        world = training()
        world.do(world.upkeep.interrupted(SIGINT))
        for rank, code in enumerate(codes):
            world.exit(world.of(rank), Exit(code, None))
        assert world.end is not None


def test_a_first_rank_that_is_killed_in_its_last_save_after_a_stop_is_made_good():
    world = training()
    world.do(world.upkeep.interrupted(SIGINT))
    world.exit(world.of(1), Exit(0, None))
    (start,) = vanish(world)
    assert start.is_saving


def test_state_that_ends_with_its_ranks_is_not_looked_for():
    world = training(keeps_state=False)
    world.upkeep.interrupted(SIGINT)
    (end,) = vanish(world)
    assert "nothing was saved" in end.text


def test_a_member_that_never_comes_to_train_is_killed_and_replaced():
    world = World(2)
    world.join_all()
    late, early = world.of(1), world.of(0)
    world.do(world.upkeep.said(early, BOUNDS, 2.0))
    assert world.upkeep.due is None, "nobody knows yet how long it takes"
    world.do(world.upkeep.said(early, {"say": "enter"}, 2.0))
    assert world.upkeep.due == 2.0 + 10.0 + 3 * 2.0
    world.do(world.upkeep.passed(17.9))
    assert not world.doomed
    world.do(world.upkeep.passed(18.0))
    assert world.doomed == {late}
    assert said_by(world.said)[-1].startswith("rank 1 has not come to train in 18 s, as others")
    world.exit(late, KILLED, 18.0)
    assert world.of(1) != late


def test_a_household_that_gives_up_saves_what_was_trained_first():
    upkeep = training(hang_seconds=0.0).upkeep
    error = "Traceback\nValueError: boom"
    first, staying = upkeep.members[1].attempt, upkeep.members[0].attempt
    upkeep.exited(first, Exit(1, None, error), 0.0)
    actions = upkeep.exited(upkeep.members[1].attempt, Exit(1, None, error), 0.0)
    assert [a.number for a in actions if isinstance(a, Signal)] == [15]
    assert upkeep.due == 30.0, "it waits for the save, and not for ever"
    (start,) = upkeep.exited(staying, Exit(None, 15), 1.0)
    assert start.is_saving
    assert upkeep.passed(30.9) == []
    assert upkeep.passed(31.0) == [Signal(start.attempt, SIGKILL)]
    (end,) = upkeep.exited(start.attempt, KILLED, 31.0)
    assert (end.code, end.error) == (1, error)
    late = "a process was started to save: it took longer than 30 s"
    assert end.text.endswith(f"in between; nothing was saved at its end ({late})")


def give_up(upkeep, at):
    """A household of one that cannot succeed; the start of its saver."""
    for number in range(4):
        actions = upkeep.exited(upkeep.members[0].attempt, Exit(1, None, f"E: {number}"), at)
        if not any(isinstance(action, Start) for action in actions):
            actions += upkeep.passed(upkeep.due)
        start = next(action for action in actions if isinstance(action, Start))
        if not start.is_saving:
            upkeep.said(start.attempt, {"say": "step", "step": 4 + number}, at)
    assert start.is_saving
    return start


def test_a_saver_may_take_as_long_as_starts_of_the_program_do():
    upkeep = Upkeep(1)
    (start,) = upkeep.begin(0.0)
    for message in (BOUNDS, {"say": "enter"}, {"say": "step", "step": 3}):
        upkeep.said(start.attempt, message, 60.0)
    give_up(upkeep, 61.0)
    assert upkeep.due == 61.0 + 30.0 + 3 * 60.0


def test_whoever_saves_is_not_killed_as_long_as_its_save_goes_on():
    upkeep = training(1).upkeep
    start = give_up(upkeep, 1.0)
    advance = {
        "say": "saving",
        "step": 6,
        "num_bytes": 5 << 29,
        "total_bytes": 0,
        "what": "written",
    }
    said = [upkeep.said(start.attempt, advance, at) for at in (20.0, 22.0, 31.0, 50.0)]
    told = ["saves step 6: 2.5 GiB written"]
    assert list(map(said_by, said)) == [told, [], told, told]
    assert upkeep.due == 80.0
    assert upkeep.passed(79.0) == []
    assert upkeep.passed(80.0) == [Signal(start.attempt, SIGKILL)]


def test_a_saver_that_is_killed_from_outside_is_tried_again_and_not_for_ever():
    upkeep = training(1).upkeep
    start, seen = give_up(upkeep, 1.0), []
    for _ in range(3):
        seen.append(start.attempt)
        (start,) = upkeep.exited(start.attempt, KILLED, 2.0)
    assert len(set(seen)) == 3
    assert isinstance(start, End)
    killed = "a process was started to save: it was killed by signal 9"
    assert start.text.endswith(f"is spent; nothing was saved at its end ({killed})")


def test_asked_to_stop_while_it_gives_up_it_lets_the_saver_finish():
    upkeep = training(1).upkeep
    start = give_up(upkeep, 1.0)
    asked = upkeep.interrupted(SIGINT, 1.1)
    assert said_by(asked) == ["saving what is committed (Ctrl-C again stops without saving)"]
    assert signals_in(asked) == set()
    assert upkeep.interrupted(SIGINT, 1.2) == [Signal(start.attempt, SIGKILL)]


@pytest.mark.parametrize("exit", [Exit(1, None, "OSError: no space"), Exit(None, 15)])
def test_a_saver_that_ends_by_itself_is_not_tried_again(exit):
    upkeep = training(1).upkeep
    start = give_up(upkeep, 1.0)
    (end,) = upkeep.exited(start.attempt, exit, 2.0)
    assert "nothing was saved at its end" in end.text


def test_giving_up_what_is_saved_is_no_loss():
    upkeep = training(1).upkeep
    start = give_up(upkeep, 1.0)
    upkeep.said(start.attempt, {"say": "saved", "step": 6, "path": "/p"}, 2.0)
    (end,) = upkeep.exited(start.attempt, Exit(None, 15), 2.0)
    assert "nothing was saved" not in end.text


def test_nobody_is_started_to_save_what_a_rank_that_has_finished_had_saved():
    world = training()
    world.say(world.of(0), say="saved", step=3, path="/p")
    world.exit(world.of(0), WELL)
    world.do(world.upkeep.interrupted(SIGINT))
    world.exit(world.of(1), Exit(None, 15))
    assert world.end == End(130, "stopped", is_stop=True)
