"""What is captured of a state in the call gives the book that gathering it there gives."""

import numpy as np
import pytest
import torch

from argosy.checkpoint.books import Book
from argosy.checkpoint.captures import capture
from argosy.checkpoint.guards import Guards, SnapshotTorn
from argosy.checkpoint.registry import PerRank, parts_of


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("nothing", None)
        self.again = self.norm
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, batch):
        return self.norm(self.second(self.first(batch)))


class Minded(torch.nn.Linear):
    """A module with state of its own making."""

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def trained(model, make=torch.optim.AdamW, **options):
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = make(parameters, lr=0.1, **options)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def sgd_and_adam():
    state = trained(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
    groups = [{"params": [one]} for one in state["model"].parameters()]
    state["second"] = torch.optim.SGD(groups, lr=torch.tensor(0.5), momentum=0.9)
    return state


def with_values():
    state = trained(Tied(), amsgrad=True)
    state["values"] = {"epoch": 3, "tensor": torch.arange(4), "bytes": b"abc", "array": np.ones(3)}
    state["tied"] = [state["model"].first.weight, (1, 2.5)]
    state["mine"] = PerRank({"position": torch.tensor([1, 2])})
    state["generator"] = torch.Generator().manual_seed(4)
    state["schedule"] = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1)
    return state


def before_the_first_step():
    model = torch.nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


STATES = {
    "tied": lambda: trained(Tied()),
    "two optimizers": sgd_and_adam,
    "values": with_values,
    "before the first step": before_the_first_step,
    "compiled": lambda: trained(torch.compile(torch.nn.Linear(4, 4), backend="eager")),
    "numbers in the optimizer": lambda: trained(torch.nn.Linear(4, 4), torch.optim.ASGD),
}


def described(book):
    return [(one.name, one.dtype, one.shape, one.kind, one.held) for one in book.entries]


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_the_book_is_the_one_that_is_gathered_in_the_call(make):
    state = make()
    optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
    gathered = Book(2)
    for part in parts_of(state).values():
        part.gather(gathered)
    captured = capture(parts_of(state), Guards(optimizers), rank=2)
    book = captured.book()
    assert described(book) == described(gathered)
    assert book.aliases == gathered.aliases
    assert book.values == gathered.values
    assert book.own_values == gathered.own_values
    assert book.parameters == gathered.parameters
    guarded = {one.data_ptr() for one in captured.guards.tensors}
    for ours, theirs in zip(book.entries, gathered.entries, strict=True):
        assert torch.equal(ours.buffers[0], theirs.buffers[0]), ours.name
        is_shared = ours.buffers[0].data_ptr() == theirs.buffers[0].data_ptr()
        assert is_shared == (theirs.buffers[0].data_ptr() in guarded), ours.name


def hooked():
    state = trained(torch.nn.Linear(4, 4))
    state["model"].register_state_dict_pre_hook(lambda *_: None)
    return state


def hooked_below():
    state = trained(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    state["model"][0]._register_state_dict_hook(lambda *_: None)
    return state


def much_that_may_change():
    state = trained(torch.nn.Linear(4, 4))
    state["large"] = torch.zeros(65 << 20, dtype=torch.uint8)
    return state


def with_a_strange_view():
    state = trained(torch.nn.Linear(4, 4))
    state["view"] = torch.ones(4, 4)[:, ::2]
    return state


LEFT = {
    "extra state": lambda: trained(Minded(4, 4)),
    "a hook": hooked,
    "a hook below": hooked_below,
    "no optimizer": lambda: {"model": torch.nn.Linear(4, 4)},
    "much that may change": much_that_may_change,
    "a view": with_a_strange_view,
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_what_cannot_be_captured_is_left_to_the_call(make):
    state = make()
    optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
    assert capture(parts_of(state), Guards(optimizers), rank=0) is None


def test_guards_know_which_tensor_was_changed():
    state = trained(torch.nn.Linear(4, 4))
    guards = Guards([state["optimizer"]])
    assert guards.changed() is None
    weight = state["model"].weight
    assert weight.data_ptr() in guards.addresses
    with torch.no_grad():
        weight.add_(1)
    assert guards.changed() == weight.data_ptr()
    assert guards.places()[id(weight)] == weight.data_ptr()


def test_a_parameter_that_was_given_other_memory_is_refused_by_its_name():
    state = trained(torch.nn.Linear(4, 4))
    captured = capture(parts_of(state), Guards([state["optimizer"]]), rank=0)
    state["model"].weight.data = torch.ones(4, 4)
    with pytest.raises(SnapshotTorn, match="weight was given other memory"):
        captured.book()
