"""Activation layers that save their output, which the next layer saves anyway, and a bit for the branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from actbench.methods.fewbit.gated import Inversion
from actbench.methods.fewbit.ops.stepwise import encode
from actbench.methods.fewbit.stepwise import applied
from actbench.packing import savedtensors
from actbench.packing.layout import as_it_lay, constants, in_order, memory_order
from actbench.packing.precision import wide
from actbench.packing.refusals import OWN_BACKWARD, first_order, refuse_exporting, saved_output
from actbench.packing.replacement import carry_hooks, without_hooks

Take = Callable[[int, torch.dtype], Tensor]
"""Returns an uninitialised tensor with a number of elements and a type."""


def bytes_meanwhile(dtype: torch.dtype) -> int:
    """Return the bytes for each element that :func:`times_slope` needs meanwhile in this type."""
    return 3 * dtype.itemsize + torch.int32.itemsize + torch.uint8.itemsize


def times_slope(grad: Tensor, y: Tensor, bits: Tensor, slopes: Tensor, inversion: Inversion, take: Take) -> Tensor:
    """Return a gradient times the derivative at the x with ``f(x) = y``; the bit gives the side of the minimum.

    Args:
        grad: ``(n,)`` of a float type.
        y: ``(n,)`` of a float type.
        bits: ``(ceil(n / 8),)`` uint8, the first element's lowest; 1 to the right of the minimum.
        slopes: The left and the right branch of the inversion, float32 ``(2, cells + 1)``.
        inversion: The inversion that the slopes belong to.
        take: Returns memory for temporaries and for the result.

    Returns:
        ``(n,)``, at least float32; NaN where y or the gradient is.
    """
    count, dtype, cells = len(y), wide(y.dtype), slopes.shape[1] - 1
    first, second, third = (take(count, dtype) for _ in range(3))
    flags = _flags(bits, take(8 * len(bits), torch.uint8))[:count]
    # inductor of torch 2.11 makes no code of the view
    right = flags.bool() if torch.compiler.is_compiling() else flags.view(torch.bool)
    converted = y if y.dtype == dtype else third.copy_(y)
    place = _place(converted, right, inversion, first, second).nan_to_num_(0.0).clamp_(0, 1).mul_(cells)
    cell = torch.floor(place, out=second).clamp_(max=cells - 1)
    share = place.sub_(cell)
    cell.add_(third.copy_(flags), alpha=cells + 1)  # of one type: operators on two types allocate memory
    index = take(count, torch.int32).copy_(cell)
    flat = slopes.reshape(-1).to(dtype)
    low = torch.index_select(flat, 0, index, out=second)
    high = torch.index_select(flat, 0, index.add_(1), out=third)
    slope = low.lerp_(high, share).masked_fill_(torch.ne(y, y, out=right), float("nan"))
    return slope.mul_(third.copy_(grad))  # of one type, as above


def _flags(bits: Tensor, out: Tensor) -> Tensor:
    """Return bits as bytes, the lowest first."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    torch.bitwise_right_shift(bits[:, None], places, out=out.view(-1, 8))
    return out.bitwise_and_(1)


def _place(y: Tensor, right: Tensor, inversion: Inversion, first: Tensor, second: Tensor) -> Tensor:
    """Return in ``first`` the place of an output on its branch, 0 at the minimum and 1 at the end."""
    ratio = torch.div(y, inversion.least, out=first).clamp_(0, 1)
    root = torch.neg(ratio, out=second).add_(1).sqrt_().add_(1)
    on_left = ratio.div_(root).sqrt_().neg_().add_(1)
    on_right = torch.sub(y, inversion.least, out=second).clamp_(min=0).sqrt_().div_(inversion.reach)
    return torch.where(right, on_right, on_left, out=first)


_FEWEST = 1 << 8
"""The fewest elements in a part, a multiple of 8: smaller parts save nothing."""
_MOST = 1 << 18
"""The most elements in a part on a CPU, a multiple of 8, since its caches are small."""


class InvertedGradient(torch.autograd.Function):
    """An exact activation; backward computes its derivative from the output and the branch of the input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exact: Callable[[Tensor], Tensor], turn: Tensor, slopes: Tensor, inversion: Inversion
    ) -> Tensor:
        """Return ``exact(x)``; save it, the packed bits ``x > turn``, and the slopes, which belong to the layer."""
        refuse_exporting(*OWN_BACKWARD)
        ctx.inversion, ctx.order = inversion, memory_order(x)
        bits = encode(in_order(x, ctx.order), turn, 1, False)
        savedtensors.packed(x, bits)
        if getattr(exact, "inplace", False):
            ctx.mark_dirty(x)
            exact(x)
            y = x  # not what exact returns: torch.compile does not recognise the marked tensor in it
        else:
            y = exact(x)
        ctx.save_for_backward(bits, y, slopes)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x; raise a RuntimeError if the output was changed in place since."""
        bits, y, slopes = saved_output(
            ctx,
            f"invact keeps the output of {ctx.inversion.function}, and that output was",
            "use fewbit, which keeps no output",
        )
        ordered = in_order(grad, ctx.order)
        product = torch.empty_like(ordered)
        flat, outputs, found = ordered.reshape(-1), in_order(y, ctx.order).reshape(-1), product.view(-1)
        for start, stop in _parts(found, wide(y.dtype)):
            part, codes = slice(start, stop), bits[start // 8 : (stop + 7) // 8]
            room = _Room(found[stop:])
            # the product is in the type of the gradient, and its slopes are at least float32
            found[part].copy_(times_slope(flat[part], outputs[part], codes, slopes, ctx.inversion, room))
        return as_it_lay(product, ctx.order).to(y.dtype), None, None, None, None


def _parts(product: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Cut a tensor to fill into parts, so that behind each part there is memory for its temporaries.

    The backward pass of the exact layer holds what this one holds: a saved tensor, a gradient and a product. So the
    slopes of a part are computed in the memory of the product that is not filled yet. The last few elements have no
    such memory; smaller parts would need less for them, but more operators.
    """
    start, count = 0, len(product)
    fewest = max(_FEWEST, count // 64 // 8 * 8)
    most = max(fewest, _MOST) if product.device.type == "cpu" else count
    while start < count:
        left = count - start
        part = left * product.element_size() // (bytes_meanwhile(dtype) + product.element_size()) // 8 * 8
        stop = count if torch.compiler.is_compiling() else start + min(left, max(fewest, min(part, most)))
        yield start, stop
        start = stop


class _Room:
    """Returns tensors in the unused memory of a contiguous vector, or new tensors if that is too small."""

    def __init__(self, unused: Tensor) -> None:
        self._bytes = unused.view(torch.uint8)

    def __call__(self, count: int, dtype: torch.dtype) -> Tensor:
        size = -(-count * dtype.itemsize // 8) * 8  # each begins at a multiple of 8 bytes, for float64
        if torch.compiler.is_compiling() or size > len(self._bytes):
            return torch.empty(count, dtype=dtype, device=self._bytes.device)
        given, self._bytes = self._bytes[:size], self._bytes[size:]
        return given.view(dtype)[:count]


class InvertedActivation(nn.Module):
    """An activation layer with the forward pass of the layer it replaces, which saves its output and a bit.

    It saves ``ceil(elements / 8)`` bytes and the output itself; if the next layer saves its input, that is the same
    storage. It saves nothing if no gradient is needed, and has no entries in a state_dict.

    Args:
        exact: The layer to replace; not changed, and its hooks and train/eval flag are carried over.
        inversion: The inverse of its function.
        label: Name of the layer when shown.
        like: A tensor on the layer's device, such as a parameter (which may be fake); None for the CPU.
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
        """Return what the exact layer returns, bit for bit; the input is of any shape, strides and float type."""
        if not (torch.is_grad_enabled() and input.requires_grad):
            exact: Tensor = self.exact(input)
            return exact
        if self.slopes.device != input.device:  # a model over several devices
            self.to(input.device)
        return applied(InvertedGradient, input, self.exact, self.turn, self.slopes, self.inversion)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InvertedActivation:
        """Move the layer, but keep its constants float32 in models of half types; fill them after ``to_empty``."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.turn = constants((self.inversion.turn,), self.turn)
        self.slopes = constants((self.inversion.left, self.inversion.right), self.slopes)
        return self

    @property
    def becomes(self) -> str:
        """The name of the layer."""
        return f"{self.label} from its output and 1 bit"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.becomes})"
