"""A function that is called keeps what its layer keeps, and has its gradient."""

import copy
import functools

import pytest
import torch
from activationcalls import LAYOUTS, Calls, Holds, convert, same, saved_and_gradient
from torch import nn
from torch.nn import functional as F

from actbench.methods.fewbit.called.functions import FUNCTIONS
from actbench.methods.fewbit.inverted import InvertedActivation
from actbench.methods.fewbit.stepwise import StepwiseActivation

SETTINGS = {
    "approximate": "tanh",
    "alpha": 0.7,
    "beta": 2.0,
    "negative_slope": 0.2,
    "min_val": -0.5,
    "max_val": 0.8,
    "lambd": 0.3,
    "threshold": 0.1,
    "value": 0.4,
}
INVERTED = [function for function, called in FUNCTIONS.items() if called.kind in (nn.GELU, nn.SiLU)]


def pairs(functions):
    """Return each function with the arguments that it may have, and the layer that it is."""
    found = []
    for function in functions:
        called = FUNCTIONS[function]
        names = [name for name in (*called.parameters, *called.named) if name != "inplace"]
        choices = [{}] if called.kind is not nn.Threshold else []
        choices += [{name: SETTINGS[name] for name in names}] if names else []
        choices += [{**choice, "inplace": True} for choice in choices[:1] if "inplace" in called.parameters]
        for settings in choices:
            named = f"{called.name} {' '.join(map(str, settings.values()))}"
            found.append(pytest.param(function, settings, called.kind(**settings, **dict(called.fixed)), id=named))
    return found


@pytest.mark.parametrize("layout", ["contiguous", "numbers"])
@pytest.mark.parametrize(("function", "settings", "layer"), pairs(FUNCTIONS))
def test_a_call_keeps_what_the_layer_keeps(function, settings, layer, layout):
    called, held = convert(Calls(function, **settings)), convert(Holds(layer))
    assert isinstance(held.layer, StepwiseActivation)

    same(called, held, LAYOUTS[layout])
    assert torch.uint8 in [dtype for dtype, _ in saved_and_gradient(called, LAYOUTS[layout])[2]]


@pytest.mark.parametrize(("function", "settings", "layer"), pairs([F.gelu, F.relu, F.softplus]))
def test_a_call_keeps_the_order_of_dimensions(function, settings, layer):
    same(convert(Calls(function, **settings)), convert(Holds(layer)), LAYOUTS["channels_last"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("function", "settings", "layer"), pairs([F.gelu, torch.tanh, torch.Tensor.relu, F.softplus]))
def test_in_every_type(function, settings, layer, dtype):
    same(convert(Calls(function, **settings)), convert(Holds(layer)), LAYOUTS["contiguous"].to(dtype))


@pytest.mark.parametrize(("function", "settings", "layer"), pairs(INVERTED))
def test_invact_keeps_the_output_of_a_call(function, settings, layer):
    called, held = convert(Calls(function, **settings), "invact"), convert(Holds(layer), "invact")
    assert isinstance(held.layer, InvertedActivation)

    same(called, held, LAYOUTS["contiguous"])


@pytest.mark.parametrize(
    ("spec", "function", "layer"), [("regelu2", F.gelu, nn.GELU()), ("resilu2", F.silu, nn.SiLU())]
)
def test_sums_of_relus_stand_in_for_calls(spec, function, layer):
    same(convert(Calls(function), spec), convert(Holds(layer), spec), LAYOUTS["contiguous"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    class Net(nn.Module):
        def __init__(self, activation):
            super().__init__()
            torch.manual_seed(0)
            self.wide, self.narrow, self.activation = nn.Linear(8, 16), nn.Linear(16, 8), activation

        def forward(self, x):
            return self.narrow(self.activation(self.wide(x)))

    def step(model):
        with torch.autocast("cpu", dtype):
            y = model(torch.ones(5, 8))
        y.float().square().sum().backward()
        return [y, *(p.grad for p in model.parameters())]

    for one, other in zip(step(convert(Net(F.gelu))), step(convert(Net(nn.GELU()))), strict=True):
        assert torch.equal(one, other)


def test_a_view_is_overwritten_as_by_the_layer():
    class Half(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = x * 1
            self.inner(x[:, :3])
            return x.square()

    layer = nn.ReLU(inplace=True)
    for function in (torch.relu_, torch.Tensor.relu_, functools.partial(F.relu, inplace=True)):
        same(convert(Half(function)), convert(Half(copy.deepcopy(layer))), LAYOUTS["contiguous"])
