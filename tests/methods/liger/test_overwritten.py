"""Which tensors Liger's functions overwrite, and which they leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.methods.liger import gradients
from actbench.methods.liger.functions import RmsNorm, Rotary, SiluMul


def spied(x: Tensor, apply: Callable[[Tensor], Tensor], rest: Callable[[Tensor], Tensor]) -> bool:
    """Return whether the gradient that the function got is the memory of the one that it returned."""
    places: list[int] = []
    x.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    y = apply(x)
    y.grad_fn.register_prehook(lambda given: places.append(given[0].data_ptr()))
    rest(y).sum().backward()
    return places[0] == places[1]


def normed(x: Tensor) -> Tensor:
    return RmsNorm.apply(x, torch.ones(4), 1e-6, lambda x: F.rms_norm(x, (4,), eps=1e-6))


@pytest.mark.parametrize(
    ("rest", "in_place"),
    [
        (nn.Linear(4, 4), True),
        (lambda y: nn.Linear(4, 4)(y.view(-1, 4)), True),
        (lambda y: y, False),  # an expanded gradient
    ],
)
def test_a_gradient_is_overwritten_if_nobody_else_reads_it(rest: Any, in_place: bool) -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)

    assert spied(x * 2, normed, rest) == in_place


@pytest.mark.parametrize("limit", [8, 1])
def test_a_gradient_is_overwritten_after_a_backward_pass_in_compiled_code(limit: int) -> None:
    """Beyond the limit, torch.compile runs Python's functions as they are, and each call counts its arguments twice."""

    @torch.compile(backend="eager")
    def step(y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        y.sum().backward()
        return y + 1

    torch.compiler.reset()
    gradients._usual.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=limit):
        for rest in (lambda y: y, nn.Linear(4, 4), nn.Linear(4, 4)):
            step(rest(normed(torch.randn(2, 3, 4, requires_grad=True) * 2)))

    assert spied(torch.randn(2, 3, 4, requires_grad=True) * 2, normed, nn.Linear(4, 4))


def test_a_gradient_is_overwritten_after_an_error_of_torch_compile() -> None:
    """The error leaves torch's evaluator of frames in place, and calls hold their arguments once more from then on."""

    @torch.compile(backend="eager", fullgraph=True)
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken(torch.ones(2))

    assert spied(torch.randn(2, 3, 4, requires_grad=True) * 2, normed, nn.Linear(4, 4))


def test_a_gradient_that_a_residual_path_or_a_hook_reads_is_not() -> None:
    layer = nn.Linear(4, 4)

    def run(norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 3, 4, requires_grad=True)
        kept: list[Tensor] = []
        residual = x * 2
        y = norm(residual)
        y.register_hook(kept.append)
        layer(torch.tanh(residual + y)).square().sum().backward()
        assert x.grad is not None
        return x.grad, kept[0]

    torch.testing.assert_close(run(normed), run(lambda x: F.rms_norm(x, (4,), eps=1e-6)))


def test_a_gradient_that_a_hook_keeps_before_a_view_is_not() -> None:
    layer = nn.Linear(4, 4)

    def kept_of(norm: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        kept: list[Tensor] = []
        flat = norm(torch.randn(2, 3, 4, requires_grad=True) * 1).view(-1, 4)
        flat.register_hook(kept.append)
        layer(flat).square().sum().backward()
        return kept[0]

    torch.testing.assert_close(kept_of(normed), kept_of(lambda x: F.rms_norm(x, (4,), eps=1e-6)))


def test_queries_and_keys_are_turned_in_place_and_so_are_their_gradients() -> None:
    torch.manual_seed(0)
    cos, sin = (each(torch.randn(1, 5, 4)).repeat(1, 1, 2) for each in (torch.cos, torch.sin))
    made = torch.randn(2, 5, 3 * 8, requires_grad=True)
    flat = made * 1
    q = flat.view(2, 5, 3, 8).transpose(1, 2)
    k = (made * 2)[..., :16].view(2, 5, 2, 8).transpose(1, 2)
    turned, _ = Rotary.apply(q, k, cos, sin)

    assert turned.data_ptr() == flat.data_ptr()
    first, second = made.detach().view(2, 5, 3, 8).transpose(1, 2).chunk(2, -1)
    x = torch.cat((first, second), -1)
    torch.testing.assert_close(turned, x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1))


def test_what_was_saved_before_it_is_overwritten_is_an_error() -> None:
    gate = torch.randn(3, 4, requires_grad=True) * 1
    other = gate.square()
    product = SiluMul.apply(gate, torch.randn(3, 4, requires_grad=True) * 1)
    product.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


def test_a_gradient_that_lies_otherwise_in_memory_is_copied_once() -> None:
    cos, sin = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    q, k = (torch.randn(2, 5, 3, 8, requires_grad=True) for _ in "qk")
    turned = Rotary.apply(*((each * 1).transpose(1, 2) for each in (q, k)), cos, sin)
    kept: list[Tensor] = []
    for each in turned:
        each.register_hook(kept.append)
    with Copies() as copies:
        torch.autograd.backward(turned, [torch.ones(2, 3, 5, 8), torch.ones(2, 3, 5, 8)])

    assert all(torch.equal(each, torch.ones(2, 3, 5, 8)) for each in kept)
    assert copies.sizes.count(2 * 3 * 5 * 8) == 2


class Copies(TorchDispatchMode):
    """Notes the sizes of all tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FakeTensorMode, contextlib.nullcontext])
def test_a_norm_with_a_wider_weight_returns_the_type_of_its_input(mode: Any) -> None:
    """As Liger's kernel; torch returns that of the product with the weight."""
    with mode():
        x = torch.ones(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(4, requires_grad=True)
        y = RmsNorm.apply(x, weight, 1e-6, lambda x: x * weight)
        y.sum().backward()

    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
