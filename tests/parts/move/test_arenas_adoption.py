"""Moving modules into an arena: identity, strides, ties, hooks, optimizers; and what is refused."""

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from argosy.errors import ArenaGone, ConfigError, MismatchError, NoRoom  # noqa: E402
from argosy.move import arenas  # noqa: E402


@pytest.fixture
def arena():
    with arenas.create("model", 1 << 20) as made:
        yield made


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens))) + self.turned.sum() + self.table.sum()


def test_a_module_moves_in_and_stays_what_it_was(arena, tmp_path):
    model = Model()
    before = copy.deepcopy(model)
    objects = dict(model.named_parameters(remove_duplicate=False))
    calls = []
    model.turned.register_hook(lambda gradient: calls.append("hook"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    names = arena.adopt(model)
    assert set(names) == set(dict(model.named_parameters(remove_duplicate=False))) | set(
        dict(model.named_buffers())
    )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    originals = {**dict(before.named_parameters()), **dict(before.named_buffers())}
    for name, tensor in tensors:
        assert arena.is_inside(tensor), name
        assert tensor.stride() == originals[name].stride(), name
        assert tensor.requires_grad == originals[name].requires_grad
        assert torch.equal(tensor, originals[name])
        assert torch.equal(arena.tensor(name), originals[name])
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == {
        name: id(p) for name, p in objects.items()
    }
    assert model.head.weight is model.embed.weight
    assert arena.tensor("head.weight").data_ptr() == arena.tensor("embed.weight").data_ptr()
    assert "table" not in model.state_dict()
    # The optimizer made before trains what lies in the arena, to the same bits.
    for each, stepper in (
        (model, optimizer),
        (before, torch.optim.AdamW(before.parameters(), lr=0.1)),
    ):
        each(torch.arange(4)).square().mean().backward()
        stepper.step()
    assert calls == ["hook"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(before.named_parameters())[name])
        assert torch.equal(arena.tensor(name), parameter)
        assert arena.is_inside(parameter)
    torch.save(model.frozen, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 4096


def test_a_second_adoption_moves_nothing_and_a_lost_parameter_is_seen(arena):
    model = nn.Linear(4, 4)
    arena.adopt(model)
    used, address = arena.statistics()["used"], model.weight.data_ptr()
    arena.adopt(model)
    assert arena.statistics()["used"] == used
    assert model.weight.data_ptr() == address
    model.load_state_dict(nn.Linear(4, 4).state_dict(), assign=True)
    assert not arena.is_inside(model.weight)


def test_a_like_module_is_bound_to_the_same_bytes(arena):
    first, second = Model(), Model()
    arena.adopt(first, prefix="m.")
    with arenas.open("model") as other:
        kept = second.turned
        other.bind(second, prefix="m.")
        assert second.turned is kept
        assert second.conv.weight.stride() == first.conv.weight.stride()
        with torch.no_grad():
            first.turned.fill_(4)
            second.embed.weight.fill_(5)
        assert (second.turned == 4).all()
        assert (first.head.weight == 5).all()
        for wrong, error in (
            (nn.Linear(2, 2), ArenaGone),
            (nn.ParameterDict({"turned": nn.Parameter(torch.zeros(2))}), MismatchError),
        ):
            with pytest.raises(error, match=r"m\.\w+"):
                other.bind(wrong, prefix="m.")


def test_tensors_that_overlap_go_on_overlapping_and_disjoint_views_part(arena):
    model, flat = nn.Module(), torch.arange(32.0)
    model.first = nn.Parameter(flat[:8])
    model.second = nn.Parameter(flat[8:16].view(2, 4))
    model.register_buffer("wide", flat[16:28])
    model.register_buffer("narrow", flat[20:24])
    same = torch.ones(3)
    model.left, model.right = nn.Parameter(same), nn.Parameter(same)
    arena.adopt(model)
    assert model.first.untyped_storage().nbytes() == 32
    assert model.second.untyped_storage().data_ptr() != model.first.untyped_storage().data_ptr()
    assert model.second.tolist() == flat[8:16].view(2, 4).tolist()
    model.wide.fill_(7)
    assert model.narrow.tolist() == [7.0] * 4
    assert arena.tensor("narrow").tolist() == [7.0] * 4
    with torch.no_grad():
        model.left.fill_(3)
    assert model.right.tolist() == [3.0] * 3


def broken(kind):
    model = nn.Module()
    model.good = nn.Parameter(torch.ones(4))
    if kind == "meta":
        model.bad = nn.Parameter(torch.empty(3, device="meta"))
    elif kind == "expanded":
        model.bad = nn.Parameter(torch.ones(1, 4).expand(3, 4))
    elif kind == "sparse":
        model.register_buffer("bad", torch.eye(3).to_sparse())
    elif kind == "lazy":
        model.bad = nn.LazyLinear(3)
    else:
        model.bad = nn.Parameter(torch.ones(1 << 20))
    return model


@pytest.mark.parametrize(
    ("kind", "error", "fix"),
    [
        ("meta", ConfigError, "to_empty"),
        ("expanded", ConfigError, "contiguous"),
        ("sparse", ConfigError, "to_dense"),
        ("lazy", ConfigError, "forward pass"),
        ("large", NoRoom, "larger size"),
    ],
)
def test_what_cannot_move_is_named_and_nothing_has_moved(arena, kind, error, fix):
    model = broken(kind)
    address = model.good.data_ptr()
    with pytest.raises(error) as failure:
        arena.adopt(model)
    assert fix in failure.value.fix
    assert "bad" in failure.value.what or kind == "large"
    assert model.good.data_ptr() == address
    assert arena.names() == []
