import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.methods.fewbit import piecewise
from actbench.methods.fewbit.activations import function_of
from actbench.methods.fewbit.stepwise import StepwiseActivation
from actbench.methods.fewbit.tables import table

EXACT = (nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.ReLU())


class Watching(TorchDispatchMode):
    """Note our operators that go by."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "actbench":
            self.seen.append(function._schema.name.removeprefix("actbench::"))
        return function(*arguments, **(keywords or {}))


def layer(exact):
    steps = piecewise.relu() if isinstance(exact, nn.ReLU) else table(function_of(exact), 3)
    return StepwiseActivation(exact, steps, "layer")


def gradient(y, x, grad):
    (found,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exact", EXACT, ids=repr)
def test_output_and_gradient_are_those_of_the_operators(exact, dtype):
    module = layer(exact)
    x, grad = 3 * torch.randn(2, 7, 1031).to(dtype), torch.randn(2, 7, 1031).to(dtype)
    x.requires_grad_()
    y = module(x)
    with Watching() as watched:
        through = module(x)
        expected = gradient(through, x, grad)

    assert len(watched.seen) == 2
    assert torch.equal(y, through)
    assert torch.equal(gradient(y, x, grad), expected)


@pytest.mark.parametrize("exact", EXACT, ids=repr)
def test_whoever_watches_the_backward_pass_sees_an_operator(exact):
    x = torch.randn(64, requires_grad=True)
    y = layer(exact)(x)
    with Watching() as watched:
        gradient(y, x, torch.ones(64))

    assert watched.seen == ["mask_select" if isinstance(exact, nn.ReLU) else "stepwise_decode"]


@pytest.mark.parametrize(
    "x",
    [torch.randn(6, 4).t(), torch.randn(3, 4, dtype=torch.float64), torch.randn(8)[::2]],
    ids=["transposed", "float64", "gaps"],
)
def test_what_kernels_cannot_read_is_torchs_too(x):
    x = x.detach().requires_grad_()
    y = layer(nn.GELU())(x)

    assert torch.equal(y, nn.functional.gelu(x))


@pytest.mark.parametrize("exact", EXACT, ids=repr)
def test_a_gradient_that_is_not_contiguous(exact):
    x, grad = torch.randn(6, 5, requires_grad=True), torch.randn(5, 6).t()
    y = layer(exact)(x)

    assert torch.equal(gradient(y, x, grad), gradient(y, x, grad.contiguous()))


@pytest.mark.parametrize("exact", EXACT, ids=repr)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_used_layer_can_be_copied(copied, exact):
    module = layer(exact)
    x = torch.randn(100, requires_grad=True)
    y = module(x)
    again = copied(module)(x)

    assert torch.equal(gradient(again, x, torch.ones(100)), gradient(y, x, torch.ones(100)))


@pytest.mark.parametrize(
    ("unpack", "message"),
    [
        (lambda kept: kept[:-1], "packed must have {} bytes, found {}"),
        (lambda kept: kept.half(), "packed must be contiguous uint8"),
        (lambda kept: kept.repeat_interleave(2)[::2], "packed must be contiguous uint8"),
    ],
)
@pytest.mark.parametrize(("exact", "count"), [(nn.GELU(), 64 * 3 // 8), (nn.ReLU(), 64 // 8)], ids=repr)
def test_codes_that_come_back_in_another_form_are_refused(unpack, message, exact, count):
    x = torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: kept, lambda kept: unpack(kept) if kept.dtype == torch.uint8 else kept
    ):
        y = layer(exact)(x)

    with pytest.raises(ValueError, match=message.format(count, count - 1)):
        y.sum().backward()


@pytest.mark.parametrize("exact", EXACT, ids=repr)
def test_many_gradients_at_once(exact):
    x, grads = torch.randn(40, requires_grad=True), torch.randn(3, 40)
    y = layer(exact)(x)
    (found,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)

    assert torch.equal(found, torch.stack([gradient(y, x, grad) for grad in grads]))


def test_values_that_memory_does_not_hold():
    z = torch.complex(torch.ones(1), torch.full((1,), 2.0)).requires_grad_()
    negative = z.conj().imag

    assert negative.is_neg()
    assert torch.equal(layer(nn.ReLU())(negative), torch.zeros(1))

    x = torch.full((1,), 1.5, requires_grad=True)
    turned = torch.complex(torch.zeros(1), layer(nn.ReLU())(x)).conj() * torch.tensor([2 + 3j])
    (found,) = torch.autograd.grad(turned.real.sum(), x)
    assert torch.equal(found, torch.full((1,), 3.0))


def test_a_first_use_in_inference_mode_spoils_nothing():
    module, x = layer(nn.GELU()), torch.randn(8, requires_grad=True)
    with torch.inference_mode(), torch.enable_grad(), contextlib.suppress(RuntimeError):
        module(x)
    module(x).sum().backward()

    assert x.grad is not None


@pytest.mark.parametrize("exact", [nn.GELU(), nn.ReLU()], ids=repr)
def test_a_backward_pass_that_is_compiled_alone(exact):
    x, grad = torch.randn(64, requires_grad=True), torch.randn(64)
    y = layer(exact)(x)
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        (found,) = torch.autograd.grad(y, x, grad, retain_graph=True)

    assert torch.equal(found, gradient(y, x, grad))


@pytest.mark.parametrize("exact", [nn.GELU(), nn.ReLU()], ids=repr)
def test_what_is_compiled_has_the_same_gradient(exact):
    module, x = layer(exact), torch.randn(64, requires_grad=True)
    expected = gradient(module(x), x, torch.ones(64))
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")

    assert torch.equal(gradient(compiled(x), x, torch.ones(64)), expected)


@pytest.mark.parametrize("exact", EXACT, ids=repr)
def test_a_second_derivative_is_refused(exact):
    x = torch.randn(40, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(layer(exact)(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("exact", [nn.GELU(), nn.ReLU()], ids=repr)
def test_codes_without_memory_are_not_read(exact):
    mode, x = FakeTensorMode(), torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: kept, lambda kept: mode.from_tensor(kept) if kept.dtype == torch.uint8 else kept
    ):
        y = layer(exact)(x)

    with pytest.raises(AssertionError, match="FakeTensorMode"):
        y.sum().backward()
