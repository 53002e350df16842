from __future__ import annotations

from argosy.control import hostside
from argosy.control.hostside import HostSide
from argosy.control.launching import pages_of
from argosy.protocol.messages import (
    Acknowledge,
    Hello,
    Launch,
    Report,
    Reserve,
    Want,
    Wants,
    Welcome,
)


def launch(name="r1.a.0.0", **more):
    run, role, index, _number = name.split(".")
    given = {
        "attempt": name,
        "run": run,
        "role": role,
        "index": int(index),
        "program": {"kind": "exec", "argv": ["x"]},
        "python": "python3",
        "env_blob": "blob",
        "env": {},
        "cwd": "/",
        "umask": 0o22,
        "limits": {},
        "affinity": [],
        "stdout": "/o",
        "stderr": "/e",
    }
    return Launch(**{**given, **more})


class Stage:
    """A HostSide between a keeper and a controller played by the test."""

    def __init__(self, **known):
        self.now = 100.0
        self.side = HostSide(host="h", cpus=2, memory_bytes=1 << 30)
        self.frames, self.reports, self.probes, self.forgotten = [], [], [], []
        self.hellos = []
        self.version = 0
        self.connect(**known)
        self.take(self.side.controller_connected(self.now))
        self.take(self.side.receive(self.now, Welcome(version=1, keeper="k1", acknowledged=0)))

    def take(self, out):
        self.frames += out.to_keeper
        self.hellos += [m for m in out.to_controller if isinstance(m, Hello)]
        self.reports += [m for m in out.to_controller if isinstance(m, Report)]
        self.probes += out.probes
        self.forgotten += out.forget
        return out

    def connect(self, keeper="k1", attempts=()):
        listing = [{"attempt": name, "state": state} for name, state in attempts]
        self.take(self.side.keeper_connected(self.now, keeper, 1, listing))

    def wants(self, *wants, reserves=(), since=None, keeper="k1"):
        since = self.version if since is None else since
        self.version += 1
        made = [
            Want(attempt=attempt, version=self.version, state=state, **more)
            for attempt, state, more in wants
        ]
        reserves = [Reserve(run=run, version=self.version, ports=ports) for run, ports in reserves]
        message = Wants(
            since=since, version=self.version, keeper=keeper, wants=made, reserves=reserves
        )
        self.take(self.side.receive(self.now, message))
        return message

    def event(self, number, kind, attempt="r1.a.0.0", **more):
        event = {"event": kind, "attempt": attempt, "run": attempt.split(".")[0], **more}
        return self.take(self.side.keeper_event(self.now, number, event))

    def reply(self, index=-1, **more):
        frame = [f for f in self.frames if f["type"] in ("spawn", "reserve")][index]
        reply = {"type": "reply", "id": frame["id"], "ok": True, **more}
        self.take(self.side.keeper_reply(self.now, frame["id"], reply))

    def sent(self, kind):
        return [frame for frame in self.frames if frame["type"] == kind]

    def observed(self, source="k1"):
        seen = {}
        for report in self.reports:
            if report.keeper == source or (source == "own" and "@" in report.keeper):
                for each in report.observed:
                    seen.setdefault(each.number, each)
        return [seen[number] for number in sorted(seen)]


def running(name="r1.a.0.0", **more):
    return (name, "running", {"launch": launch(name, **more)})


def test_a_wanted_attempt_is_spawned_once_however_often_it_is_wanted():
    stage = Stage()
    message = stage.wants(running())
    stage.take(stage.side.receive(stage.now, message))
    stage.take(stage.side.receive(stage.now, message))
    [frame] = stage.sent("spawn")
    [order] = frame["batch"]["attempts"]
    assert order["attempt"] == "r1.a.0.0"
    assert order["token"]
    assert stage.reports[-1].wants_version == 1


def test_attempts_of_one_generation_go_into_one_frame_and_spares_into_another():
    stage = Stage()
    gang = {"gang": True, "generation": 1}
    members = [running(f"r1.t.{i}.0", **gang, rank=i) for i in range(3)]
    spare = running("r1.t.3.0", **gang, parked=True)
    stage.wants(*members, spare, running("r2.b.0.0"))
    batches = [frame["batch"] for frame in stage.sent("spawn")]
    assert [len(batch["attempts"]) for batch in batches] == [3, 1, 1]
    assert [batch["store"] is not None for batch in batches] == [True, False, False]


def test_a_warm_python_batch_names_the_blob_for_the_agent_to_fill_in():
    stage = Stage()
    program = {"kind": "script", "path": "t.py", "args": []}
    stage.wants(running(warm=True, program=program, preload=["torch"]))
    [frame] = stage.sent("spawn")
    assert frame["batch"]["zygote"] == {
        "python": "python3",
        "preload": ["torch"],
        "env_blob": "blob",
    }


def test_every_keeper_event_is_reported_until_it_is_acknowledged_and_then_to_the_keeper():
    stage = Stage()
    stage.wants(running())
    stage.event(1, "started", pid=5, how="exec")
    stage.event(2, "exited", code=0, at=1.0)
    assert [(o.number, o.kind) for o in stage.observed()] == [(1, "started"), (2, "exited")]
    stage.reports.clear()
    stage.now += 2.0
    stage.take(stage.side.tick(stage.now))
    assert len(stage.observed()) == 2
    stage.take(stage.side.receive(stage.now, Acknowledge(keeper="k1", number=1)))
    assert stage.sent("ack")[-1]["through"] == 1
    stage.take(stage.side.receive(stage.now, Acknowledge(keeper="k1", number=2)))
    assert stage.sent("ack")[-1]["through"] == 2
    assert stage.side.deadline() is None


def test_an_event_the_keeper_repeats_is_one_observation():
    stage = Stage()
    stage.wants(running())
    stage.event(1, "started", pid=5, how="exec")
    stage.connect(attempts=[("r1.a.0.0", "running")])
    stage.event(1, "started", pid=5, how="exec")
    stage.event(2, "exited", code=0)
    assert [o.number for o in stage.observed()] == [1, 2]


def test_later_steps_are_not_reported_but_the_keeper_may_forget_them():
    stage = Stage()
    stage.wants(running())
    stage.event(1, "started", pid=5, how="exec")
    for number in range(2, 80):
        stage.event(number, "link", message={"say": "step", "step": number})
    assert [o.kind for o in stage.observed()] == ["started", "progressed"]
    stage.take(stage.side.receive(stage.now, Acknowledge(keeper="k1", number=2)))
    assert stage.sent("ack")[-1]["through"] == 79


def test_how_far_a_save_is_is_reported_now_and_then():
    stage = Stage()
    stage.wants(running())
    stage.event(1, "started", pid=5, how="exec")
    for number in range(2, 32):
        advance = {"step": 9, "num_bytes": number, "total_bytes": 40, "what": "written"}
        stage.event(number, "link", message={"say": "saving", **advance})
        stage.now += 0.5
    told = [o.data["num_bytes"] for o in stage.observed() if o.kind == "saving"]
    assert told == list(range(2, 32, 4))


def test_steps_during_a_long_silence_of_the_controller_take_no_memory():
    stage = Stage()
    stage.wants(running())
    stage.side.controller_disconnected(stage.now)
    stage.event(1, "started", pid=5, how="exec")
    for number in range(2, 5000):
        stage.event(number, "link", message={"say": "step", "step": number})
    assert len(stage.side._outboxes["k1"]) == 3


def test_what_a_worker_says_is_reported():
    stage = Stage()
    stage.wants(running())
    stage.event(1, "link", message={"say": "ready"})
    stage.event(2, "link", message={"say": "join", "generation": 3})
    stage.event(3, "link", message={"say": "error", "text": "bad"})
    stage.event(4, "link", message={"say": "nonsense"})
    stage.event(5, "link", message="garbage")
    assert [o.kind for o in stage.observed()] == ["ready", "joined", "note"]


def test_an_attempt_that_is_told_to_end_before_it_was_spawned_never_starts():
    stage = Stage()
    stage.wants(("r1.a.0.0", "kill", {"launch": launch()}))
    assert not stage.sent("spawn")
    [observed] = stage.observed("own")
    assert (observed.kind, observed.data.get("code")) == ("exited", None)


def test_a_stop_carries_signal_and_grace_and_a_kill_follows_it():
    stage = Stage()
    given = launch(stop_signal="SIGINT", grace_seconds=3.0)
    stage.wants(running())
    stage.event(1, "started", pid=5, how="exec")
    stage.wants(("r1.a.0.0", "term", {"launch": given}))
    stage.wants(("r1.a.0.0", "kill", {"launch": given}))
    [stop] = stage.sent("stop")
    assert (stop["signal"], stop["grace_seconds"]) == ("SIGINT", 3.0)
    assert len(stage.sent("kill")) == 1


def test_what_should_be_gone_and_lives_is_killed_and_then_forgotten():
    stage = Stage(attempts=[("r1.a.0.0", "running")])
    stage.wants(("r1.a.0.0", "gone", {}))
    assert stage.sent("kill")
    assert not stage.forgotten
    stage.event(1, "exited", signal=9)
    assert stage.forgotten == ["r1.a.0.0"]


def test_wants_with_a_gap_before_them_wait_for_what_is_missing():
    stage = Stage()
    stage.version = 5
    stage.wants(running(), since=3)
    assert not stage.sent("spawn")
    assert stage.reports[-1].wants_version == 0
    stage.wants(running(), since=0)
    assert stage.sent("spawn")


def test_wants_for_another_keeper_are_ignored():
    stage = Stage()
    stage.wants(running(), keeper="k0")
    assert not stage.sent("spawn")


def test_a_new_agent_takes_over_what_the_keeper_has_without_starting_it_again():
    stage = Stage(attempts=[("r1.a.0.0", "running"), ("r1.b.0.0", "exited")])
    assert sorted(stage.hellos[0].alive) == ["r1.a.0.0", "r1.b.0.0"]
    assert stage.hellos[0].runs == ["r1"]
    stage.wants(running())
    assert not stage.sent("spawn")


def test_the_keepers_own_helpers_and_errands_are_left_alone():
    stage = Stage(attempts=[("store-r1-train-1", "running"), ("exec-r1.a.0.0-1", "running")])
    assert "store-r1-train-1" not in stage.hellos[0].alive
    stage.event(1, "exited", attempt="store-r1-train-1", code=0)
    assert stage.observed() == []


def test_a_new_keeper_means_a_new_beginning_after_the_old_ones_last_words():
    stage = Stage()
    stage.wants(running())
    stage.event(1, "exited", code=7)
    stage.reports.clear()
    stage.frames.clear()
    out = stage.side.keeper_connected(stage.now, "k2", 2, [])
    kinds = [(type(m).__name__, getattr(m, "keeper", "")) for m in out.to_controller]
    assert kinds[0] == ("Report", "k1")
    assert ("Hello", "k2") in kinds
    assert out.forget == ["r1.a.0.0"]
    assert not out.to_keeper
    out = stage.side.receive(stage.now, Acknowledge(keeper="k1", number=1))
    assert not [frame for frame in out.to_keeper if frame["type"] == "ack"], "k2 has other numbers"


def test_a_spare_is_released_with_its_rank_when_the_store_is_known():
    stage = Stage()
    given = {"gang": True, "generation": 1, "parked": True}
    stage.wants(running("r1.t.2.0", **given))
    stage.event(1, "started", attempt="r1.t.2.0", pid=5, how="fork")
    env = {"RANK": "0"}
    stage.wants(running("r1.t.2.0", gang=True, generation=2, rank=0, world_size=2, env=env))
    assert not stage.sent("release")
    batch = stage.sent("spawn")[-1]["batch"]
    assert batch["generation"] == 2
    assert [order["attempt"] for order in batch["attempts"]] == ["r1.t.2.0"], "known: not started"
    stage.reply(store={"host": "127.0.0.1", "port": 4711, "hosted": True})
    [release] = stage.sent("release")
    assert release["env"]["MASTER_PORT"] == "4711"
    assert release["env"]["RANK"] == "0"
    assert release["gang"] == {"generation": 2, "rank": 0, "world_size": 2}


def test_a_member_that_joined_is_told_to_reform_around_the_replacements_store():
    stage = Stage()
    members = [running(f"r1.t.{i}.0", gang=True, generation=1, rank=i) for i in range(2)]
    stage.wants(*members)
    stage.reply(store={"host": "127.0.0.1", "port": 1, "hosted": True})
    stage.event(1, "started", attempt="r1.t.0.0", pid=1, how="fork")
    stage.event(2, "exited", attempt="r1.t.1.0", signal=9)
    reform = {"generation": 2, "rank": 0, "world_size": 2}
    survivor = launch("r1.t.0.0", gang=True, generation=2, rank=0)
    replacement = running("r1.t.1.1", gang=True, generation=2, rank=1)
    stage.wants(("r1.t.0.0", "running", {"launch": survivor, "reform": reform}), replacement)
    assert not stage.sent("tell")
    named = [[o["index"] for o in frame["batch"]["attempts"]] for frame in stage.sent("spawn")]
    assert named == [[0, 1], [1], [0]], "then the store alone: its reply says who hosts"
    stage.reply(-2, store={"host": "127.0.0.1", "port": 2, "hosted": False})
    assert not stage.sent("tell"), "the reply to a batch that starts something does not know yet"
    stage.reply(-1, store={"host": "127.0.0.1", "port": 2, "hosted": True})
    [tell] = stage.sent("tell")
    assert tell["message"]["hosted"] is True
    assert tell["message"]["master_port"] == 2
    assert tell["message"]["generation"] == 2


def test_a_store_that_could_not_be_made_is_asked_for_again():
    stage = Stage(attempts=[("r1.t.0.0", "running")])
    survivor = launch("r1.t.0.0", gang=True, generation=2, rank=0)
    reform = {"generation": 2, "rank": 0, "world_size": 1}
    stage.wants(("r1.t.0.0", "running", {"launch": survivor, "reform": reform}))
    stage.reply(ok=False, error="no port")
    stage.take(stage.side.tick(stage.now + 1.0))
    assert len(stage.sent("spawn")) == 2
    stage.reply(store={"host": "127.0.0.1", "port": 2, "hosted": True})
    assert len(stage.sent("tell")) == 1


def test_a_batch_the_keeper_refuses_ends_its_attempts_with_the_reason():
    stage = Stage()
    stage.wants(running())
    stage.reply(ok=False, error="blob is not here")
    [observed] = stage.observed("own")
    assert observed.data["error"] == "blob is not here"


def test_a_spawn_whose_answer_was_lost_is_sent_again():
    stage = Stage()
    stage.wants(running())
    stage.connect(attempts=[])
    assert len(stage.sent("spawn")) == 2


def test_a_delayed_start_waits_for_its_time():
    stage = Stage()
    stage.wants(running(not_before=105.0))
    assert not stage.sent("spawn")
    assert stage.side.deadline() == 105.0
    stage.take(stage.side.tick(105.0))
    assert stage.sent("spawn")


def test_ports_are_reserved_reported_and_given_back():
    stage = Stage()
    stage.wants(reserves=[("r1", {"a/0/http": 0})])
    [frame] = stage.sent("reserve")
    assert frame["ports"] == {"a/0/http": 0}
    stage.reply(ports={"a/0/http": 8123})
    [observed] = stage.observed("own")
    assert (observed.kind, observed.data["ports"]) == ("ports", {"a/0/http": 8123})
    stage.wants(reserves=[("r1", {})])
    assert stage.sent("end_run")[-1]["run"] == "r1"


def test_a_port_in_use_is_reported():
    stage = Stage()
    stage.wants(reserves=[("r1", {"a/0/http": 80})])
    stage.reply(ok=False, error="port 80 is in use")
    [observed] = stage.observed("own")
    assert (observed.kind, observed.data["reason"]) == ("ports_refused", "port 80 is in use")


def test_a_probe_begins_when_the_process_runs_and_its_result_is_reported():
    stage = Stage()
    stage.wants(running(probe={"port": "http"}, ports={"http": 1}))
    assert not stage.probes
    stage.event(1, "started", pid=1, how="exec")
    assert [name for name, _probe, _launch in stage.probes] == ["r1.a.0.0"]
    stage.take(stage.side.probed(stage.now, "r1.a.0.0", True, ""))
    assert [o.kind for o in stage.observed("own")] == ["ready"]
    stage.take(stage.side.probed(stage.now, "r9.x.0.0", True, ""))
    assert len(stage.observed("own")) == 1


def test_a_member_without_steps_for_too_long_is_reported_as_hung_once():
    stage = Stage()
    stage.wants(running(hang_seconds=5.0))
    stage.event(1, "started", pid=1, how="exec")
    assert stage.side.deadline() == stage.now + 1.0, "only the report waits"
    stage.event(2, "link", message={"say": "step", "step": 1})
    stage.take(stage.side.receive(stage.now, Acknowledge(keeper="k1", number=2)))
    assert stage.side.deadline() == 105.0
    stage.now = 104.0
    stage.event(3, "link", message={"say": "step", "step": 2})
    stage.now = 108.0
    stage.take(stage.side.tick(stage.now))
    assert stage.observed("own") == []
    stage.now = 109.5
    stage.take(stage.side.tick(stage.now))
    stage.take(stage.side.tick(stage.now))
    assert [o.kind for o in stage.observed("own")] == ["hung"]


def test_a_new_agent_watches_for_hangs_at_once_when_steps_were_seen_before():
    stage = Stage(attempts=[("r1.a.0.0", "running")])
    stage.wants(("r1.a.0.0", "running", {"launch": launch(hang_seconds=5.0), "progressed": True}))
    assert stage.side.deadline() == 105.0


def test_everything_goes_on_without_a_controller():
    stage = Stage()
    stage.wants(running())
    stage.side.controller_disconnected(stage.now)
    stage.reports.clear()
    stage.event(1, "started", pid=1, how="exec")
    assert not stage.reports
    assert not stage.sent("kill")
    stage.take(stage.side.controller_connected(stage.now))
    assert [o.kind for o in stage.observed()] == ["started"]


def test_hello_is_said_again_until_it_is_answered():
    stage = Stage()
    stage.take(stage.side.controller_connected(stage.now))
    assert stage.side.deadline() == 101.0
    stage.take(stage.side.tick(101.0))
    assert len(stage.hellos) == 3
    stage.take(stage.side.receive(101.0, Welcome(version=1, keeper="k1", acknowledged=0)))
    assert stage.side.deadline() is None


def test_a_late_answer_to_an_earlier_keepers_hello_acknowledges_nothing_of_the_new_one():
    stage = Stage()
    stage.connect(keeper="k2")
    stage.frames.clear()
    stage.take(stage.side.receive(stage.now, Welcome(version=1, keeper="k1", acknowledged=57)))
    assert not stage.sent("ack")
    stage.take(stage.side.tick(stage.side.deadline()))
    assert [hello.keeper for hello in stage.hellos[-2:]] == ["k2", "k2"]


def test_one_without_a_link_is_told_to_reform_when_it_speaks():
    stage = Stage(attempts=[("r1.t.0.0", "running")])
    newcomer = launch("r1.t.0.0", gang=True, generation=2, rank=0)
    reform = {"generation": 2, "rank": 0, "world_size": 1}
    stage.wants(("r1.t.0.0", "running", {"launch": newcomer, "reform": reform}))
    stage.reply(store={"host": "127.0.0.1", "port": 2, "hosted": True})
    [tell] = stage.sent("tell")
    refusal = {"type": "reply", "id": tell["id"], "ok": False, "error": "has no link"}
    stage.take(stage.side.keeper_reply(stage.now, tell["id"], refusal))
    assert len(stage.sent("tell")) == 1
    message = {"say": "join", "generation": 1}
    stage.event(1, "link", attempt="r1.t.0.0", message=message)
    assert [frame["message"]["generation"] for frame in stage.sent("tell")] == [2, 2]


def test_one_without_a_link_that_stays_silent_is_told_again_after_a_while():
    stage = Stage(attempts=[("r1.t.0.0", "running")])
    fault = {"tell": "fault", "kind": "nan", "step": 3, "number": 7}
    member = launch("r1.t.0.0", gang=True, generation=1, rank=0)
    stage.wants(("r1.t.0.0", "running", {"launch": member, "faults": [fault]}))
    [tell] = stage.sent("tell")
    assert tell["message"] == fault
    refusal = {"type": "reply", "id": tell["id"], "ok": False, "error": "has no link"}
    stage.take(stage.side.keeper_reply(stage.now, tell["id"], refusal))
    stage.now = stage.side.deadline()
    stage.take(stage.side.tick(stage.now))
    assert len(stage.sent("tell")) == 2


def test_each_fault_is_told_once_by_one_agent():
    stage = Stage(attempts=[("r1.t.0.0", "running")])
    member = launch("r1.t.0.0", gang=True, generation=1, rank=0)
    faults = [{"tell": "fault", "kind": "nan", "step": n, "number": n} for n in (3, 4)]
    stage.wants(("r1.t.0.0", "running", {"launch": member, "faults": faults[:1]}))
    stage.wants(("r1.t.0.0", "running", {"launch": member, "faults": faults}))
    assert [frame["message"]["number"] for frame in stage.sent("tell")] == [3, 4]


def test_a_member_that_ended_before_it_could_be_told_its_new_place_is_named_to_the_keeper():
    gang = {"gang": True, "generation": 1, "rank": 0}
    place = {"generation": 2, "rank": 0, "world_size": 2}
    # The store of the generation is not known yet, so nothing is told; then it has ended.
    stage = Stage()
    stage.wants(running("r1.t.0.0", **gang))
    stage.event(1, "started", "r1.t.0.0", pid=5, how="fork")
    newer = launch("r1.t.0.0", **{**gang, "generation": 2})
    stage.wants(("r1.t.0.0", "running", {"launch": newer, "reform": place}))
    assert stage.sent("tell") == []
    stage.event(2, "exited", "r1.t.0.0", code=0, at=1.0)
    [frame] = stage.sent("tell")
    assert (frame["attempt"], frame["message"]) == ("r1.t.0.0", {"tell": "reform", **place})
    stage.wants(("r1.t.0.0", "gone", {"reform": place}))
    assert len(stage.sent("tell")) == 1
    assert stage.forgotten == ["r1.t.0.0"]
    # An agent that has seen nothing of it learns it from the controller.
    fresh = Stage()
    fresh.wants(("r1.t.0.0", "gone", {"reform": place}), since=0)
    [frame] = fresh.sent("tell")
    assert frame["message"]["generation"] == 2


def test_a_run_of_which_the_keeper_still_holds_memory_is_named_in_the_hello_and_ended_until_it_is():
    stage = Stage()
    stage.take(stage.side.keeper_connected(stage.now, "k1", 1, [], {"r7"}))
    assert stage.hellos[-1].runs == ["r7"]
    stage.wants(reserves=[("r7", {})])
    [frame] = stage.sent("end_run")
    refusal = {"ok": False, "error": "run r7 still has 1 live attempts"}
    stage.take(stage.side.keeper_reply(stage.now, frame["id"], refusal))
    stage.now = stage.side.deadline()
    stage.take(stage.side.tick(stage.now))
    again = stage.sent("end_run")[-1]
    assert len(stage.sent("end_run")) == 2
    stage.take(stage.side.keeper_reply(stage.now, again["id"], {"ok": True}))
    stage.take(stage.side.keeper_connected(stage.now, "k1", 1, [], set()))
    assert stage.hellos[-1].runs == []
    stage.take(stage.side.tick(stage.now + 100))
    assert len(stage.sent("end_run")) == 2


def test_what_is_wanted_of_many_processes_comes_in_pages_and_goes_in_batches(monkeypatch):
    monkeypatch.setattr(hostside, "MOST_IN_BATCH", 4)
    gang = {"gang": True, "generation": 1}
    # Several have the same version, also across the end of a page.
    versions = [1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 4]
    wants = [
        Want(
            attempt=f"r1.t.{i}.0",
            version=version,
            state="running",
            launch=launch(f"r1.t.{i}.0", **gang, rank=i),
        )
        for i, version in enumerate(versions)
    ]
    reserves = [Reserve(run="r1", version=3, ports={"t/0/http": 0})]
    whole = Wants(since=0, version=4, keeper="k1", wants=wants, reserves=reserves)
    assert pages_of(whole, most=12) == [whole]
    pages = pages_of(whole, most=3)
    assert [len(page.wants) + len(page.reserves) for page in pages] == [3, 3, 3, 3]
    stage = Stage()
    for page in (pages[0], pages[2], pages[3]):
        stage.take(stage.side.receive(stage.now, page))
    # One was lost: the others wait until it is sent again.
    assert stage.reports[-1].wants_version == 0
    assert stage.sent("spawn") == []
    newer = Wants(since=0, version=5, keeper="k1", wants=wants[:4])
    stage.take(stage.side.receive(stage.now, pages_of(newer, most=3)[1]))
    for page in (pages[3], pages[1], pages[2], pages[0]):
        stage.take(stage.side.receive(stage.now, page))
    spawned = [f["batch"]["attempts"] for f in stage.sent("spawn")]
    assert sum(map(len, spawned)) == len({o["attempt"] for batch in spawned for o in batch}) == 11
    assert len(stage.sent("reserve")) == 1
    assert stage.reports[-1].wants_version == 4
    stage = Stage()
    stage.take(stage.side.receive(stage.now, whole))
    assert [len(f["batch"]["attempts"]) for f in stage.sent("spawn")] == [4, 4, 3]
