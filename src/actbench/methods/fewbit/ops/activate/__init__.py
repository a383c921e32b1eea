"""An activation and the codes of its input in one operator; on CUDA it reads the input once.

All functions raise a ValueError for a wrong argument, and a KernelError if the CUDA kernel cannot be compiled or
launched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from actbench.methods.fewbit.ops import stepwise
from actbench.ops import bitpack, rawkernel
from actbench.ops.library import (
    Kernels,
    check_bits,
    check_contiguous,
    check_table,
    copied,
    define,
    empty_contiguous,
)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
"""The torch functions that a kernel computes too, by name."""

_nn: Any = torch._C._nn
_INTO: dict[str, Callable[..., Tensor]] = {
    "gelu": _nn.gelu,
    "gelu_tanh": partial(_nn.gelu, approximate="tanh"),
    "silu": _nn.silu,
}
"""The same with ``out``; a call of an operator of ``torch.ops`` takes several times as long."""


def reference(x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> tuple[Tensor, Tensor]:
    """Do what :func:`activate` does, with torch's operators on any device."""
    return FUNCTIONS[function](x.detach()), stepwise.encode_reference(x, bounds, bits, fold)


def _on_cpu(out: Tensor, packed: Tensor, x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> None:
    # torch refuses out= for a tensor that needs a gradient
    _INTO[function](x.detach(), out=out)
    stepwise.cpu.encode(packed, x, bounds, bits, fold)


def _on_cuda(out: Tensor, packed: Tensor, x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> None:
    if agrees_on_cuda(function, x.dtype, x.device):
        launch(out, packed, x, function, bounds, bits, fold)
    else:
        # as on the CPU: out= takes no tensor that needs a gradient
        _INTO[function](x.detach(), out=out)
        stepwise.launch_encode(packed, x, bounds, bits, fold)


def launch(out: Tensor, packed: Tensor, x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> None:
    """Launch the function's kernel of ``kernels/activate.cu``."""
    sign_mask, count = np.uint32(0x7FFFFFFF if fold else 0xFFFFFFFF), np.int64(x.numel())
    macros: rawkernel.Macros = {"BITS": bits, "SCALAR": rawkernel.SCALARS[x.dtype]}
    places = x, bounds, out, packed, count, sign_mask
    rawkernel.launch("activate", f"activate_{function}", macros, -(-x.numel() // 8), *places)


@functools.cache
def agrees_on_cuda(function: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the CUDA kernel gives torch's bits on a device, tried once on numbers of every exponent.

    Torch is built by another compiler, and its next version may compute a function differently. If the bits differ,
    torch's operator and a second pass replace the kernel.
    """
    if torch.cuda.is_current_stream_capturing():
        return False  # the comparison waits for the device, which breaks a capture; torch asks for a warm-up anyway
    numbers = samples(dtype).to(device)
    ours, codes = torch.empty_like(numbers), torch.empty(-(-numbers.numel() // 8), dtype=torch.uint8, device=device)
    launch(ours, codes, numbers, function, torch.zeros(1, device=device), 1, False)
    theirs = FUNCTIONS[function](numbers)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return bool(same.all())


def samples(dtype: torch.dtype) -> Tensor:
    """Return numbers of every exponent and sign with many mantissas; for the half types, all numbers."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    words = torch.arange(-(2**31), 2**31, 8191)  # 524,352 words, a prime apart
    return torch.cat([words.to(torch.int32).view(dtype), torch.linspace(-12, 12, 2**20)])


@define(
    "stepwise_activate(Tensor x, str function, Tensor bounds, int bits, bool fold) -> (Tensor, Tensor)",
    Kernels(_on_cpu, _on_cuda, copied(reference, results=2)),
)
def activate(x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> tuple[Tensor, Tensor]:
    """Return a function of x, bit for bit as torch computes it on that device, and the codes of ``stepwise.encode``.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous.
        function: One of :data:`FUNCTIONS`.
        bounds: float32 ``(2**bits - 1,)``, ascending.
        bits: 1 to 8.
        fold: Encode ``|x|``.

    Returns:
        A tensor like x, and uint8 ``(ceil(x.numel() * bits / 8),)``.
    """
    if function not in FUNCTIONS:
        raise ValueError(f"the function must be one of {', '.join(FUNCTIONS)}, found {function!r}")
    check_bits(bits)
    check_contiguous(x)
    check_table(bounds, x, bits, (1 << bits) - 1, "bounds")
    return empty_contiguous(x), x.new_empty(bitpack.packed_bytes(x.numel(), bits), dtype=torch.uint8)
