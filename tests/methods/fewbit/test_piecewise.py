import copy

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.methods.fewbit.stepwise import StepwiseActivation
from actbench.scheme.setup import TrainingSetup

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NO_NUMBERS = [float("inf"), float("-inf"), float("nan")]


def layers(inplace):
    return {
        "relu": (nn.ReLU(inplace), [0.0, -0.0]),
        "leaky_relu": (nn.LeakyReLU(0.1, inplace), [0.0, -0.0]),
        "leaky_relu, nearly the identity": (nn.LeakyReLU(0.9999, inplace), [0.0]),
        "leaky_relu, steeper below": (nn.LeakyReLU(2.0, inplace), [0.0]),
        "threshold": (nn.Threshold(0.1, 20, inplace), [0.1, 0.0]),
        "relu6": (nn.ReLU6(inplace), [0.0, 6.0]),
        "hardtanh": (nn.Hardtanh(-1, 2, inplace=inplace), [-1.0, 2.0]),
        "hardtanh, away from zero": (nn.Hardtanh(0.5, 0.625, inplace=inplace), [0.5, 0.625]),
        "hardsigmoid": (nn.Hardsigmoid(inplace), [-3.0, 3.0]),
        "hardshrink": (nn.Hardshrink(0.5), [-0.5, 0.5]),
        "softshrink": (nn.Softshrink(0.25), [-0.25, 0.25]),
    }


def same(one, other):
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def run(layer, x, grad):
    leaf = x.clone().requires_grad_()
    y = layer(leaf * 1)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", layers(False))
def test_the_gradient_is_that_of_torch_bit_for_bit(name, dtype, inplace):
    torch.manual_seed(0)
    exact, kinks = layers(inplace)[name]
    # torch itself treats NaN in float64 in two ways, in and after whole vectors; not at kinks
    special = kinks + (NO_NUMBERS[:2] if dtype == torch.float64 else NO_NUMBERS)
    x = torch.cat([torch.tensor(special * 9), 3 * torch.randn(1001)]).to(dtype)
    grad = torch.randn_like(x)
    grad[::7], grad[1::7] = float("inf"), float("nan")
    converted = schemes.build("fewbit:3").apply(TrainingSetup(copy.deepcopy(exact))).module

    (y, gradient), (expected, expected_gradient) = run(converted, x, grad), run(exact, x, grad)

    assert isinstance(converted, StepwiseActivation)
    assert same(y, expected)
    assert same(gradient, expected_gradient)


@pytest.mark.parametrize("name", layers(False))
@pytest.mark.parametrize("count", [0, 1, 9, 1000])
def test_one_bit_an_element_is_kept(name, count):
    converted = schemes.build("fewbit:8").apply(TrainingSetup(layers(False)[name][0])).module
    kept = []
    x = torch.randn(count, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = converted(x)
    assert [t.numel() for t in kept if t.dtype == torch.uint8] == [-(-count // 8)]
    assert sum(t.numel() * t.element_size() for t in kept) == -(-count // 8) + (0 if name == "relu" else 2 * 4)
    assert y.grad_fn is not None


def test_channels_last():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    grad = torch.randn(2, 3, 4, 5)
    converted = schemes.build("fewbit:3").apply(TrainingSetup(nn.ReLU6())).module
    (y, gradient), (expected, expected_gradient) = run(converted, x, grad), run(nn.ReLU6(), x, grad)
    assert torch.equal(y, expected)
    assert torch.equal(gradient, expected_gradient)
    assert gradient.stride() == x.stride()
