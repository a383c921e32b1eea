import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import compressed
from actbench.methods.actnn.layers.linear import Product
from actbench.packing import Identity, SavedTensors, SiteState


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("shape", [(64,), (10, 64), (1, 64), (2, 5, 64), (2, 3, 4, 64)])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(64, 6), lambda: nn.Linear(64, 6, bias=False), lambda: Conv1D(6, 64)]
)
def test_any_rank(make, shape, chunk):
    exact = make()
    layer = compressed(copy.deepcopy(exact), SavedTensors(GroupQuantization(32)), SiteState("", 8, chunk=chunk))
    found = []
    for each in (exact, layer):
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).sin().view(shape).requires_grad_()
        y = each(x)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), x.grad, *(p.grad for p in each.parameters())))
    expected, results = found

    assert torch.equal(results[0], expected[0])
    torch.testing.assert_close(results[1], expected[1])
    assert (results[2] - expected[2]).norm() < 0.02 * expected[2].norm()
    if len(results) > 3:
        torch.testing.assert_close(results[3], expected[3])


def test_inputs_and_gradients_with_strides():
    exact = nn.Linear(64, 6)
    layer = compressed(copy.deepcopy(exact), SavedTensors(GroupQuantization(32)), SiteState("", 8, chunk=2))
    x, grad = torch.randn(64, 10).t(), torch.randn(6, 10).t()
    found = []
    for each in (exact, layer):
        leaf = x.detach().requires_grad_()
        each(leaf).backward(grad)
        found.append((leaf.grad, each.weight.grad, each.bias.grad))

    torch.testing.assert_close(found[1][::2], found[0][::2])
    assert (found[1][1] - found[0][1]).norm() < 0.02 * found[0][1].norm()


def test_the_function_differentiates_an_input_and_a_weight_that_are_not_parameters():
    x, weight = torch.randn(10, 64, requires_grad=True), torch.randn(6, 64, requires_grad=True)
    layer = compressed(nn.Linear(64, 6), SavedTensors(Identity()), SiteState("", 8))
    y = Product.apply(2 * x, weight.sin(), None, layer)
    expected = torch.autograd.grad(F.linear(2 * x, weight.sin()).square().sum(), (x, weight))

    for one, other in zip(torch.autograd.grad(y.square().sum(), (x, weight)), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_an_input_changed_in_place_after_it_was_kept_as_it_is_is_an_error():
    layer = compressed(nn.Linear(64, 6), SavedTensors(Identity()), SiteState("", 8))
    x = torch.randn(10, 64)
    y = layer(x)
    x.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
