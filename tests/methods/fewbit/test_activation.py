import numpy as np
import pytest
import torch
from torch.nn import functional as F

from actbench.errors import UsageError
from actbench.methods.fewbit.activation import ACTIVATIONS, activation

EXACT = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    **{name: getattr(F, name) for name in ACTIVATIONS if name not in ("gelu", "gelu_tanh", "quick_gelu")},
}
CHANGED = [("elu", {"alpha": 0.5}), ("celu", {"alpha": 2.5}), ("softplus", {"beta": 3.0, "threshold": 4.0})]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_is_what_autograd_computes(name):
    x = torch.linspace(-30, 30, 4001, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(EXACT[name](x).sum(), x)
    ours = ACTIVATIONS[name].derivative(x.detach().numpy())
    assert np.abs(ours - expected.numpy()).max() < 1e-13  # the kinks of hardswish are not on this grid
    assert np.isfinite(ACTIVATIONS[name].derivative(np.array([-1e4, -100.0, 100.0, 1e4]))).all()


@pytest.mark.parametrize(("name", "parameters"), CHANGED)
def test_parameters_are_those_of_torch(name, parameters):
    x = torch.linspace(-30, 30, 4001, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(EXACT[name](x, **parameters).sum(), x)
    ours = activation(name, **parameters).derivative(x.detach().numpy())
    assert np.abs(ours - expected.numpy()).max() < 1e-13


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_even_says_whether_the_derivative_is(name):
    x = np.linspace(0.01, 20, 999)
    derivative = ACTIVATIONS[name].derivative
    assert np.allclose(derivative(x), derivative(-x), atol=1e-12) == ACTIVATIONS[name].even


def test_default_parameters_are_the_default_function():
    assert activation("elu", alpha=1) is ACTIVATIONS["elu"]
    assert activation("elu", alpha=2) is activation("elu", alpha=2.0)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gelo", {}, "no table"),
        ("gelu", {"alpha": 1}, "has none"),
        ("celu", {"alpha": 0}, "celu with alpha=0"),
        ("softplus", {"beta": -1}, "softplus with beta=-1"),
        ("elu", {"alpha": float("nan")}, "elu with alpha=nan"),
    ],
)
def test_what_has_no_table_is_refused(name, parameters, message):
    with pytest.raises(UsageError, match=message):
        activation(name, **parameters)
