import pytest

torch = pytest.importorskip("torch")

from argosy.errors import ConfigError, MismatchError  # noqa: E402
from argosy.move.bundles import Bundle, check_alike, discover, flatten, wires  # noqa: E402


def stepped(make, model=None):
    model = model or torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(4, 3))
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def names(bundle):
    return sorted(bundle.tensors)


def test_adamw_gives_both_moments_and_its_step_as_a_scalar():
    bundles = discover(*stepped(torch.optim.AdamW))
    assert list(bundles) == ["0.weight", "1.weight", "1.bias"]
    assert names(bundles["0.weight"]) == ["exp_avg", "exp_avg_sq", "parameter"]
    assert bundles["0.weight"].scalars == {"step": 1.0}
    assert {member.shape for member in bundles["0.weight"].members()} == {(4, 6)}


def test_scalars_are_those_of_the_moment_they_are_read():
    model, optimizer = stepped(torch.optim.AdamW)
    found = discover(model, optimizer)["0.weight"]
    optimizer.step()
    assert dict(found.scalars) == {"step": 2.0}
    with pytest.raises(KeyError):
        found.scalars["exp_avg"]


def test_sgd_with_and_without_momentum():
    plain = discover(*stepped(lambda p: torch.optim.SGD(p, lr=0.1)))
    assert names(plain["1.bias"]) == ["parameter"]
    heavy = discover(*stepped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))
    assert names(heavy["1.bias"]) == ["momentum_buffer", "parameter"]


def test_adafactor_keeps_members_of_other_shapes():
    found = discover(*stepped(torch.optim.Adafactor))["0.weight"]
    shapes = {member.name: member.shape for member in found.members()}
    assert shapes["parameter"] == (4, 6)
    assert len({shape for name, shape in shapes.items() if name != "parameter"}) > 1


def test_a_parameter_that_is_the_cast_of_its_master_is_not_sent_but_derived():
    model = torch.nn.Linear(4, 2, bias=False).to(torch.bfloat16)
    master = torch.randn(2, 4)
    optimizer = torch.optim.AdamW([master])
    master.grad = torch.ones_like(master)
    optimizer.step()
    found = discover(model, optimizer, masters={"weight": master})
    assert sorted(flatten(found)) == ["weight//exp_avg", "weight//exp_avg_sq", "weight//master"]
    found["weight"].derive()
    assert torch.equal(model.weight, master.to(torch.bfloat16))


def test_wire_dtypes_are_given_by_member():
    found = discover(*stepped(torch.optim.AdamW))
    by_name = wires(found, {"exp_avg": torch.bfloat16})
    assert by_name == {f"{name}//exp_avg": torch.bfloat16 for name in found}
    with pytest.raises(ConfigError, match="'exp_age', which no bundle has"):
        wires(found, {"exp_age": torch.bfloat16})


def test_unknown_parameters_and_foreign_state_are_refused_by_name():
    model, _ = stepped(torch.optim.AdamW)
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ConfigError, match=r"shape \(3,\), is neither in the model"):
        discover(model, other)
    model, optimizer = stepped(torch.optim.AdamW)
    optimizer.state[next(model.parameters())]["history"] = ["what"]
    with pytest.raises(ConfigError, match=r"0\.weight: the optimizer keeps a list as 'history'"):
        discover(model, optimizer)
    with pytest.raises(ConfigError, match="'nothing', which is no parameter"):
        discover(model, masters={"nothing": torch.ones(1)})


def test_bundles_with_other_members_are_refused():
    adam = discover(*stepped(torch.optim.AdamW))
    plain = discover(*stepped(lambda p: torch.optim.SGD(p, lr=0.1)))
    with pytest.raises(MismatchError, match=r"0\.weight: the source sends"):
        check_alike(plain.values(), adam.values())
    with pytest.raises(ConfigError, match="has no parameter"):
        Bundle("w", {}, {})
