import json

from argosy.control.launchenv import LaunchEnvironments
from argosy.control.loadtime import load_time, own_load_time
from argosy.native import isa

BLOB = {
    "PYTHONHASHSEED": "1",
    "LC_ALL": "C",
    "EDITOR": "vi",
    "TORCHELASTIC_RUN_ID": "x",
    "OMP_NUM_THREADS": "4",
}


def spawn(env, zygote=True, blob="b1"):
    order = {"attempt": "r.a.0.0", "env_blob": blob, "env": env}
    parent = {"python": "/p", "preload": ["torch"]} if zygote else None
    return {"type": "spawn", "id": 1, "batch": {"run": "r", "zygote": parent, "attempts": [order]}}


def environments(monkeypatch, cap=None, blobs=None):
    monkeypatch.setattr(isa, "cap", lambda: cap)
    return LaunchEnvironments((blobs or {"b1": json.dumps(BLOB).encode()}).get)


def test_load_time_variables_are_told_from_others():
    found = load_time({**BLOB, "MKL_CBWR": "AVX2", "PATH": "/bin", "ONEDNN_VERBOSE": "1"})
    assert set(found) == {
        "PYTHONHASHSEED",
        "LC_ALL",
        "OMP_NUM_THREADS",
        "MKL_CBWR",
        "ONEDNN_VERBOSE",
    }
    assert own_load_time({"OMP_NUM_THREADS": "1", "MKL_CBWR": "x"}) == {"MKL_CBWR": "x"}


def test_the_warm_parent_gets_what_is_read_at_load_time(monkeypatch):
    known = environments(monkeypatch)
    frame = known.complete(spawn({"OMP_NUM_THREADS": "1", "TORCH_LOGS": "graph", "RANK": "0"}))
    assert frame["batch"]["zygote"] == {
        "python": "/p",
        "preload": ["torch"],
        "env": {
            "PYTHONHASHSEED": "1",
            "LC_ALL": "C",
            "OMP_NUM_THREADS": "4",
            "TORCH_LOGS": "graph",
        },
    }
    assert frame["batch"]["attempts"][0]["env"]["RANK"] == "0"


def test_ranks_of_one_gang_share_a_warm_parent_whatever_their_threads(monkeypatch):
    known = environments(monkeypatch)
    parents = [
        known.complete(spawn({"OMP_NUM_THREADS": str(n), "RANK": str(n)}))["batch"]["zygote"]
        for n in (1, 2)
    ]
    assert parents[0] == parents[1]


def test_the_cap_of_the_host_is_added_unless_the_user_set_one(monkeypatch):
    known = environments(monkeypatch, cap="AVX2")
    frame = known.complete(spawn({}))
    assert frame["batch"]["attempts"][0]["env"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert frame["batch"]["zygote"]["env"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    own = known.complete(spawn({"ONEDNN_MAX_CPU_ISA": "ALL"}, zygote=False))
    assert own["batch"]["attempts"][0]["env"]["ONEDNN_MAX_CPU_ISA"] == "ALL"
    assert own["batch"]["zygote"] is None
    blobs = {"b1": json.dumps({"ONEDNN_MAX_CPU_ISA": "SSE41"}).encode()}
    theirs = environments(monkeypatch, cap="AVX2", blobs=blobs).complete(spawn({}))
    assert "ONEDNN_MAX_CPU_ISA" not in theirs["batch"]["attempts"][0]["env"]


def test_an_environment_that_is_not_at_hand_is_named_and_can_be_learned(monkeypatch):
    known = environments(monkeypatch, blobs={"other": b""})
    assert known.missing(spawn({})) == "b1"
    known.learn("b1", "a secret, not an environment")
    assert known.missing(spawn({})) == "b1"
    known.learn("b1", json.dumps(BLOB))
    assert known.missing(spawn({})) == ""
    assert known.whole("b1", {"EDITOR": "ed"})["EDITOR"] == "ed"


def test_orders_without_a_submitter_environment_need_none(monkeypatch):
    assert environments(monkeypatch).missing(spawn({}, blob="")) == ""
