"""Norms that save their output, which the next linear layers save anyway, in place of their input.

With xhat = (x - mean) r, y = w xhat + b and M elements in a row, the output gives xhat = (y - b) / w back, and

    dx = r (w dy - sum(w dy) / M - xhat sum(w dy xhat) / M)

RMS norm has neither mean nor b, and no second term.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.func import functional_call

from actbench.packing import savedtensors
from actbench.packing.precision import cast, cast_all, dtypes_of, no_autocast, norm_dtype, product_dtype, wide
from actbench.packing.refusals import first_order, refuse_compiling, saved_output
from actbench.packing.replacement import made_class, standing_in, without_hooks

LEAST = 2.0**-10
"""Magnitude of a weight below which the normalised input cannot be computed from the output."""
MOST = 2.0**6
"""The largest ratio of a bias to its weight: by this factor the rounding of y exceeds that of the normalised input."""

Run = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns the output of a norm, and 1 / deviation of each row, (rows, 1)."""

VALUES = (
    "a model whose norms keep their output",
    "they look at the values of their weights, which a compiled graph does not have",
)
"""What cannot be compiled, and why."""


class NormFromOutput(torch.autograd.Function):
    """Layer norm or RMS norm whose backward pass reads the output and 1 / deviation of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        run: Run,
        centered: bool,
        casts: bool = False,
    ) -> Tensor:
        """Return the first result of ``run(x)``, and save it with the second.

        ``centered`` is for layer norm; with ``casts`` the output has autocast's type.
        """
        ctx.dtypes, ctx.centered = dtypes_of(x, weight, bias), centered
        output, rstd = run(x)
        output = output.to(product_dtype(output)) if casts else output
        savedtensors.packed(x, rstd)
        ctx.save_for_backward(output, rstd, weight, bias)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the wanted gradients; raise a RuntimeError if the output was changed in place since."""
        y, rstd, weight, bias = saved_output(
            ctx,
            "msln keeps the output of norms, and an output, or the weight of its norm, was",
            "leave the norm out by only=",
        )
        dtype = wide(y.dtype)
        found: list[Tensor | None] = [None, None, None]
        row = y.numel() // rstd.numel()
        with no_autocast(y):
            dy, xhat = grad.reshape(-1, row).to(dtype), y.reshape(-1, row).to(dtype, copy=True)
            w, b = (None if each is None else each.reshape(-1).to(dtype) for each in (weight, bias))
            xhat = xhat if b is None else xhat.sub_(b)
            xhat = xhat if w is None else xhat.div_(w)
            work = dy * xhat
            if ctx.needs_input_grad[1]:
                found[1] = work.sum(0).view_as(weight)
            if ctx.needs_input_grad[2]:
                found[2] = dy.sum(0).view_as(bias)
            if ctx.needs_input_grad[0]:
                slope = (work.sum(1) if w is None else work @ w).div_(row)
                work = torch.mul(dy, 1 if w is None else w, out=work)
                if ctx.centered:
                    work.sub_(work.mean(1, keepdim=True))
                work.sub_(xhat.mul_(slope[:, None])).mul_(rstd.view(-1, 1))
                found[0] = work.view_as(grad)
        return *cast_all(found, ctx.dtypes), None, None, None


class FromOutput(nn.Module):
    """A base class, put before a norm's own, that saves the output; the norm runs plain if its weights forbid it.

    Attributes:
        casts: Whether autocast's type is that of the output, as linear layers take it.
    """

    weight: Any
    bias: Any
    casts: bool
    uncompilable = VALUES

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit, in autocast's type if the layer casts."""
        bias = getattr(self, "bias", None)
        wanted = any(each is not None and each.requires_grad for each in (input, self.weight, bias))
        output: Tensor
        recorded = torch.is_grad_enabled() and wanted and input.numel()
        if recorded:
            refuse_compiling(*VALUES)
        if recorded and why_not(self) is None:
            run, centered = self._run(super().forward), isinstance(self, nn.LayerNorm)
            output = NormFromOutput.apply(input, self.weight, bias, run, centered, self.casts)
            return output
        output = super().forward(input)
        return output.to(product_dtype(output)) if self.casts else output

    def _run(self, exact: Callable[[Tensor], Tensor]) -> Run:
        layer: Any = self
        if isinstance(self, nn.LayerNorm):
            return functools.partial(_layer_norm, layer.normalized_shape, self.weight, self.bias, self.eps)
        row = math.prod(layer.normalized_shape) if self.weight is None else self.weight.numel()
        return lambda x: (exact(x), _rms_rstd(x, row, epsilon(self, x.dtype)))


def _layer_norm(shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float, x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = norm_dtype(x)
    with no_autocast(x):
        x, weight, bias = x if dtype is None else x.to(dtype), cast(weight, dtype), cast(bias, dtype)
        output, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    return output, rstd.view(-1, 1)


def _rms_rstd(x: Tensor, row: int, eps: float) -> Tensor:
    dtype = wide(x.dtype)
    norms = torch.linalg.vector_norm(x.reshape(-1, row), dim=1, keepdim=True, dtype=dtype)
    rstd: Tensor = norms.square_().div_(row).add_(eps).rsqrt_()
    return rstd


def epsilon(layer: nn.Module, dtype: torch.dtype) -> float:
    """Return the number that an RMS norm adds to the mean square; unless given, that of the type torch sums in."""
    found = next((vars(layer)[name] for name in ("eps", "variance_epsilon") if name in vars(layer)), None)
    return float(torch.finfo(wide(dtype)).eps if found is None else found)


def why_not(layer: nn.Module) -> str | None:
    """Return why a norm's normalised input cannot be computed from its output, or None, also for unknown weights."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if weight is None or isinstance(weight, FakeTensor) or weight.is_meta:
        return None
    with torch.no_grad():
        least = LEAST if bias is None else (bias.abs() / MOST).clamp(min=LEAST)
        some = bool((~(weight.abs() >= least)).any())
    return "some of its weights are near 0, or far smaller than their bias" if some else None


def is_norm(layer: nn.Module) -> bool:
    """Return whether a layer is a layer norm or an RMS norm of torch, or computes the same on random numbers."""
    kind = type(layer)
    if "forward" in vars(layer):
        return False
    if kind in (nn.LayerNorm, nn.RMSNorm):
        return True
    if isinstance(layer, nn.LayerNorm):
        return not isinstance(layer, FromOutput) and _is_layer_norm(layer)
    return _seems_rms_norm(layer) and _is_rms_norm(layer)


def what_else(layer: nn.Module) -> str | None:
    """Return why a layer that looks like a norm is none, or None for a layer that does not look like a norm."""
    if isinstance(layer, FromOutput):
        return None
    if isinstance(layer, nn.LayerNorm):
        return "a subclass of nn.LayerNorm that computes something else"
    return "it does not compute w x / sqrt(mean(x**2) + eps), or not that alone" if _seems_rms_norm(layer) else None


def _seems_rms_norm(layer: nn.Module) -> bool:
    """Return whether a layer has what an RMS norm has, and no more: ``weight``, and a small number to add."""
    own = [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
    has_eps = any(isinstance(vars(layer).get(name), float) for name in ("eps", "variance_epsilon"))
    return own == ["weight"] and has_eps and not any(layer.children()) and not isinstance(layer, FromOutput)


def _is_rms_norm(layer: Any) -> bool:
    with unset_fake_temporarily(), torch.no_grad():
        noise = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(size, generator=noise) for size in ((2, 2, layer.weight.numel()), layer.weight.shape))
        # the last row shows epsilon
        x *= torch.tensor([1.0, 10.0, 0.1, epsilon(layer, x.dtype) ** 0.5]).view(2, 2, 1)
        rstd = _rms_rstd(x, weight.numel(), epsilon(layer, x.dtype)).view(2, 2, 1)
        found = _run_on(layer, {"weight": weight}, x)
        return found is not None and torch.allclose(found, weight * x * rstd, 1e-4, 1e-6)


def _is_layer_norm(layer: Any) -> bool:
    """Return whether a subclass of layer norm gives the same bits in float32 and bfloat16."""
    own = dict(layer.named_parameters())
    if not own.keys() <= {"weight", "bias"} or any(True for held in (layer.children(), layer.buffers()) for _ in held):
        return False
    with unset_fake_temporarily(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            noise = torch.Generator().manual_seed(0)
            values = {name: torch.randn(each.shape, generator=noise).to(dtype) for name, each in own.items()}
            x = torch.randn(2, 3, *layer.normalized_shape, generator=noise).to(dtype)
            expected = F.layer_norm(x, layer.normalized_shape, values.get("weight"), values.get("bias"), layer.eps)
            found = _run_on(layer, values, x)
            if found is None or found.dtype != dtype or not torch.equal(found, expected):
                return False
    return True


def _run_on(layer: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor | None:
    """Return what a layer without its hooks computes with these parameters, or None if that is no tensor like x."""
    try:
        found = functional_call(without_hooks(layer), values, (x,))
    except Exception:  # the class is not ours: if it fails, it is not a plain norm
        return None
    return found if isinstance(found, Tensor) and found.shape == x.shape else None


@functools.cache
def _class_for(kind: type[Any]) -> type[Any]:
    return made_class(f"{kind.__name__}FromOutput", (FromOutput, kind), _class_for, kind)


def from_output(layer: nn.Module, *, casts: bool = False) -> nn.Module:
    """Return a norm with the identity of ``layer`` that saves its output, in autocast's type if it ``casts``."""
    new: nn.Module = standing_in(layer, _class_for(type(layer)), casts=casts)  # type: ignore[arg-type]  # mypy: not Hashable
    return new
