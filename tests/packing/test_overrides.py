import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from actbench.methods.actnn.layers.layers import small_codes
from actbench.packing.wrapped import Intercepted

X = torch.linspace(-3, 3, 2 * 4 * 6 * 6).view(2, 4, 6, 6)

CALLS = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "torch.relu": torch.relu,
    "torch.relu by name": lambda x: torch.relu(input=x),
    "torch.relu_": torch.relu_,
    "Tensor.relu": lambda x: x.relu(),
    "Tensor.relu_": lambda x: x.relu_(),
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU in place": nn.ReLU(inplace=True),
    "F.leaky_relu": F.leaky_relu,
    "F.leaky_relu_": lambda x: F.leaky_relu_(x, 0.2),
    "nn.ReLU6": nn.ReLU6(),
    "F.hardtanh_": F.hardtanh_,
    "F.hardsigmoid": F.hardsigmoid,
    "F.hardshrink": F.hardshrink,
    "Tensor.hardshrink": lambda x: x.hardshrink(0.3),
    "F.softshrink": F.softshrink,
    "F.threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "torch.threshold": lambda x: torch.threshold(x, 0.1, 2.0),
    "F.dropout": F.dropout,
    "torch.dropout": lambda x: torch.dropout(x, 0.3, train=True),
    "torch.dropout_": lambda x: torch.dropout_(x, 0.3, True),
    "nn.Dropout": nn.Dropout(0.3, inplace=True),
    "nn.Dropout2d": nn.Dropout2d(),
    "nn.Dropout1d": lambda x: nn.Dropout1d()(x.flatten(2)),
    "nn.Dropout3d": lambda x: nn.Dropout3d()(x[None]),
    "F.max_pool2d": lambda x: F.max_pool2d(x, 2),
    "F.max_pool2d, all by place": lambda x: F.max_pool2d(x, 2, 1, 0, 1, True, False),
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, (2, 3), stride=1),
    "nn.MaxPool2d": nn.MaxPool2d(3, 2, 1),
    "nn.MaxPool1d": lambda x: nn.MaxPool1d(3)(x.flatten(2)),
    "nn.MaxPool3d": nn.MaxPool3d(2),
    "F.avg_pool2d": lambda x: F.avg_pool2d(x, kernel_size=2),
    "nn.AvgPool2d": nn.AvgPool2d(2, divisor_override=3),
    "nn.AvgPool1d": lambda x: nn.AvgPool1d(2)(x.flatten(2)),
    "nn.AvgPool3d": nn.AvgPool3d(2),
    "nn.AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d((2, None)),
    "F.adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 5),
}
KEEPS_LEVELS = ("leaky", "ReLU6", "hard", "soft", "threshold")


def run(function):
    """Return output, gradient and what is saved."""
    leaf, kept = X.clone().requires_grad_(), []
    torch.manual_seed(0)
    start = leaf * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = function(start)
    return y, torch.autograd.grad(y.square().sum(), leaf)[0], kept


@pytest.mark.parametrize("name", CALLS)
def test_a_function_is_replaced_under_each_of_its_names(name):
    expected, expected_gradient, exact_kept = run(CALLS[name])
    with Intercepted(small_codes()):
        y, gradient, kept = run(CALLS[name])

    assert torch.equal(y, expected)
    assert torch.equal(gradient, expected_gradient)
    assert any(t.is_floating_point() for t in exact_kept)
    assert [t for t in kept if t.dtype != torch.uint8 and t.numel() != 2] == []
    assert any(t.numel() == 2 for t in kept) == any(part in name for part in KEEPS_LEVELS)


def counting(calls):
    def relu(x, inplace=False):
        calls.append("relu")
        return F.relu(torch.relu(x), inplace)

    return Intercepted({F.relu: relu, torch.relu: relu, torch.Tensor.relu: relu})


def test_a_layer_that_calls_a_function_that_calls_another_is_replaced_once():
    calls = []
    with counting(calls):
        nn.ReLU()(X)
    assert calls == ["relu"]


def test_inside_of_a_replacement_no_mode_is_on():
    outer, inner = [], []
    with counting(outer), counting(inner):
        F.relu(X)
    assert (outer, inner) == ([], ["relu"])


def test_other_functions_pass_with_their_arguments():
    with Intercepted(small_codes()):
        assert torch.equal(F.softmax(X, dim=1), torch.softmax(X, 1))
        assert torch.equal(torch.zeros(3), X.new_zeros(size=(3,)))
        y, indices = F.max_pool2d(X.clone().requires_grad_(), 2, return_indices=True)
    assert (y.shape, indices.dtype) == ((2, 4, 3, 3), torch.int64)


def test_alpha_dropout_and_gelu_are_left_alone():
    rules = small_codes()
    with Intercepted(rules):
        _, _, kept = run(lambda x: F.gelu(F.alpha_dropout(x, 0.5, True)))
    assert all(t.dtype in (torch.float32, torch.bool) for t in kept)
    assert F.gelu not in rules
    assert F.softmax not in rules


def test_an_exception_leaves_nothing_behind():
    calls = []

    def failing(x, inplace=False):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), counting(calls), Intercepted({F.relu: failing}):
        F.relu(X)
    F.relu(X)
    assert calls == []
    assert torch.overrides._len_torch_function_stack() == 0
    with counting(calls):
        F.relu(X)
    assert calls == ["relu"]


def test_one_object_may_be_entered_again():
    calls = []
    mode = counting(calls)
    with mode:
        with mode:
            F.relu(X)
        F.relu(X)
    F.relu(X)
    assert calls == ["relu", "relu"]


def test_a_thread_sees_only_what_it_entered_itself():
    calls, other_calls = [], []
    mode, seen = counting(calls), threading.Barrier(2)

    def other():
        seen.wait(10)
        F.relu(X)
        with counting(other_calls), mode:
            F.relu(X)
        with counting(other_calls):
            F.relu(X)

    thread = threading.Thread(target=other)
    thread.start()
    with mode:
        seen.wait(10)
        thread.join()
    assert (calls, other_calls) == (["relu"], ["relu"])


def test_a_subclass_with_functions_of_its_own_keeps_them():
    class Mine(torch.Tensor):
        pass

    calls = []
    with counting(calls):
        assert type(F.relu(X.as_subclass(Mine))) is Mine
        F.relu(nn.Parameter(X))
    assert calls == ["relu"]


def test_recomputation_runs_under_the_mode_that_it_is_given():
    def recomputed(x):
        contexts = lambda: (Intercepted(small_codes()), Intercepted(small_codes()))  # noqa: E731
        return checkpoint(lambda x: F.relu(x * 2), x, use_reentrant=False, context_fn=contexts)

    with Intercepted(small_codes()):
        leaf = X.clone().requires_grad_()
        y = recomputed(leaf)
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.equal(gradient, 2 * (X > 0).float())
