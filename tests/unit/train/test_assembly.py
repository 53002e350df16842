import torch
import torch._dynamo
from torch import nn

from argosy.train import assembly
from argosy.train.settings import Settings


def test_a_compiled_part_makes_a_compiled_model():
    plain, part, whole = (nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
    part[0].compile(backend="eager")
    assert not assembly.is_compiled(plain)
    assert assembly.is_compiled(part)
    assert assembly.is_compiled(torch.compile(whole, backend="eager"))
    assert assembly.is_compiled(nn.Sequential(torch.compile(plain, backend="eager")))


def test_a_batch_of_another_shape_leaves_the_kernels_of_training_alone(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "automatic_dynamic_shapes", True)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    assembly.prepare_compiler(Settings(batch_size=8, mode="fast"))
    assert torch._dynamo.config.automatic_dynamic_shapes
    assembly.prepare_compiler(Settings(batch_size=8))
    shapes = []

    def note(graph, inputs):
        shapes.append([tuple(each.shape) for each in inputs if each.dim() == 1])
        return graph.forward

    double = torch.compile(lambda values: values * 2, backend=note)
    lengths = range(4, 16)
    for length in (*lengths, *lengths):
        double(torch.ones(length))
    assert shapes == [[(length,)] for length in lengths]
