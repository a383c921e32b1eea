"""An activation and the codes of its input in one operator, which reads the input once where it can.

``actbench::stepwise_activate(x, function, bounds, bits, fold)`` gives ``function(x)``, bit for bit as torch computes it
on that device, and what ``stepwise_encode(x, bounds, bits, fold)`` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from actbench.ops import bitpack, stepwise
from actbench.ops.arguments import check_bits, check_contiguous, check_table
from actbench.ops.cpu import activate as fused
from actbench.ops.cpu import hugepages
from actbench.ops.cpu import stepwise as cpu
from actbench.ops.cuda import activate as cuda
from actbench.ops.library import define, direct

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
"""Torch's own functions that a kernel computes, by name."""

_aten = torch.ops.aten
_INTO: dict[str, Callable[..., Tensor]] = {
    "gelu": _aten.gelu.out,
    "gelu_tanh": partial(_aten.gelu.out, approximate="tanh"),
    "silu": _aten.silu.out,
}
"""The same, writing into ``out=``: slower to call, and only where the output must lie somewhere."""


def reference(x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> tuple[Tensor, Tensor]:
    """Compute both parts with torch's operators, on any device.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous.
        function: One of :data:`FUNCTIONS`.
        bounds: float32 ``(2**bits - 1,)``, ascending.
        bits: 1 to 8.
        fold: Encode ``|x|``.

    Returns:
        A tensor like x, and uint8 ``(ceil(x.numel() * bits / 8),)``.
    """
    _check(x, function, bounds, bits)
    return plain(x, function), stepwise.encode_reference(x, bounds, bits, fold)


def plain(x: Tensor, function: str) -> Tensor:
    """Return ``function(x)`` by torch's operator, large outputs on huge pages."""
    x = x.detach() if torch.is_grad_enabled() else x
    if x.is_cpu and x.nbytes >= hugepages.LEAST_BYTES:
        return _INTO[function](x, out=hugepages.empty_like(x))
    return FUNCTIONS[function](x)


def one_pass(function: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether function and codes come from one pass over x: where a kernel gives the bits of torch's.

    That is asked once for each device and, on the CPU, for each number of threads. There SiLU and GELU in float32 have
    kernels; all else is computed by torch's own, whose last bits no other one has, and encoded after.
    """
    if device.type == "cuda":
        return dtype != torch.float64 and cuda.agrees(function, dtype, device)
    return fused.agrees(function, dtype)


def _cpu(x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> tuple[Tensor, Tensor]:
    """Compute; nothing folds the codes of a function that has a kernel here, since its derivative is not even."""
    if x.dtype == torch.float64:
        return reference(x, function, bounds, bits, fold)
    _check(x, function, bounds, bits)
    if fold:
        return plain(x, function), cpu.encode(x, bounds, bits, fold)
    return on_cpu(x, function, bounds, bits)


def on_cpu(x: Tensor, function: str, bounds: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Do what the operator does on the CPU without ``fold``; arguments as the reference's, which nobody checks here.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        function: One of :data:`FUNCTIONS`.
        bounds: float32 ``(2**bits - 1,)``, ascending.
        bits: 1 to 8.

    Returns:
        A tensor like x, and uint8 ``(ceil(x.numel() * bits / 8),)``.
    """
    found = fused.ONE_PASS.get(function) if x.dtype == torch.float32 else None
    rests = None if found is None else found.rests(x.numel(), found.state())
    if rests is None:
        return plain(x, function), cpu.encode(x, bounds, bits, False)
    return fused.activate(x, function, rests, bounds, bits)


def _cuda(x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return reference(x, function, bounds, bits, fold)
    _check(x, function, bounds, bits)
    if one_pass(function, x.dtype, x.device):
        return cuda.activate(x, function, bounds, bits, fold)
    return plain(x, function), stepwise.encode(x.detach(), bounds, bits, fold)


def _fake(x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> tuple[Tensor, Tensor]:
    _check(x, function, bounds, bits)
    return torch.empty_like(x.contiguous()), x.new_empty(bitpack.packed_bytes(x.numel(), bits), dtype=torch.uint8)


def _check(x: Tensor, function: str, bounds: Tensor, bits: int) -> None:
    if function not in FUNCTIONS:
        raise ValueError(f"the function must be one of {', '.join(FUNCTIONS)}, found {function!r}")
    check_bits(bits)
    check_contiguous(x)
    check_table(bounds, x, bits, (1 << bits) - 1, "bounds")


define(
    "stepwise_activate(Tensor x, str function, Tensor bounds, int bits, bool fold) -> (Tensor, Tensor)",
    {"CPU": _cpu, "CUDA": _cuda},
    _fake,
)


def activate(x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> tuple[Tensor, Tensor]:
    """Return a function of a contiguous tensor and its packed codes; arguments as the reference's."""
    if direct(x):
        return _cpu(x, function, bounds, bits, fold)
    found: tuple[Tensor, Tensor] = torch.ops.actbench.stepwise_activate.default(x, function, bounds, bits, fold)
    return found
