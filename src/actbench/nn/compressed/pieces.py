"""Codes of a whole tensor read a piece at a time, so that what is made of them does not all exist at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from actbench.nn.layout import in_order
from actbench.ops.arguments import DTYPES
from actbench.ops.bitpack import pack_codes, packed_bytes, unpack_codes

PIECE = 2**21
"""About how many elements a piece has."""


def needs_codes(x: Tensor, inplace: bool = False) -> bool:
    """Return whether something is to be kept of the input of a function; otherwise torch's own function does as well.

    Args:
        x: The input.
        inplace: Whether it is to be overwritten; torch refuses that for a leaf.
    """
    if not (torch.is_grad_enabled() and x.requires_grad) or (inplace and x.is_leaf):
        return False
    return x.layout == torch.strided and x.dtype in DTYPES and not x.is_nested


def packed(values: Tensor, bits: int, order: list[int] | None) -> Tensor:
    """Return small numbers as packed codes.

    Args:
        values: uint8 below ``2**bits``, or bool with one bit.
        bits: 1 to 8.
        order: The dimensions in the order in which they are packed; None as they stand.

    Returns:
        uint8 ``(ceil(values.numel() * bits / 8),)``.
    """
    codes: Tensor = pack_codes(in_order(values, order).view(-1).view(torch.uint8), bits)
    return codes


def unpacked(codes: Tensor, bits: int, first: int, last: int) -> Tensor:
    """Return codes ``first`` to ``last - 1`` as uint8; ``first`` stands at a whole byte."""
    start = first * bits // 8
    found: Tensor = unpack_codes(codes[start : start + packed_bytes(last - first, bits)], bits, last - first)
    return found


def pieces(rows: int, row_size: int = 1) -> Iterator[tuple[int, int]]:
    """Give first and past-last row of each piece; the codes of a piece begin at a whole byte, whatever their bits.

    Args:
        rows: How many there are.
        row_size: Elements in each.
    """
    aligned = 8 // math.gcd(8, row_size)
    step = max(1, PIECE // max(1, row_size * aligned)) * aligned
    for first in range(0, rows, step):
        yield first, min(rows, first + step)
