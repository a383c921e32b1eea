"""Layers that work in place still do, by the rules of autograd."""

import copy

import pytest
import torch
from torch import nn

from actbench import schemes
from actbench.setup import TrainingSetup

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


@pytest.mark.parametrize("spec", ["fewbit:3", "invact"])
def test_compiled_whole(spec):
    torch.manual_seed(0)
    model = converted(nn.Sequential(nn.Linear(5, 6), nn.SiLU(inplace=True), nn.Linear(6, 2)), spec)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 5)
    model(x).sum().backward()
    compiled(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), compiled.parameters(), strict=True))
