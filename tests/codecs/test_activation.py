import numpy as np
import pytest
import torch
from torch.nn import functional as F

from actbench.codecs.activation import ACTIVATIONS

EXACT = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_is_what_autograd_computes(name):
    x = torch.linspace(-30, 30, 4001, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(EXACT[name](x).sum(), x)
    ours = ACTIVATIONS[name].derivative(x.detach().numpy())
    assert np.abs(ours - expected.numpy()).max() < 1e-13
    assert np.isfinite(ACTIVATIONS[name].derivative(np.array([-1e4, -100.0, 100.0, 1e4]))).all()
