"""A state goes to disk and comes back: its bits, its ties, its streams, into other programs too."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from argosy.checkpoint import Checkpointer, Keep, PerRank, Rules, saving
from argosy.checkpoint.boards import Group
from argosy.checkpoint.optimizers import OptimizerState
from argosy.cli.app import main
from argosy.errors import CheckpointDamaged, ConfigError, MismatchError, NotFoundError


class Net(torch.nn.Module):
    """Ties, a frozen part, buffers of both kinds, a view of another tensor, extra state."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = torch.nn.Embedding(100, width)
        self.inner = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 100, bias=False)
        self.head.weight = self.embed.weight
        self.inner.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.register_buffer("coarse", torch.randn(8, 6).bfloat16())
        self.register_buffer("first_rows", self.coarse[2:4, 1:3])
        self.told = {"calls": 3}

    def get_extra_state(self):
        return self.told

    def set_extra_state(self, state):
        self.told = state

    def forward(self, tokens):
        return self.head(self.norm(self.inner(self.embed(tokens))))


def made(steps=0, seed=0):
    torch.manual_seed(seed)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(steps):
        train(model, optimizer, schedule)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def train(model, optimizer, schedule):
    optimizer.zero_grad()
    model(torch.randint(0, 100, (16,))).square().mean().backward()
    optimizer.step()
    schedule.step()


def bits(state):
    found = {f"model/{k}": v for k, v in state["model"].state_dict().items() if torch.is_tensor(v)}
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optimizer"].state.get(parameter, {}).items():
            found[f"optimizer/{name}/{key}"] = value
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(
            a[name].view(torch.uint8) if a[name].dim() else a[name],
            b[name].view(torch.uint8) if b[name].dim() else b[name],
        ), name


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path):
    state = made(steps=3)
    random.seed(1)
    np.random.seed(2)
    gauss = random.gauss(0, 1)  # leaves half a pair in the stream
    with Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(3, state, metrics={"loss": 0.5})
    assert path == tmp_path / "step-000000003"
    drawn = [random.gauss(0, 1), np.random.randn(), torch.rand(3)]
    for _ in range(2):
        train(*state.values())
    expected = bits(state)

    fresh = made(seed=9)
    with Checkpointer(tmp_path) as checkpointer:
        loaded = checkpointer.load(fresh)
    assert loaded.step == 3
    assert gauss != drawn[0]
    assert random.gauss(0, 1) == drawn[0]
    assert np.random.randn() == drawn[1]
    assert torch.equal(torch.rand(3), drawn[2])
    for _ in range(2):
        train(*fresh.values())
    assert_same(bits(fresh), expected)
    assert fresh["schedule"].get_last_lr() == state["schedule"].get_last_lr()
    assert fresh["model"].told == {"calls": 3}
    assert fresh["model"].head.weight is fresh["model"].embed.weight


@pytest.mark.filterwarnings("error")
def test_a_metric_may_be_a_loss_with_its_graph_and_what_is_no_number_is_named(tmp_path):
    loss = torch.nn.Linear(2, 1)(torch.ones(2)).sum()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"value": 1}, metrics={"loss": loss})
        assert checkpointer.open(1).manifest.metrics == {"loss": loss.item()}
        for value in (torch.ones(2), "low", None):
            with pytest.raises(ConfigError, match="the metric `loss` is not one number"):
                checkpointer.save(2, {"value": 2}, metrics={"loss": value})
        assert checkpointer.steps() == [1]


@pytest.mark.parametrize("wait", [True, False])
def test_a_loss_that_is_not_finite_costs_no_checkpoint(tmp_path, wait):
    metrics = {"loss": float("nan"), "most": torch.tensor(float("inf")), "rate": np.float32(0.5)}
    keep = Keep(last=1, best="loss")
    with Checkpointer(tmp_path, keep=keep) as checkpointer:
        checkpointer.save(1, {"value": 1}, metrics={"loss": 2.0})
        for step in (2, 3):
            checkpointer.save(step, {"value": step}, metrics=metrics, wait=wait)
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.steps() == [1, 3]
    with checkpointer.open(3) as third:
        assert third.manifest.metrics == {"loss": None, "most": None, "rate": 0.5}
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0


def test_ties_are_saved_once_and_non_persistent_buffers_never(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, made())
    with checkpointer.open(1) as opened:
        assert opened.manifest.aliases == {"head.weight": "embed.weight"}
        assert "scratch" not in opened.names()
        assert opened.manifest.tensors["inner.bias"].kind == "frozen"
        assert opened.manifest.tensors["first_rows"].shape == (2, 2)
        assert torch.equal(
            opened.tensor("head.weight").read(), opened.tensor("embed.weight").read()
        )


def test_plain_readers_open_the_weights_unconverted(tmp_path):
    state = made(steps=1)
    path = Checkpointer(tmp_path).save(1, state)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    wanted = {k: v for k, v in state["model"].state_dict().items() if torch.is_tensor(v)}
    assert set(index["weight_map"]) == set(wanted) - {"head.weight"}
    found = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(path / file)
        with safe_open(path / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for t in found.values()
    )
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def test_torchs_own_reader_loads_the_weights(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    state = made(steps=1)
    path = Checkpointer(tmp_path).save(1, state)
    weights = {k: v.detach() for k, v in state["model"].named_parameters()}
    found = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.uint16,
    ],
)
def test_values_of_every_kind_come_back(tmp_path, dtype):
    tensor = (torch.randn(3, 5) * 3).to(dtype)
    empty, scalar = torch.empty(0, 4, dtype=dtype), torch.zeros((), dtype=dtype)
    value = {"t": [tensor.t(), empty, scalar], "b": b"\0\xff", 7: (1, 2.5), "n": np.arange(4)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, {"user": value})
    taken = {}
    loaded = checkpointer.load({"user": taken})
    assert loaded.values["user"] is not None
    back, nothing, number = taken["t"]
    raw = torch.uint8
    assert torch.equal(back.view(raw), tensor.t().contiguous().view(raw))
    assert back.dtype == tensor.dtype
    assert nothing.shape == (0, 4)
    assert number.shape == ()
    assert (taken["b"], taken[7], taken["n"].tolist()) == (b"\0\xff", (1, 2.5), [0, 1, 2, 3])
    assert torch.equal(checkpointer.open(0).value("user")["t"][0].view(raw), back.view(raw))


def test_generators_of_the_user_go_on(tmp_path):
    def state():
        return {
            "a": torch.Generator(),
            "b": np.random.default_rng(3),
            "c": random.Random(4),
            "d": np.random.Generator(np.random.MT19937(1)),
        }

    first = state()
    checkpointer = Checkpointer(tmp_path)
    [g.random() for g in list(first.values())[1:]]
    checkpointer.save(0, first)
    second = state()
    checkpointer.load(second)
    for mine, theirs in zip(list(first.values())[1:], list(second.values())[1:], strict=True):
        assert mine.random() == theirs.random()
    assert torch.equal(first["a"].get_state(), second["a"].get_state())


def test_lazy_slices_equal_the_tensors_own(tmp_path):
    tensor = torch.randn(40, 6, 50)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, {"x": tensor})
    lazy = checkpointer.open(0).tensor("x")
    assert (lazy.shape, lazy.dtype) == (tensor.shape, tensor.dtype)
    for index in [
        3,
        -1,
        slice(5, 9),
        (slice(None), 2),
        (..., slice(10, 20)),
        (1, 2, 3),
        (slice(0, 40, 7), slice(1, 3)),
        (slice(9, 3),),
        (),
    ]:
        assert torch.equal(lazy[index], tensor[index]), index
    with pytest.raises(IndexError):
        lazy[40]
    with pytest.raises(NotFoundError, match="no tensor 'y'"):
        checkpointer.open(0).tensor("y")


def test_a_state_that_keeps_its_form_is_planned_once(tmp_path, monkeypatch):
    planned = []
    plan = saving._plan
    monkeypatch.setattr(saving, "_plan", lambda *given: planned.append(given) or plan(*given))
    checkpointer = Checkpointer(tmp_path)
    for step, width in enumerate((4, 4, 5)):
        checkpointer.save(step, {"x": torch.full((width,), float(step))})
        assert checkpointer.open(step).tensor("x").read().tolist() == [float(step)] * width
    assert len(planned) == 2


def test_partial_loads_follow_their_rules(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": torch.nn.Linear(4, 3)})
    stored = checkpointer.open(1).tensor("weight").read()
    wrapped = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 3)})
    with pytest.raises(MismatchError, match=r"lacks 2 tensors of the state, first 'body\.weight'"):
        checkpointer.load({"model": wrapped})
    checkpointer.load({"model": wrapped}, rules=Rules(rename=[(r"^body\.", "")]))
    assert torch.equal(wrapped["body"].weight, stored)
    bare = torch.nn.Linear(4, 3, bias=False)
    with pytest.raises(MismatchError, match="has 1 tensors that the state lacks, first 'bias'"):
        checkpointer.load({"model": bare})
    assert checkpointer.load({"model": bare}, rules=Rules(strict="subset")).unused == ["bias"]
    assert torch.equal(bare.weight, stored)
    loaded = checkpointer.load({"model": wrapped}, rules=Rules(strict="any"))
    assert sorted(loaded.missing) == ["body.bias", "body.weight"]


@pytest.mark.parametrize("pattern", [r"^body\.", r"body\."])
def test_what_an_optimizer_keeps_follows_its_renamed_parameter(tmp_path, pattern):
    def trained(model, seed):
        torch.manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 100)
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        return optimizer

    plain = torch.nn.Sequential(torch.nn.Linear(4, 3))
    saved = trained(plain, 1)
    # Another key's tensors are no module's: their names are not turned, though the pattern is in them.
    extra = {"body.mean": torch.arange(3.0)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": plain, "optimizer": saved, "extra": extra})

    wrapped = torch.nn.Sequential()
    wrapped.body = torch.nn.Sequential(torch.nn.Linear(4, 3))
    for has_stepped in (False, True):
        own = trained(wrapped, 2) if has_stepped else torch.optim.AdamW(wrapped.parameters())
        state = {"model": wrapped, "optimizer": own, "extra": {"body.mean": torch.zeros(3)}}
        with pytest.raises(MismatchError, match=r"'optimizer' differs: '0\.bias' is only in"):
            checkpointer.load(state)
        loaded = checkpointer.load(state, rules=Rules(rename=[(pattern, "")]))
        assert not loaded.missing + loaded.unused
        assert state["extra"]["body.mean"].tolist() == [0.0, 1.0, 2.0]
        assert own.param_groups[0]["lr"] == 0.01
        for parameter, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter, other)
            assert own.state[parameter].keys() == saved.state[other].keys()
            for member, value in saved.state[other].items():
                assert torch.equal(own.state[parameter][member], value), member


def test_other_shapes_and_dtypes_are_refused_before_anything_changes(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": torch.nn.Linear(4, 3)})
    with pytest.raises(MismatchError, match=r"weight has shape \(3, 5\) in the state and \(3, 4\)"):
        checkpointer.load({"model": torch.nn.Linear(5, 3)})
    half = torch.nn.Linear(4, 3).bfloat16()
    before = half.weight.clone()
    with pytest.raises(MismatchError, match="weight is bfloat16 in the state and float32"):
        checkpointer.load({"model": half})
    assert torch.equal(half.weight, before)
    checkpointer.load({"model": half}, rules=Rules(cast=True))
    assert torch.equal(half.weight, checkpointer.open(1).tensor("weight").read().bfloat16())


def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for value, named in [
        ({"a": [object()]}, "user/a/0"),
        ({"s": torch.eye(3).to_sparse()}, "user/s"),
    ]:
        with pytest.raises(ConfigError, match=named):
            checkpointer.save(1, {"user": value})
    assert not list(tmp_path.glob("*step*")) + list(tmp_path.glob(".staging*"))
    assert checkpointer.load({"user": {}}) is None


def test_a_step_is_never_overwritten(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": torch.zeros(3)})
    with pytest.raises(ConfigError, match="never overwritten"):
        checkpointer.save(1, {"x": torch.ones(3)})
    assert checkpointer.open(1).tensor("x").read().tolist() == [0, 0, 0]


def test_two_runs_do_not_save_into_one_directory(tmp_path):
    first = Checkpointer(tmp_path, run="alpha")
    first.save(1, {"x": torch.zeros(3)})
    with pytest.raises(ConfigError, match="alpha"):
        Checkpointer(tmp_path).save(2, {"x": torch.zeros(3)})
    first.close()
    with Checkpointer(tmp_path) as second:
        second.save(2, {"x": torch.zeros(3)})
        parent = second.open(2).manifest.parent
    assert parent is None  # nothing was loaded: a lineage of its own


def test_parents_lead_back(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(3)})
        checkpointer.save(2, {"x": torch.zeros(3)})
        manifest = checkpointer.open(2).manifest
        from argosy.checkpoint.manifests import crc_of

        assert manifest.parent.step == 1
        assert manifest.parent.crc32c == crc_of(checkpointer.open(1).manifest_bytes)


@pytest.mark.parametrize("name", ["MANIFEST.json", "extra.json", "a.safetensors", "../x", ""])
def test_what_is_attached_cannot_take_the_place_of_something_else(tmp_path, name):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ConfigError, match="cannot be attached"):
            checkpointer.save(1, {"x": 1}, attachments={name: b"{}"})
        checkpointer.save(1, {"x": 1}, attachments={"note.txt": b"hello"})
        assert (tmp_path / "step-000000001" / "note.txt").read_bytes() == b"hello"
        assert checkpointer.catalogue.verify(1).is_good


def test_a_value_that_the_checkpoint_lacks_is_not_passed_over(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    model = torch.nn.Linear(4, 3)
    checkpointer.save(1, {"model": model, "schedule": {"epoch": 3}}, streams=False)
    for state in ({"model": model, "scheduler": {"epoch": 0}}, {"other": torch.zeros(3)}):
        with pytest.raises(MismatchError, match=r"has nothing under '(scheduler|other)'"):
            checkpointer.load(state)
        loaded = checkpointer.load(state, rules=Rules(strict="any"))
        assert loaded.missing == [list(state)[-1]]
    assert checkpointer.load({"model": model}).missing == []


def test_what_a_rank_lacks_because_there_were_fewer_is_said(tmp_path, caplog):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"mine": PerRank([7])})
    third = Checkpointer(tmp_path, group=Group(2, 1, "other"))
    own = [0]
    third.load({"mine": PerRank(own)}, step=1)
    assert own == [0]
    assert "was saved by a world of 1: rank 2 has nothing under 'mine'" in caplog.text
    checkpointer.load({"mine": PerRank(own)})
    assert own == [7]


def test_settings_of_parameter_groups_go_by_their_parameters(tmp_path):
    def grouped(model, *names, **settings):
        return {"params": [model.get_parameter(name) for name in names], **settings}

    model = torch.nn.Linear(4, 3)
    decayed = grouped(model, "weight", weight_decay=0.1), grouped(model, "bias", weight_decay=0.0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": model, "optimizer": torch.optim.AdamW(decayed)})
    turned = torch.optim.AdamW([grouped(model, "bias"), grouped(model, "weight")])
    checkpointer.load({"model": model, "optimizer": turned})
    assert [group["weight_decay"] for group in turned.param_groups] == [0.0, 0.1]
    wide = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
    names = [name for name, _ in wide.named_parameters()]
    first = torch.optim.AdamW([grouped(wide, *names[:2]), grouped(wide, *names[2:])])
    checkpointer.save(2, {"model": wide, "optimizer": first})
    other = torch.optim.AdamW([grouped(wide, *names[:1]), grouped(wide, *names[1:])])
    with pytest.raises(
        MismatchError, match=r"in other groups than the checkpoint, first '0\.bias'"
    ):
        checkpointer.load({"model": wide, "optimizer": other})


@pytest.mark.parametrize("wait", [True, False])
def test_arrays_are_filled_where_they_are_and_stay_arrays(tmp_path, wait):
    state = {
        "top": np.arange(3.0),
        "inside": {"n": np.arange(6, dtype=np.uint16).reshape(2, 3), "l": [np.array(2.5)]},
        "big": {"endian": np.arange(4, dtype=">i4"), "turned": np.arange(6.0).reshape(2, 3).T},
    }
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state, wait=wait)
        if not wait:
            handle.wait()
        with checkpointer.open(1) as opened:
            assert isinstance(opened.value("big")["turned"], np.ndarray)
    top, inner = np.zeros(3), np.zeros((2, 3), np.uint16)
    mine = {"top": top, "inside": {"n": inner, "l": [np.array(0.0)]}, "big": {}}
    Checkpointer(tmp_path).load(mine)
    assert top.tolist() == [0.0, 1.0, 2.0]
    assert mine["inside"]["n"] is inner
    assert inner.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert mine["inside"]["l"][0] == 2.5
    assert mine["big"]["endian"].tolist() == [0, 1, 2, 3]
    assert mine["big"]["turned"].tolist() == state["big"]["turned"].tolist()
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    with pytest.raises(ConfigError, match="the array under 'top' cannot be filled"):
        Checkpointer(tmp_path).load({"top": fixed})


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"model": torch.nn.Linear(2, 2), "weight": torch.ones(2, 2)}, "weight"),
        ({"x": {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}}, "x/a/b"),
        ({"x": {1: torch.ones(1), "1": torch.zeros(1)}}, "x/1"),
    ],
)
def test_two_tensors_of_one_name_are_refused(tmp_path, wait, state, name):
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(MismatchError, match=f"two tensors of the name {name}"):
        checkpointer.save(1, state, wait=wait).wait()
    assert checkpointer.steps() == []


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.ma.masked_array([1.0, 2.0], [True, False]), "x/y is a MaskedArray"),
        (np.zeros(2, np.longdouble), "x/y is a ndarray of float"),
        (np.array(["a"]), "x/y is a ndarray of <U1"),
        ("half \udc80", "x/y has the text 'half"),
        ({"half \udc80": 1}, "x/y has the text 'half"),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "x/y is a nested tensor",
        ),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_its_place(tmp_path, wait, value, why):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "x": {"y": value}}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ConfigError, match=why):
            checkpointer.save(1, state, wait=wait).wait()
        checkpointer.save(1, {"x": 1})


def test_steps_of_numpy_are_steps_and_a_file_is_no_store(tmp_path):
    with Checkpointer(tmp_path / "store") as checkpointer:
        checkpointer.save(np.int64(3), {"x": 1})
        assert checkpointer.load({"x": 0}, np.int32(3)).values["x"] == 1
        for odd in ("a", 1.0, True, -1):
            with pytest.raises(ConfigError, match="is no step"):
                checkpointer.is_due(odd)
        with pytest.raises(ConfigError, match="is no Rules"):
            checkpointer.load({"x": 0}, rules={"strict": "any"})
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError, match="is a file"):
        Checkpointer(tmp_path / "file").load({"x": 0})


def test_state_of_another_kind_of_optimizer_is_noticed(tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path)
    saved = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.OneCycleLR(saved, 1.0, 10)
    checkpointer.save(1, {"model": model, "optimizer": saved})
    checkpointer.load({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert "of another kind" not in caplog.text
    checkpointer.load({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    assert "which SGD does not have: is it of another kind?" in caplog.text


def test_complex_arrays_come_back(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": {"a": np.array([1 + 2j]), "b": np.array([3j], np.complex64)}})
        loaded = checkpointer.load({"x": {}})
    found = loaded.values["x"]
    assert found["a"].dtype == np.complex128
    assert found["a"].tolist() == [1 + 2j]
    assert found["b"].dtype == np.complex64
    assert found["b"].tolist() == [3j]


@pytest.mark.parametrize(
    "tree",
    [
        {"groups": 3, "state": {}, "tensors": {}},
        {"groups": [{"lr": 0.1}], "state": {}, "tensors": {}},
        {"groups": [{"parameters": ["weight", "bias"]}], "state": [], "tensors": {}},
        {"groups": [{"parameters": ["weight", 3]}], "state": {}, "tensors": {}},
        {"groups": [{"parameters": ["weight", "bias"]}], "state": {}, "tensors": {"weight": 1}},
        {"groups": [{"parameters": ["weight", "bias"]}], "state": {"bias": 1}, "tensors": {}},
    ],
)
def test_values_that_lie_about_an_optimizer_are_damage_and_the_older_step_is_loaded(
    tmp_path, tree, monkeypatch
):
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {**state, "mine": PerRank(3)})
    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(
            OptimizerState,
            "_write",
            lambda self, book, settings, members: book.values.update(optimizer=tree),
        )
        checkpointer.save(2, {**state, "mine": 7})
        monkeypatch.undo()
        with pytest.raises(CheckpointDamaged, match="makes no sense under 'optimizer'"):
            checkpointer.load(state, 2)
        with pytest.raises(CheckpointDamaged, match="makes no sense under 'mine'"):
            checkpointer.load({"mine": PerRank(0)}, 2)
        assert checkpointer.load(state).step == 1
        # To another state it may make sense.
        with pytest.raises(ConfigError, match="never overwritten"):
            checkpointer.save(2, state)
        assert checkpointer.load({"mine": 0}).values["mine"] == 7


def test_values_that_nobody_can_decode_are_damage_and_a_new_save_takes_their_place(
    tmp_path, monkeypatch
):
    for step, tree in enumerate(
        ({"$float": "no"}, {"$items": 3}, {"a": [{"$tensor": "elsewhere"}]}), 2
    ):
        store = tmp_path / str(step)
        with Checkpointer(store) as checkpointer:
            checkpointer.save(1, {"x": 1})
            with monkeypatch.context() as patch:
                patch.setattr("argosy.checkpoint.trees.encode", lambda value, *_, tree=tree: tree)
                checkpointer.save(step, {"x": 1}, streams=False)
            (fault,) = checkpointer.catalogue.verify(step).faults
            assert "extra.json has $" in fault
            assert checkpointer.load({"x": 0}).step == 1
            checkpointer.save(step, {"x": step})
            assert checkpointer.load({"x": 0}).values["x"] == step


def test_tensors_in_dicts_have_the_shape_that_was_saved_or_none_yet(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"ema": {"w": torch.ones(4, 4)}, "x": 3})
    reader = Checkpointer(tmp_path)
    with pytest.raises(MismatchError, match=r"ema/w has shape \(2, 2\)"):
        reader.load({"ema": {"w": torch.zeros(2, 2)}})
    empty = {"w": torch.zeros(0)}
    reader.load({"ema": empty})
    assert empty["w"].shape == (4, 4)
    with pytest.raises(MismatchError, match="'x' is a tensor in the state, and none in"):
        reader.load({"x": torch.zeros(1)})
