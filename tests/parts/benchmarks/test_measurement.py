"""The benchmarks' own judgement: wrong results fail a side, a missing peer gives null, percentiles are not flattering."""

import json

import pytest
from benchmarks import launch, supervise
from benchmarks.measure import SideFailed, fair_environment, percentile, ranks_done


def write_ranks(directory, totals, world_size=2):
    for rank, total in enumerate(totals):
        record = {"rank": rank, "world_size": world_size, "total": total, "done_ns": 100 + rank}
        (directory / f"rank{rank}.json").write_text(json.dumps(record))


def test_a_launch_is_done_when_the_last_rank_is(tmp_path):
    write_ranks(tmp_path, [3.0, 3.0])
    assert ranks_done(tmp_path, 2) == 101


@pytest.mark.parametrize(("totals", "world_size"), [([3.0, 2.0], 2), ([3.0, 3.0], 1)])
def test_a_wrong_sum_or_a_gang_of_one_fails_the_side(tmp_path, totals, world_size):
    write_ranks(tmp_path, totals, world_size)
    with pytest.raises(SideFailed, match="must give"):
        ranks_done(tmp_path, 2)


def test_ranks_that_never_come_fail_the_side(tmp_path):
    with pytest.raises(SideFailed, match="in vain"):
        ranks_done(tmp_path, 2, timeout_seconds=0.0)


def test_a_peer_that_cannot_run_is_null_with_the_reason():
    found = launch.metrics({"warm": [1.0, 3.0], "torchrun": [40.0], "ray": []}, {"ray": "absent"})
    assert found["warm_8_torch_ranks_over_torchrun"] == 0.05
    assert found["warm_8_over_ray"] is None
    assert found["warm_8_over_monarch"] is None
    assert found["notes"] == {"ray": "absent"}


def test_a_side_that_fails_once_has_no_number(monkeypatch):
    monkeypatch.setattr(launch, "settle", lambda: None)
    calls = iter([1.0, SideFailed("wrong sum")])

    def side():
        value = next(calls)
        if isinstance(value, SideFailed):
            raise value
        return value

    notes = {}
    assert launch.interleave({"ours": side}, 3, notes) == {"ours": []}
    assert notes == {"ours": "wrong sum"}


def test_a_percentile_is_a_value_that_was_measured_and_not_below():
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert percentile([1.0, 2.0, 50.0], 0.99) == 50.0
    assert percentile([], 0.99) is None


def test_a_step_that_was_lost_or_done_twice_fails_the_side(tmp_path):
    for rank in range(launch.GANG):
        (tmp_path / f"rank{rank}.steps").write_text(
            "0 1 10 0 10.0\n1 2 10 0 20.0\n1 3 11 1 20.0\nhalf a li"
        )
    launch.check_steps(tmp_path)
    assert launch.first_step_after(tmp_path, 0, 10) == 3
    (tmp_path / "rank3.steps").write_text("0 1 10 0 10.0\n1 2 11 1 30.0\n")
    with pytest.raises(SideFailed, match="rank 3, step 1"):
        launch.check_steps(tmp_path)


def test_no_trace_of_a_launcher_reaches_a_side(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("ARGOSY_HOME", "/elsewhere")
    environment = fair_environment()
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "ARGOSY_HOME"} & set(environment)
    assert environment["OMP_NUM_THREADS"] == "1"


def test_every_metric_of_supervise_is_reported_even_when_its_section_failed(monkeypatch):
    class Down:
        def __init__(self, directory):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def up(self):
            raise SideFailed("no cluster")

    monkeypatch.setattr(supervise, "Cluster", Down)
    found = supervise.run(quick=True)
    assert set(supervise.METRICS) <= set(found)
    assert all(found[name] is None for name in supervise.METRICS)
    assert "no cluster" in found["notes"]["deaths"]
