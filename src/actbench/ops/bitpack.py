"""The reference of packing: b-bit codes as one contiguous little-endian stream, in plain torch on any device.

Code i stands at bits ``[i * b, i * b + b)``, bit k of the stream being bit ``k % 8`` of byte ``k // 8``. A stream of n
codes has exactly ``ceil(n * b / 8)`` bytes; the bits past its end are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that ``count`` codes of ``bits`` bits take."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes.

    Args:
        codes: uint8 ``(n,)``, each below ``2**bits``.
        bits: 1 to 8.

    Returns:
        uint8 ``(ceil(n * bits / 8),)``.
    """
    places = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = codes.new_zeros(packed_bytes(codes.numel(), bits) * 8)
    stream[: codes.numel() * bits] = ((codes[:, None] >> places) & 1).reshape(-1)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=codes.device)
    return torch.sum(stream.reshape(-1, 8) * weights, 1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first ``count`` codes.

    Args:
        packed: uint8 ``(ceil(count * bits / 8),)``.
        bits: 1 to 8.
        count: How many codes.

    Returns:
        int64 ``(count,)``.
    """
    first_bit = torch.arange(count, device=packed.device) * bits
    bytes_and_zero = torch.cat([packed, packed.new_zeros(1)]).long()
    byte = first_bit // 8
    two_bytes = bytes_and_zero[byte] | (bytes_and_zero[byte + 1] << 8)
    codes: Tensor = (two_bytes >> (first_bit % 8)) & (2**bits - 1)
    return codes
