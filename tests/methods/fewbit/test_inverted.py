import copy
import gc

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.measuring.meters.trace import AllocationTrace
from actbench.methods.fewbit.inverted import InvertedActivation
from actbench.scheme.setup import TrainingSetup

LAYERS = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "silu": nn.SiLU()}


def converted(module):
    return schemes.build("invact").apply(TrainingSetup(module)).module


def gradients(exact, x):
    return [torch.autograd.grad(layer(x).sum(), x)[0] for layer in (exact, converted(copy.deepcopy(exact)))]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    # Worst at the minimum, where f' ~ sqrt(2 f'' eps |f|); torch's GELU on AVX2 is off there by 2.3 of the last place
    ("dtype", "worst", "mean"),
    [
        (torch.float64, 2e-6, 5e-7),
        (torch.float32, 2.3e-4, 2e-6),
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


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2)


@pytest.mark.parametrize(
    "after",
    [
        [nn.ReLU(inplace=True)],
        [nn.Dropout(0.0), nn.Flatten(), nn.LeakyReLU(0.1, inplace=True)],
        [nn.Sequential(nn.Identity(), nn.Dropout(0.5, inplace=True))],
    ],
)
def test_an_output_that_the_next_module_changes_in_place_is_not_relied_on(after):
    exact = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.GELU()), *after, nn.Linear(8, 8), nn.SiLU())
    setup, found = schemes.build("invact").apply(TrainingSetup(copy.deepcopy(exact))), []
    x = torch.randn(50, 4)
    for model in (exact, setup.module):
        torch.manual_seed(0)
        model(x).square().sum().backward()
        found.append([p.grad for p in model.parameters()])

    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert [site.path for site in setup.sites] == [str(len(exact) - 1)]
    (left,) = setup.unreached
    assert (left.path, left.kind) == ("0.1", "GELU")
    assert f"{type(list(after[-1].modules())[-1]).__name__}(inplace=True) after it overwrites its output" in left.reason


def test_where_all_outputs_are_changed_in_place_the_model_is_refused_with_the_reason():
    with pytest.raises(ConversionError, match=r"1: ReLU\(inplace=True\) after it overwrites its output"):
        converted(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.ReLU(inplace=True)))


def test_a_change_in_place_that_cannot_be_foreseen_is_an_error_that_names_it():
    loss = converted(nn.Sequential(nn.Linear(4, 4), nn.GELU(), InPlace()))(torch.randn(3, 4)).sum()
    with pytest.raises(RuntimeError, match=r"invact keeps the output of gelu, .* or use fewbit"):
        loss.backward()


@pytest.mark.parametrize("rows", [2, 16, pytest.param(512, marks=pytest.mark.slow), 4096])
@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_the_peak_of_a_model_of_any_size_does_not_rise(dtype, layers, rows):
    parts = [part for _ in range(layers) for part in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    exact = nn.Sequential(*parts).to(dtype)
    x = torch.randn(rows, 64, dtype=dtype)

    assert peak_bytes(converted(copy.deepcopy(exact)), x) <= peak_bytes(exact, x)


def peak_bytes(model, x):
    model(x).sum().backward()
    model.zero_grad()
    gc.collect()
    with AllocationTrace() as trace:
        trace.mark("begin")
        model(x).sum().backward()
        trace.mark("end")
    return trace.peak_bytes("begin", "end")


def test_state_dict_and_moves():
    layer = converted(nn.GELU())
    slopes = layer.slopes.clone()
    assert layer.state_dict() == {}
    assert isinstance(layer, InvertedActivation)
    assert torch.equal(layer.half().slopes, slopes)
