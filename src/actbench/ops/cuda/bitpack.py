"""Packed codes on CUDA: the launches of ``kernels/bitpack.cu``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack the low bits of codes.

    Args:
        codes: uint8 ``(n,)``, contiguous.
        bits: 1 to 8.

    Returns:
        uint8 ``(ceil(n * bits / 8),)``.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    count = codes.numel()
    packed = torch.empty((count * bits + 7) // 8, dtype=torch.uint8, device=codes.device)
    rawkernel.launch("bitpack", "pack_codes", {"BITS": bits}, -(-count // 8), codes, packed, np.int64(count))
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Read codes back.

    Args:
        packed: uint8 ``(ceil(count * bits / 8),)``, contiguous.
        bits: 1 to 8.
        count: How many.

    Returns:
        uint8 ``(count,)``.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    codes = torch.empty(count, dtype=torch.uint8, device=packed.device)
    rawkernel.launch("bitpack", "unpack_codes", {"BITS": bits}, -(-count // 8), packed, codes, np.int64(count))
    return codes
