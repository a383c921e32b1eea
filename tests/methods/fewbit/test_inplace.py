"""Layers that work in place still do, by the rules of autograd."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.scheme.setup import TrainingSetup

LAYERS = [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.ELU, nn.Mish, nn.SELU, nn.LeakyReLU]


def converted(module, spec="fewbit:3"):
    return schemes.build(spec).apply(TrainingSetup(module)).module


@pytest.mark.parametrize("kind", LAYERS)
def test_the_input_is_overwritten_and_is_the_output(kind):
    layer = converted(kind(inplace=True))
    x = torch.randn(4, 5, requires_grad=True) * 1
    expected = kind()(x.detach())
    y = layer(x)
    assert y.data_ptr() == x.data_ptr()
    assert torch.equal(x.detach(), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_view_is_overwritten_and_the_rest_keeps_its_gradient(kind):
    leaf = torch.randn(4, 5, requires_grad=True)
    x = leaf * 1
    converted(kind(inplace=True))(x[1:])
    x.sum().backward()
    assert torch.equal(leaf.grad[0], torch.ones(5))
    assert not torch.equal(leaf.grad[1:], torch.ones(4, 5)[1:])


@pytest.mark.parametrize("spec", ["fewbit:3", "invact"])
def test_what_another_operator_saved_may_not_be_overwritten(spec):
    z = torch.randn(5, requires_grad=True).exp()
    y = converted(nn.SiLU(inplace=True), spec)(z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Overwriting(nn.Module):
    """Overwrites a layer's output by each function, the first one's by a layer before it."""

    def __init__(self, functions, first, in_parts):
        super().__init__()
        self.start, self.first, self.in_parts = nn.Linear(8, 8), first, in_parts
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in functions)
        self.functions = functions

    def forward(self, x):
        x = self.first(self.start(x))
        for layer, function in zip(self.layers, self.functions, strict=True):
            x = layer(x)
            if self.in_parts:  # what is overwritten enters the next graph
                torch._dynamo.graph_break()
            x = function(x, inplace=True)
        return x.tanh()


FUNCTIONS = (F.silu, F.leaky_relu, F.elu, F.hardtanh, F.mish, F.selu, F.celu, F.relu6, F.relu)


@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize(
    ("spec", "functions", "first", "in_parts"),
    [
        ("fewbit:3", FUNCTIONS, nn.ReLU(inplace=True), True),
        ("fewbit:3", (F.leaky_relu, F.silu), nn.ReLU(inplace=True), False),
        ("resilu2", (F.silu, F.silu), nn.SiLU(inplace=True), True),
        ("invact", (F.silu, F.silu), nn.SiLU(inplace=True), True),
        ("invact", (F.silu, F.silu), nn.SiLU(inplace=True), False),
    ],
    ids=["fewbit", "fewbit whole", "resilu2", "invact", "invact whole"],
)
def test_the_gradient_of_a_first_compiled_step_is_that_of_an_uncompiled_one(spec, functions, first, in_parts):
    torch._dynamo.reset()
    torch.manual_seed(0)
    exact, x = Overwriting(functions, first, in_parts), torch.randn(16, 8)
    uncompiled, model = converted(copy.deepcopy(exact), spec), converted(copy.deepcopy(exact), spec)
    run = torch.compile(model, backend="aot_eager", fullgraph=not in_parts)
    for each in (uncompiled, run):
        each(x).square().sum().backward()
    torch._dynamo.reset()

    for found, wanted in zip(model.parameters(), uncompiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def test_views_and_what_reads_an_overwritten_tensor_are_right_in_a_graph_that_they_enter():
    layer = converted(nn.SiLU(inplace=True))

    def run(x, y):
        layer(x[:, :3])
        layer(y)
        return (x * y).square().sum()

    gradients = []
    for each in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaves = [torch.linspace(-3, 3, 32).view(4, 8).requires_grad_() for _ in range(2)]
        x, y = (leaf * 1 for leaf in leaves)
        gradients.append((*torch.autograd.grad(each(x, y), leaves), x.detach(), y.detach()))
    torch._dynamo.reset()

    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_a_graph_of_a_layer_in_place_saves_what_it_saves_elsewhere():
    def saved(inplace):
        torch._dynamo.reset()
        net = nn.Sequential(nn.Linear(8, 64), nn.SiLU(inplace), nn.Linear(64, 2))
        y = converted(net, "invact+compile:1,backend=aot_eager_decomp_partition")(torch.ones(100, 8))
        torch._dynamo.reset()
        return sorted(tensor.nbytes for tensor in y.grad_fn.saved_tensors)

    assert saved(True) == saved(False)


@pytest.mark.parametrize("spec", ["fewbit:3", "invact"])
def test_compiled_whole(spec):
    torch.manual_seed(0)
    model = converted(nn.Sequential(nn.Linear(5, 6), nn.SiLU(inplace=True), nn.Linear(6, 2)), spec)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 5)
    model(x).sum().backward()
    compiled(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), compiled.parameters(), strict=True))
