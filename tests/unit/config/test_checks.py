from __future__ import annotations

import pytest

from argosy.config.checks import check_spec, start_order
from argosy.config.spec import Backoff, Budget, Probe, RoleSpec, RunSpec
from argosy.errors import ConfigError


def spec(run=None, **role):
    given = {"command": ["x"], **role}
    given = {key: value for key, value in given.items() if value is not ...}
    return RunSpec(roles={"a": RoleSpec(**given)}, **(run or {}))


def roles(given):
    return RunSpec(roles={name: RoleSpec(command=["x"], **role) for name, role in given.items()})


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (spec(command=...), "none of command"),
        (spec(script="x.py"), "command and script"),
        (spec(command=[]), "command is empty"),
        (spec(command=[""]), "command is empty"),
        (spec(command=..., script=""), "empty"),
        (spec(arguments=["x"]), "arguments"),
        (spec(count=0), "roles.a.count = 0"),
        (spec(count=-3), "roles.a.count = -3"),
        (spec(gang=True, spares=-1), "spares"),
        (spec(spares=1), "needs a gang"),
        (spec(gang=True, count=2, min=3), "min = 3 is more than count = 2"),
        (spec(gang=True, min=0), "min = 0"),
        (spec(min=1), "needs a gang"),
        (spec(cpu_request=-1.0), "cpu_request"),
        (spec(cpu_request=float("nan")), "cpu_request"),
        (spec(memory_bytes=0), "memory_bytes"),
        (spec(threads=0), "threads"),
        (spec(nice=40), "nice"),
        (spec(cpus=[]), "cpus"),
        (spec(cpus=[-1]), "cpus"),
        (spec(grace_seconds=-1.0), "grace_seconds"),
        (spec(log_bytes=0), "log_bytes"),
        (spec(budget=Budget(user=-1)), "budget.user"),
        (spec(backoff=Backoff(first_seconds=-1.0)), "backoff.first_seconds"),
        (spec(backoff=Backoff(jitter=2.0)), "jitter"),
        (spec(ports={"http": 70000}), "no port"),
        (spec(ports={"a b": 0}), "no name"),
        (spec(ports={"http": 80}, count=2), "cannot be held"),
        (spec(secrets=["a b"]), "secrets"),
        (spec(secrets=["hf-token"]), "secrets"),
        (spec(secrets=["key", "KEY"]), "secrets"),
        (spec(env={"A=B": "x"}), "env"),
        (spec(stop_signal="SIGNOPE"), "no signal"),
        (spec(ready=Probe()), "gives nothing"),
        (spec(ready=Probe(file="x", command=["y"])), "file and command"),
        (spec(ready=Probe(port="http")), "'http'"),
        (spec(ready=Probe(http="web/health")), "'web'"),
        (spec(ready=Probe(command=[])), "command is empty"),
        (spec(ready=Probe(file="x", timeout_seconds=0.0)), "ready.timeout_seconds = 0.0"),
        (spec(ready=Probe(file="x", every_seconds=float("nan"))), "ready.every_seconds = nan"),
        (spec(ready=Probe(file="x", timeout_seconds=float("inf"))), "ready.timeout_seconds = inf"),
        (spec(grace_seconds=float("inf")), "grace_seconds = inf"),
        (spec(backoff=Backoff(first_seconds=float("inf"))), "backoff.first_seconds = inf"),
        (spec(budget=Budget(period_seconds=float("inf"))), "budget.period_seconds = inf"),
        (spec(count=10**400), "processes"),
        (spec(ports={"x-y": 0, "X_Y": 0}), "both published as ARGOSY_PORT_A_0_X_Y"),
        (spec(ports={"x": 8080, "y": 8080}), "ports.x and roles.a.ports.y are both 8080"),
        (spec(ports={"n" * 101: 0}), "no name"),
        (spec({"name": "n" * 101}), "no name"),
        (roles({"r" * 300: {}}), "no name"),
        (roles({"a-b": {"ports": {"x": 0}}, "a_b": {"ports": {"x": 0}}}), "ARGOSY_PORT_A_B_0_X"),
        (roles({"a": {"ports": {"b_0_c": 0}}, "a_0_b": {"ports": {"c": 0}}}), "ARGOSY_PORT_A_0_B"),
        (roles({"a": {"ports": {"b_0_c": 0}}, "b": {"ports": {"c": 0}}}), "ARGOSY_PORT_B_0_C"),
        (roles({"a": {"ports": {"x": 80}}, "b": {"ports": {"y": 80}}}), "are both 80"),
        (spec(after=["a"]), "names itself"),
        (spec({"name": "../etc"}), "no name"),
        (spec({"share": "x y"}), "no name"),
        (spec({"array": -1}), "array"),
        (spec({"array": 10**9}), "array"),
        (spec(count=10**6), "processes"),
        (RunSpec(roles={}), "roles is empty"),
        (RunSpec(roles={"a/b": RoleSpec(command=["x"])}), "no name"),
    ],
)
def test_what_is_wrong_is_refused_with_a_fix(bad, says):
    with pytest.raises(ConfigError, match=None) as caught:
        check_spec(bad)
    assert says in caught.value.what
    assert caught.value.fix


def test_a_misspelt_role_port_and_signal_get_the_nearest_name():
    roles = {"trainer": RoleSpec(command=["x"]), "b": RoleSpec(command=["x"], after=["trianer"])}
    with pytest.raises(ConfigError) as caught:
        check_spec(RunSpec(roles=roles))
    assert "'trainer'" in caught.value.fix
    with pytest.raises(ConfigError) as caught:
        check_spec(spec(ports={"http": 0}, ready=Probe(port="htpt")))
    assert "'http'" in caught.value.fix
    with pytest.raises(ConfigError) as caught:
        check_spec(spec(stop_signal="SIGTREM"))
    assert "'SIGTERM'" in caught.value.fix


def test_a_cycle_is_named():
    roles = {
        "a": RoleSpec(command=["x"], after=["c"]),
        "b": RoleSpec(command=["x"], after_ready=["a"]),
        "c": RoleSpec(command=["x"], after=["b"]),
        "d": RoleSpec(command=["x"]),
    }
    with pytest.raises(ConfigError) as caught:
        check_spec(RunSpec(roles=roles))
    assert "a -> c -> b -> a" in caught.value.what


def test_the_order_of_start_keeps_the_written_order_where_nothing_is_needed():
    roles = {
        "last": RoleSpec(command=["x"], after=["first"]),
        "one": RoleSpec(command=["x"]),
        "first": RoleSpec(command=["x"]),
        "two": RoleSpec(command=["x"]),
    }
    assert start_order(RunSpec(roles=roles)) == ["one", "first", "last", "two"]


def test_a_sound_spec_passes():
    roles = {
        "db": RoleSpec(command=["x"], ports={"sql": 5432}, ready=Probe(port="sql")),
        "train": RoleSpec(
            script="train.py", gang=True, count=4, min=2, spares=1, after_ready=["db"], cpus=[0, 1]
        ),
    }
    check_spec(RunSpec(name="sweep[3]", roles=roles, array=4))
