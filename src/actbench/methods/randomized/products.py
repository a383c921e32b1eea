"""Products of two activations, such as those of attention, that save sampled rows and columns of their factors."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from actbench.methods.actnn.layers.layers import small_codes
from actbench.methods.randomized.ops.sketch import Sketching
from actbench.methods.randomized.ops.sketch.samples import number_type, winner_take_all, working_type
from actbench.ops.noise import fresh_seed
from actbench.packing import savedtensors
from actbench.packing.precision import no_autocast, product_dtype
from actbench.packing.refusals import first_order
from actbench.packing.wrapped import Inner, Intercepted, Rules, WrappedForward, Wrapper, checkpoint_hook

PRODUCTS = (
    "a model whose products of activations are sampled",
    "they are intercepted where the model calls them, which no compiled graph does",
)
"""What cannot be compiled, and why."""


class SampledProduct(torch.autograd.Function):
    """A B for (..., n, d) and (..., d, m); the gradient of each is estimated from samples of the other.

    The gradient of A sums over the columns of B, and that of B over the rows of A. So columns of B and rows of A are
    sampled, each pair of matrices by itself.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, sketching: Sketching) -> Tensor:
        """Return the exact product; save k columns of B and k rows of A with their numbers, where they are needed."""
        for_a = _sample(b.mT, sketching) if ctx.needs_input_grad[0] else (None, None)
        for_b = _sample(a, sketching) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*for_a, *for_b)
        with no_autocast(a):
            return torch.matmul(a, b)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the estimates."""
        columns, columns_at, rows, rows_at = ctx.saved_tensors
        for_a = for_b = None
        with no_autocast(grad):
            if columns is not None:
                for_a = _taken(grad.mT, columns_at).mT @ columns
            if rows is not None:
                for_b = rows.mT @ _taken(grad, rows_at)
        return for_a, for_b, None


def _sample(matrix: Tensor, sketching: Sketching) -> tuple[Tensor, Tensor | None]:
    """Return k weighted rows of each matrix (..., n, d), and their numbers; all rows and None where k is not below n.

    They take ``k d s + 4 k`` bytes a matrix for elements of s bytes.
    """
    count = matrix.shape[-2]
    size = sketching.size(count)
    if size >= count:
        return matrix, None
    norms = torch.linalg.vector_norm(matrix, dim=-1, dtype=working_type(matrix)).double()
    chosen, weights = winner_take_all(norms, fresh_seed(norms), size)
    numbers = chosen.to(number_type(count))
    rows = _taken(matrix, chosen).mul_(weights[..., None])
    savedtensors.packed(matrix, rows, numbers, closed_form=lambda: rows.numel() * rows.itemsize + 4 * numbers.numel())
    return rows, numbers


def _taken(matrix: Tensor, numbers: Tensor | None) -> Tensor:
    """Return the rows of each matrix (..., n, d) with these numbers, (..., k, d)."""
    if numbers is None:
        return matrix
    return matrix.gather(-2, numbers.long()[..., None].expand(*numbers.shape, matrix.shape[-1]))


_OF_BATCHES = (torch.bmm, Tensor.bmm)


def sampled_product(sketching: Sketching, exact: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
    """Return the product, sampled if both factors are batches of as many matrices; else by torch's own function."""
    names = ("input", "mat2" if exact in _OF_BATCHES else "other")[len(args) :]
    factors = [*args, *(named.get(name) for name in names)]
    if set(named) != set(names) or not _are_batches(*factors) or (exact in _OF_BATCHES and factors[0].dim() != 3):
        return exact(*args, **named)
    dtype = product_dtype(factors[0])
    output: Tensor = SampledProduct.apply(*(factor.to(dtype) for factor in factors), sketching)
    return output


def _are_batches(*factors: Any) -> bool:
    """Return whether these are two batches of as many matrices, which torch multiplies and a gradient is needed of."""
    if len(factors) != 2 or not all(isinstance(factor, Tensor) for factor in factors):
        return False
    a, b = factors
    if not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return False
    if not (a.is_floating_point() and b.is_floating_point() and product_dtype(a) == product_dtype(b)):
        return False
    return a.dim() == b.dim() > 2 and a.shape[:-2] == b.shape[:-2] and not (_is_held(a) or _is_held(b))


def _is_held(x: Tensor) -> bool:
    # what is multiplied by a weight, or a view of one, is a linear layer
    return (
        isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or not x.numel() or x.layout != torch.strided
    )


_entered: ContextVar[Any] = ContextVar("_entered", default=False)
"""The checkpoint's hook, or None, around the innermost module that samples products; False outside of all."""


class SamplingProducts(Wrapper):
    """Wraps the passes through a model: products are sampled, ReLU, dropout and pools save exact small codes.

    A module that runs again in the backward pass is wrapped again, and each module inside a checkpoint by itself.
    Products in the checkpointed function's own code are left alone in both runs.
    """

    uncompilable = PRODUCTS

    def __init__(self, sketching: Sketching) -> None:
        self.sketching = sketching

    def begins_inside(self) -> bool:
        """Return whether no module around a module that is called now is wrapped, within the same checkpoint."""
        return _entered.get() is not checkpoint_hook()

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Run a pass, or a module of one."""
        around = checkpoint_hook()
        token = _entered.set(around)
        functions = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
        rules: Rules = {**small_codes(), **{each: partial(sampled_product, self.sketching, each) for each in functions}}
        try:
            with Intercepted(rules, only_if=lambda: checkpoint_hook() is around):
                return inner(module, *args, **kwargs)
        finally:
            _entered.reset(token)


class SamplingForward(WrappedForward):
    """The forward of a model whose products of activations are sampled."""

    wrapper: SamplingProducts

    def __init__(self, module: nn.Module, sketching: Sketching) -> None:
        super().__init__(module)
        self.wrapper = SamplingProducts(sketching)
