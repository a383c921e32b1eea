"""An activation and the codes of its input on CUDA: the launches of ``kernels/activate.cu``."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel


def activate(x: Tensor, function: str, bounds: Tensor, bits: int, fold: bool) -> tuple[Tensor, Tensor]:
    """Compute a function of x and pack, for each element, how many bounds lie strictly below it, in one pass.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        function: ``gelu``, ``gelu_tanh`` or ``silu``.
        bounds: float32, ascending, ``2**bits - 1`` of them.
        bits: 1 to 8.
        fold: Compare ``|x|``.

    Returns:
        A tensor like x, and uint8 of ``ceil(x.numel() * bits / 8)`` bytes.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    out = torch.empty_like(x)
    packed = torch.empty((x.numel() * bits + 7) // 8, dtype=torch.uint8, device=x.device)
    sign_mask = np.uint32(0x7FFFFFFF if fold else 0xFFFFFFFF)
    macros: rawkernel.Macros = {"BITS": bits, "SCALAR": rawkernel.SCALARS[x.dtype]}
    groups, count = -(-x.numel() // 8), np.int64(x.numel())
    rawkernel.launch("activate", f"activate_{function}", macros, groups, x, bounds, out, packed, count, sign_mask)
    return out, packed


@functools.cache
def agrees(function: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel gives torch's bits on a device, tried once on numbers of every size.

    Torch is built by another compiler than the one that builds the kernel here, and may compute a function in another
    way in its next version. Where it does, torch's operator and a second pass take the place of the kernel.
    """
    from actbench.ops.activate import plain

    if torch.cuda.is_current_stream_capturing():
        return False  # comparing waits for the device, which ends a capture; warm up before, as torch asks anyway
    numbers = samples(dtype).to(device)
    ours, _ = activate(numbers, function, torch.zeros(1, device=device), 1, False)
    theirs = plain(numbers, function)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return bool(same.all())


def samples(dtype: torch.dtype) -> Tensor:
    """Return numbers of every exponent and sign with many mantissas; of the half types, all there are."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    words = torch.arange(-(2**31), 2**31, 8191)  # 524,352 words, a prime apart
    return torch.cat([words.to(torch.int32).view(dtype), torch.linspace(-12, 12, 2**20)])
