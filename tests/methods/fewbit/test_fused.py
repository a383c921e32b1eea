import functools

import pytest
import torch
from torch import nn

from actbench.methods.fewbit import piecewise, stepwise
from actbench.methods.fewbit.activations import function_of
from actbench.methods.fewbit.stepwise import StepwiseActivation, function_name
from actbench.methods.fewbit.tables import table


def layer(exact):
    steps = piecewise.relu() if isinstance(exact, nn.ReLU) else table(function_of(exact), 3)
    return StepwiseActivation(exact, steps, "layer")


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of the operators that take one pass."""
    seen = []

    def recording(place, name):
        plain = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *arguments: seen.append(name) or plain(*arguments))

    for place, name in ((stepwise, "activate"), (stepwise.mask, "relu"), (stepwise.mask, "relu_")):
        recording(place, name)
    return seen


@pytest.mark.parametrize(
    ("exact", "expected"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (nn.SiLU(inplace=True), None),
        (nn.ReLU(), "relu"),
        (nn.ReLU6(), None),
        (nn.Tanh(), None),
        (type("Mine", (nn.GELU,), {})(), None),
    ],
)
def test_what_operators_call_a_layers_function(exact, expected):
    assert function_name(exact) == expected


def test_layers_of_transformers_are_known_by_what_they_hold():
    activations = pytest.importorskip("transformers.activations")

    assert function_name(activations.GELUActivation()) == "gelu"
    assert function_name(activations.GELUActivation(use_gelu_python=True)) is None
    assert function_name(activations.GELUTanh()) == "gelu_tanh"
    assert function_name(activations.NewGELUActivation()) is None
    held = functools.partial(nn.functional.gelu, approximate="other")
    assert stepwise._gelu_held(held) is None


@pytest.mark.parametrize(
    ("exact", "operator"), [(nn.GELU(), "activate"), (nn.SiLU(), "activate"), (nn.ReLU(), "relu")], ids=repr
)
def test_a_contiguous_input_is_passed_over_once(exact, operator, calls):
    x = torch.randn(7, 33, requires_grad=True)
    y = layer(exact)(x)
    y.mul_(2)  # the output is no view, so it may be changed in place
    y.sum().backward()

    assert calls == [operator]
    assert torch.equal(y, 2 * exact(x))


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_relu_in_place_stays_in_place_with_an_exact_gradient(memory, calls):
    source = torch.randn(2, 3, 5, 7).to(memory_format=memory).requires_grad_()
    twin = source.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    x = source * 1
    y = layer(nn.ReLU(inplace=True))(x)
    expected = torch.relu(twin * 1)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)

    assert y.data_ptr() == x.data_ptr()
    assert calls == ["relu_"]
    assert torch.equal(y, expected)
    assert torch.equal(source.grad, twin.grad)
    assert source.grad.stride() == source.stride()


def test_relu_in_place_on_a_tensor_with_gaps(calls):
    source = torch.randn(4, 10, requires_grad=True)
    x = (source * 1)[:, ::2]
    y = layer(nn.ReLU(inplace=True))(x)
    y.sum().backward()

    assert calls == ["relu"]
    assert torch.equal(x, torch.relu(source[:, ::2]))
    assert torch.equal(source.grad[:, ::2], (source[:, ::2] > 0).float())


def test_what_backward_saw_overwritten_is_an_error():
    source = torch.randn(8, requires_grad=True)
    x = source * 1
    square = x * x  # keeps x
    layer(nn.ReLU(inplace=True))(x)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
