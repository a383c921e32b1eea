"""What Liger's kernels save and write, as autograd functions: by the kernels on CUDA, by torch elsewhere.

On fake tensors one operator without temporaries stands for each kernel. On a CPU torch computes some rows at a time, so
that its temporaries are small too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from actbench.errors import MeasurementError
from actbench.methods.liger.gradients import is_ours
from actbench.ops.simulation import one_kernel, runs_triton
from actbench.packing import savedtensors
from actbench.packing.precision import cast, no_autocast, wide
from actbench.packing.refusals import first_order

_BLOCK = 1 << 15
"""Elements that torch computes at once."""
_SELECTIVE = _CachingTorchDispatchMode, _CachedTorchDispatchMode
"""The modes of torch's selective checkpointing, in the forward pass and as it recomputes."""


def kernels(name: str) -> Any:
    """Return a module of ``liger_kernel.ops``; raise a MeasurementError if Liger is not installed."""
    try:
        return importlib.import_module(f"liger_kernel.ops.{name}")
    except ImportError as error:
        raise MeasurementError(f'liger needs liger-kernel on CUDA: pip install "actbench[liger]" ({error})') from None


def _blocks(x: Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK // max(1, x[0].numel())) if len(x) else 1
    return (slice(first, first + size) for first in range(0, len(x), size))


class RmsNorm(torch.autograd.Function):
    """RMS norm that saves its input and, for each row, 1 / root of the mean square, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, exact: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``exact(x)``, computed for some rows at a time, or the kernel's result for x.

        The result has the type of x, as the kernel's has, also where the weight has a wider one.
        """
        rows = x.reshape(-1, x.shape[-1]).contiguous()  # the kernel takes the numbers of a row to lie together
        y: Tensor
        ctx.kernel = None
        if runs_triton(x):
            y, rows, rstd, *ctx.kernel = kernels("rms_norm").rms_norm_forward(rows, weight, eps, 0.0, "llama", None)
        else:
            y = torch.empty_like(rows)
            rstd = rows.new_empty(len(rows), dtype=wide(x.dtype))
            if isinstance(x, FakeTensor):
                one_kernel([y, rstd], [rows])
            else:
                for some in _blocks(rows):
                    y[some] = exact(rows[some])
                    square = rows[some].to(rstd.dtype).square().mean(-1)
                    rstd[some] = square.add_(eps).rsqrt_()
        savedtensors.packed(x, rstd)
        ctx.save_for_backward(x, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and weight; that of the input in place of the given one, if that is not read again."""
        ours = is_ours(gradient) or not gradient.is_contiguous()  # which is copied
        x, weight, rstd = ctx.saved_tensors
        rows, dy = (each.reshape(-1, each.shape[-1]).contiguous() for each in (x, gradient))
        needs_weight = weight is not None and ctx.needs_input_grad[1]
        if ctx.kernel is not None:
            block, warps, mode = ctx.kernel
            dx, dw = kernels("rms_norm").rms_norm_backward(
                dy, rows, weight, rstd, 0.0, mode, block, warps, ours, None, needs_weight
            )
            return dx.view(x.shape), dw, None, None
        dx = dy if ours and dy.dtype == x.dtype else torch.empty_like(rows)
        dw = rstd.new_zeros(rows.shape[1]) if needs_weight else None
        if isinstance(x, FakeTensor):
            one_kernel([dx, *([] if dw is None else [dw])], [rows, dy, rstd])
        else:
            for some in _blocks(rows):
                _norm_slopes(dx[some], dw, rows[some], dy[some], cast(weight, rstd.dtype), rstd[some])
        return dx.view(x.shape), None if dw is None else dw.to(weight.dtype), None, None


def _norm_slopes(dx: Tensor, dw: Tensor | None, x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor) -> None:
    """Write the gradient of some rows, and add that of the weight."""
    slopes, normed = dy.to(rstd.dtype), x.to(rstd.dtype) * rstd[:, None]
    if dw is not None:
        dw += (slopes * normed).sum(0)
    slopes = slopes if weight is None else slopes * weight
    along = (slopes * normed).mean(-1, keepdim=True)
    dx.copy_((slopes - normed * along) * rstd[:, None])


class SiluMul(torch.autograd.Function):
    """The product silu(gate) up, which saves gate and up alone; the backward pass writes their gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return the product."""
        ctx.by_kernel = runs_triton(gate)
        savedtensors.acted(None)
        ctx.save_for_backward(gate, up)
        if ctx.by_kernel:
            product: Tensor = kernels("swiglu").swiglu_forward(gate.contiguous(), up.contiguous())[2]
            return product
        return F.silu(gate).mul_(up)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up; in other memory, if the graph is kept for one more pass."""
        gate, up = (each.detach().contiguous() for each in ctx.saved_tensors)
        if torch._C._autograd._get_current_graph_task_keep_graph():
            gate, up = gate.clone(), up.clone()
        gradient = gradient.contiguous()
        if ctx.by_kernel:
            to_gate, to_up = kernels("swiglu").swiglu_backward(gate, up, gradient)
            return to_gate, to_up
        if isinstance(gate, FakeTensor):
            one_kernel([gate, up], [gradient])
            return gate, up
        flat = [each.reshape(-1, each.shape[-1]) for each in (gate, up, gradient)]
        for some in _blocks(flat[0]):
            g, u, d = (each[some].to(wide(each.dtype)) for each in flat)
            sigmoid = torch.sigmoid(g)
            to_gate = d * u * sigmoid * (1 + g * (1 - sigmoid))  # before u is overwritten
            flat[1][some] = d * g * sigmoid
            flat[0][some] = to_gate
        return gate, up


class Rotary(torch.autograd.Function):
    """Rotary embedding of queries and keys, in place of them, which saves cosine and sine alone."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return (batch, heads, positions, width) of both; cos and sin are (batch, positions, width)."""
        ctx.by_kernel = runs_triton(q)
        savedtensors.acted(None)
        ctx.save_for_backward(cos, sin)
        if any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack()):
            q, k = q.clone(), k.clone()  # a result that torch keeps and gives again is not to be turned
        if ctx.by_kernel:
            return kernels("rope").rope_forward(q, k, cos, sin)[:2]  # type: ignore[no-any-return]
        return _rotated(q.detach(), cos, sin), _rotated(k.detach(), cos, sin)

    @staticmethod
    @first_order
    def backward(ctx: Any, to_q: Tensor, to_k: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries and keys, in place of those given, where those are not read again."""
        ours = is_ours(to_q), is_ours(to_k)
        cos, sin = ctx.saved_tensors
        to_q, to_k = (
            each if free or not each.transpose(1, 2).is_contiguous() else each.clone()  # others are copied anyway
            for each, free in zip((to_q, to_k), ours, strict=True)
        )
        if ctx.by_kernel:
            return *kernels("rope").rope_backward(to_q, to_k, cos, sin), None, None
        return _rotated(to_q, cos, sin, back=True), _rotated(to_k, cos, sin, back=True), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads, (batch, heads, positions, width), turned by their positions, in memory of their own."""
    return _rotated(x.clone(), cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Return heads turned by their positions, or turned back; in place if they lie in memory as a linear layer's."""
    at = x.transpose(1, 2).contiguous()  # (batch, positions, heads, width); the same memory, or a copy
    if isinstance(x, FakeTensor):
        one_kernel([at], [cos, sin])
        return at.transpose(1, 2)
    with no_autocast(x):
        cos, sin = (each.expand(len(at), -1, -1).unsqueeze(2) for each in (cos, sin))
        for row in range(len(at)):
            for some in _blocks(at[row]):
                _turn(at[row][some], cos[row][some], sin[row][some], back=back)
    return at.transpose(1, 2)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> None:
    if back:
        x.copy_(x * cos - _half_turned(x * sin))
    else:
        x.copy_((x * cos) + (_half_turned(x) * sin))


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
