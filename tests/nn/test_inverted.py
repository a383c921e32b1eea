import copy

import pytest
import torch
from torch import nn

from actbench import schemes
from actbench.nn.inverted import InvertedActivation
from actbench.training import TrainingSetup

LAYERS = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "silu": nn.SiLU()}


def converted(module):
    return schemes.build("invact").apply(TrainingSetup(module)).module


def gradients(exact, x):
    return [torch.autograd.grad(layer(x).sum(), x)[0] for layer in (exact, converted(copy.deepcopy(exact)))]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("dtype", "worst", "mean"),  # worst at the minimum, where f' ~ sqrt(2 f'' eps |f|)
    [
        (torch.float64, 2e-6, 5e-7),
        (torch.float32, 2e-4, 2e-6),
        (torch.float16, 1e-2, 5e-4),
        (torch.bfloat16, 3e-2, 2e-3),
    ],
)
def test_the_gradient_is_exact_up_to_the_inversion(name, dtype, worst, mean):
    x = torch.linspace(-12, 12, 300001).to(dtype).requires_grad_()
    expected, found = gradients(LAYERS[name], x)
    difference = (found - expected).double()
    assert torch.equal(converted(copy.deepcopy(LAYERS[name]))(x), LAYERS[name](x))
    assert difference.abs().max() < worst
    assert difference.square().mean().sqrt() < mean


@pytest.mark.parametrize("name", LAYERS)
def test_values_that_are_no_numbers(name):
    x = torch.tensor([float("nan"), float("inf"), 1e30, -1e30, 0.0], requires_grad=True)
    _, found = gradients(LAYERS[name], x)
    assert found.isnan()[[0, 2, 3, 4]].tolist() == [True, False, False, False]
    assert found[2:].tolist() == pytest.approx([1.0, 0.0, 0.5], abs=1e-5)


@pytest.mark.parametrize("count", [1, 7, 1001])
def test_beside_the_output_one_bit_is_kept_and_the_output_is_the_next_input(count):
    model = converted(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)))
    kept = []
    x = torch.randn(count, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(x)
    own = {t.untyped_storage().data_ptr(): t for t in [*model.parameters(), *model.buffers(), x]}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    made = {place: size for place, size in storages.items() if place not in own}
    assert sorted(made.values()) == sorted([count * 8 * 4, count * 8 // 8])
    assert y.grad_fn is not None


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "empty", "0-d"])
def test_any_layout(layout):
    x = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 7).t(),
        "empty": torch.randn(0, 3),
        "0-d": torch.randn(()),
    }[layout].requires_grad_()
    expected, found = gradients(nn.GELU(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_many_elements_in_chunks_are_as_in_one():
    x = torch.randn(3, (1 << 18) + 5).requires_grad_()
    expected, found = gradients(nn.SiLU(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-4)


def test_second_derivatives_state_dict_and_moves():
    layer = converted(nn.GELU())
    x = torch.randn(5, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    slopes = layer.slopes.clone()
    assert layer.state_dict() == {}
    assert isinstance(layer, InvertedActivation)
    assert torch.equal(layer.half().slopes, slopes)
    assert layer(x.detach()).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    exact = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    model = converted(copy.deepcopy(exact))
    x = torch.randn(5, 8)
    with torch.autocast("cpu", dtype):
        assert torch.equal(model(x), exact(x))
        model(x).sum().backward()
    assert model[0].weight.grad.isfinite().all()
