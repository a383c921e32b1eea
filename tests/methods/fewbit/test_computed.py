"""What a layer computes decides what it is taken for, and not the name of its class."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from timm.layers import activations as timm_layers, activations_me as timm_own_gradients
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.errors import NothingToConvertError
from actbench.methods.fewbit import computed
from actbench.methods.fewbit.activations import function_of
from actbench.methods.fewbit.stepwise import StepwiseActivation
from actbench.scheme.setup import TrainingSetup

X = 3 * torch.randn(500, generator=torch.Generator().manual_seed(0))


def layer(name, forward, base=nn.Module, **attributes):
    """Return a layer of a new class with this name."""

    class Layer(base):
        def forward(self, x):
            return forward(self, x)

    Layer.__name__ = Layer.__qualname__ = name
    made = Layer()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def by_erf(_, x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def by_tanh(_, x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def convert(model, spec="fewbit:3"):
    return schemes.build(spec).apply(TrainingSetup(model))


def gradient(model):
    torch.manual_seed(0)
    x = X.clone().requires_grad_()
    y = model(x * 1)
    y.backward(torch.randn_like(y))
    return y.detach(), x.grad


FORMULAS = {
    "erf": (layer("Mystery", by_erf), "gelu"),
    "tanh": (layer("Mystery", by_tanh), "gelu_tanh"),
    "tanh in float32": (layer("MyGELU", lambda _, x: by_tanh(_, x.float()).to(x.dtype)), "gelu_tanh"),
    "a wrong name": (layer("ReLU", by_erf), "gelu"),
    "silu": (layer("GELU", lambda _, x: x * torch.sigmoid(x)), "silu"),
    "relu": (layer("R", lambda _, x: torch.where(x <= 0, 0, x)), "relu"),
    "a subclass": (
        layer("Leaky", lambda self, x: torch.where(x > 0, x, self.negative_slope * x), nn.LeakyReLU),
        "leaky_relu",
    ),
    "timm's QuickGELU": (timm_layers.QuickGELU(), "quick_gelu"),
    "timm's Swish": (timm_layers.Swish(), "silu"),
    "timm's Mish": (timm_layers.Mish(), "mish"),
    "timm's HardSwish": (timm_layers.HardSwish(), "hardswish"),
    "timm's HardSigmoid": (timm_layers.HardSigmoid(), "hardsigmoid"),
    "timm's Sigmoid in place": (timm_layers.Sigmoid(inplace=True), "sigmoid"),
    "timm's Tanh in place": (timm_layers.Tanh(inplace=True), "tanh"),
    "timm's SwishMe": (timm_own_gradients.SwishMe(), "silu"),
    "timm's MishMe": (timm_own_gradients.MishMe(), "mish"),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_taken_for_its_function(name):
    exact, function = copy.deepcopy(FORMULAS[name][0]), FORMULAS[name][1]
    assert function_of(exact).name == function
    twin = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": nn.ReLU(), "mish": nn.Mish(), "silu": nn.SiLU()}

    model = nn.Sequential(exact)
    (site,) = convert(model).sites
    assert site.was == type(exact).__name__
    y, found = gradient(model)
    assert torch.equal(y, gradient(exact)[0])
    if function in twin:
        assert torch.equal(found, gradient(convert(nn.Sequential(twin[function])).module)[1])


CALLS = {
    "MyGELU": (layer("MyGELU", lambda _, x: F.gelu(x)), nn.GELU()),
    "P": (layer("P", lambda _, x: F.gelu(x)), nn.GELU()),
    "timm's GELU": (timm_layers.GELU(), nn.GELU()),
    "timm's GELUTanh": (timm_layers.GELUTanh(), nn.GELU("tanh")),
    "a subclass that only calls": (layer("Sub", lambda self, x: nn.GELU.forward(self, x), nn.GELU), nn.GELU()),
}


@pytest.mark.parametrize("spec", ["fewbit:3", "regelu2", "invact"])
@pytest.mark.parametrize("name", CALLS)
def test_a_layer_that_calls_a_function_is_converted_whatever_its_name(name, spec):
    exact, twin = copy.deepcopy(CALLS[name])
    (site,) = convert(model := nn.Sequential(exact), spec).sites
    assert site.called
    for found, expected in zip(gradient(model), gradient(convert(nn.Sequential(twin), spec).module), strict=True):
        assert torch.equal(found, expected)


def test_a_subclass_that_computes_something_else_is_converted_by_what_it_calls():
    odd = layer("GELU", lambda _, x: x * torch.tanh(x), nn.GELU)
    convert(model := nn.Sequential(odd))
    plain = convert(nn.Sequential(layer("P", lambda _, x: x * torch.tanh(x)))).module
    assert torch.equal(gradient(model)[1], gradient(plain)[1])


def counting(self, x):
    self.count += 1
    return by_erf(self, x)


def through(_, x):
    return x + (by_erf(_, x) - x).detach()


OTHERS = {
    "another formula": layer("GELU", lambda _, x: 0.5 * x * (1 + torch.erf(x))),
    "clipped far out": layer("GELU", lambda _, x: by_erf(_, x).clamp(max=5e4)),
    "the slope at the kink": layer("ReLU", lambda _, x: x.clamp(min=0)),
    "another gradient": layer("GELU", through),
    "no gradient": layer("GELU", lambda _, x: by_erf(_, x.detach())),
    "random": layer("GELU", lambda _, x: by_erf(_, x) + 0 * torch.rand_like(x)),
    "random numbers of Python": layer("GELU", lambda _, x: x if random.random() < 1e-9 else by_erf(_, x)),
    "random numbers of NumPy": layer("GELU", lambda _, x: x if np.random.rand() < 1e-9 else by_erf(_, x)),
    "only in training": layer("GELU", lambda self, x: by_erf(self, x) if self.training else x),
    "counts": layer("GELU", counting, count=0),
    "looks at values": layer("GELU", lambda _, x: by_erf(_, x) if float(x.detach().nansum()) < 1e300 else x),
    "holds a list": layer("GELU", by_erf, seen=[]),
    "holds a parameter": layer("GELU", by_erf, one=nn.Parameter(torch.ones(1))),
    "not of each element": layer("GELU", lambda _, x: torch.cat([by_erf(_, x[:-1]), x[-1:]])),
    "two inputs": layer("GELU", None),
    "in place, in secret": layer("Sigmoid", lambda _, x: x.sigmoid_()),
    "not in place, as it says": layer("GELU", by_erf, inplace=True),
    "fails": layer("GELU", lambda _, x: 1 / 0),
    "called otherwise": layer("GELU", by_erf),
}
type(OTHERS["called otherwise"]).__call__ = lambda self, x: 2 * by_erf(self, x)
type(OTHERS["two inputs"]).forward = lambda self, x, y: by_erf(self, x)


@pytest.mark.parametrize("name", OTHERS)
def test_what_computes_something_else_or_more_is_no_known_function(name):
    other = OTHERS[name]
    before = dict(vars(other))
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert function_of(other) is None
    assert vars(other) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    with pytest.raises(NothingToConvertError):
        convert(nn.Sequential(other), "regelu2")


def test_hooks_stay_and_are_not_run_on_numbers():
    ran = []
    exact = layer("Mine", by_erf)
    exact.register_forward_hook(lambda *_: ran.append(1))
    convert(model := nn.Sequential(exact))
    assert ran == []
    model(torch.ones(1))
    assert ran == [1]


def test_a_class_that_was_changed_since_is_told_anew():
    changed = layer("Mine", lambda self, x: x * torch.sigmoid(self.scale * x))
    for scale, known in ((1.0, nn.SiLU()), (1.702, timm_layers.QuickGELU())):
        type(changed).scale = scale
        found, expected = (convert(nn.Sequential(copy.copy(each))).module for each in (changed, known))
        assert torch.equal(gradient(found)[1], gradient(expected)[1])


@pytest.mark.parametrize(("base", "called"), [(nn.ELU, F.elu), (nn.GELU, F.gelu)])
def test_a_subclass_without_the_attributes_of_its_base_is_told_by_its_code(base, called):
    odd = layer("Odd", lambda _, x: called(x), base)
    vars(odd).pop("alpha" if base is nn.ELU else "approximate")
    for found, expected in zip(
        gradient(convert(nn.Sequential(odd)).module), gradient(convert(nn.Sequential(base())).module), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("around", [torch.device("meta"), FakeTensorMode(), torch.no_grad(), torch.inference_mode()])
def test_modes_of_the_caller_change_nothing(around):
    computed.points.cache_clear()
    exact = layer("Mine", by_erf)
    with around:
        assert function_of(exact).name == "gelu"


def test_what_is_not_asked_for_stays_and_so_do_its_calls():
    model = nn.Sequential(timm_layers.QuickGELU(), nn.ReLU())
    assert [site.path for site in convert(model, "fewbit:3,functions=relu/sigmoid").sites] == ["1"]
    with pytest.raises(NothingToConvertError, match="Sequential holds 1 QuickGELU"):
        convert(nn.Sequential(timm_layers.QuickGELU()), "fewbit:3,functions=relu")


def test_it_compiles():
    model = nn.Sequential(nn.Linear(8, 8), timm_layers.QuickGELU(), timm_layers.GELU(), nn.Linear(8, 8))
    convert(model)
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(x).square().sum().backward()
    assert isinstance(model[1], StepwiseActivation)
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradients)
