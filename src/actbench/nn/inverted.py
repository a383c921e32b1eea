"""Activation layers that keep their output, which the next layer keeps anyway, and a bit for the branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from actbench import savedtensors
from actbench.codecs.gated import Inversion
from actbench.nn.firstorder import first_order
from actbench.nn.layout import as_it_lay, constants, in_order, memory_order
from actbench.nn.standin import carry_hooks, without_hooks
from actbench.ops.stepwise import decode, encode

_CHUNK = 1 << 18  # elements whose derivative is found at a time, a multiple of 8


class InvertedGradient(torch.autograd.Function):
    """An exact activation whose derivative is found in backward from its output and the branch of its input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exact: Callable[[Tensor], Tensor], turn: Tensor, slopes: Tensor, inversion: Inversion
    ) -> Tensor:
        """Return ``exact(x)``; keep it, the packed bits ``x > turn``, and the slopes, which belong to the layer."""
        ctx.inversion, ctx.order = inversion, memory_order(x)
        bits = encode(in_order(x, ctx.order), turn, 1, False)
        savedtensors.packed(x, bits)
        if getattr(exact, "inplace", False):
            ctx.mark_dirty(x)
            exact(x)
            y = x  # and not what exact returns, in which torch.compile does not know the marked tensor again
        else:
            y = exact(x)
        ctx.save_for_backward(bits, y, slopes)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient times the derivative at the input that the output came from."""
        bits, y, slopes = ctx.saved_tensors
        ordered = in_order(grad, ctx.order)
        product = torch.empty_like(ordered)
        flat, outputs = ordered.reshape(-1), in_order(y, ctx.order).reshape(-1)
        chunk = max(len(flat), 1) if torch.compiler.is_compiling() else _CHUNK
        for start in range(0, len(flat), chunk):
            part = slice(start, min(start + chunk, len(flat)))
            right = bits[start // 8 : (part.stop + 7) // 8]
            slope = _derivative(outputs[part], right, slopes, ctx.inversion)
            product.view(-1)[part] = flat[part] * slope
        return as_it_lay(product, ctx.order).to(y.dtype), None, None, None, None


def _derivative(y: Tensor, bits: Tensor, slopes: Tensor, inversion: Inversion) -> Tensor:
    """Return the derivative at the x with ``f(x) = y`` on the side of the minimum that the bit says.

    Args:
        y: ``(n,)``.
        bits: Packed, 1 to the right of the minimum.
        slopes: The left and the right branch of the inversion, float32 ``(2, cells + 1)``.
        inversion: What the slopes are of.
    """
    wide = y if y.dtype == torch.float64 else y.float()
    ends = torch.tensor([0.0, 1.0], dtype=torch.float32, device=y.device)
    right = decode(bits, ends, torch.ones_like(wide), 1)
    ratio = (wide / inversion.least).clamp(0, 1)
    on_left = 1 - (ratio / (1 + (1 - ratio).sqrt())).sqrt()
    on_right = (wide - inversion.least).clamp(min=0).sqrt() / inversion.reach
    cells = slopes.shape[1] - 1
    place = torch.where(right > 0, on_right, on_left).nan_to_num(0.0).clamp(0, 1) * cells
    cell = place.floor().clamp(max=cells - 1)
    index = (cell + right * (cells + 1)).long()
    flat = slopes.reshape(-1).to(wide.dtype)
    slope = torch.lerp(flat[index], flat[index + 1], place - cell)
    return torch.where(wide.isnan(), wide, slope)


class InvertedActivation(nn.Module):
    """An activation layer with the forward pass of the layer it replaces, which keeps its output and a bit.

    Kept for backward: ``ceil(elements / 8)`` bytes, and the output itself; where the next layer keeps its input, that
    is the same storage. Nothing where no gradient is needed, and no entries in a state_dict.

    Args:
        exact: The layer to replace; not changed, and its hooks and train/eval flag are carried over.
        inversion: The inverse of its function.
        label: What the layer is called when shown.
        like: A tensor where the layer will run, such as a parameter of the model (which may be fake); None for the CPU.
    """

    turn: Tensor
    slopes: Tensor

    def __init__(self, exact: nn.Module, inversion: Inversion, label: str, like: Tensor | None = None) -> None:
        super().__init__()
        self.inversion, self.label = inversion, label
        place = torch.empty(0) if like is None else like
        self.register_buffer("turn", constants((inversion.turn,), place), persistent=False)
        self.register_buffer("slopes", constants((inversion.left, inversion.right), place), persistent=False)
        self.exact = without_hooks(exact)
        carry_hooks(exact, self)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit.

        Args:
            input: Any shape and strides; float32, float16, bfloat16 or float64.
        """
        if not (torch.is_grad_enabled() and input.requires_grad):
            exact: Tensor = self.exact(input)
            return exact
        if self.slopes.device != input.device:  # a model over several devices
            self.to(input.device)
        output: Tensor = InvertedGradient.apply(input, self.exact, self.turn, self.slopes, self.inversion)
        return output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InvertedActivation:
        """Move the layer, but keep its constants: float32 in a model of halves, and filled after ``to_empty``."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.turn = constants((self.inversion.turn,), self.turn)
        self.slopes = constants((self.inversion.left, self.inversion.right), self.slopes)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label} from its output and 1 bit)"
