"""Codes of a vector that takes a fraction of a bit more than a whole width: its first groups have one bit more.

What a width comes to is read off the bytes of the codes, not kept beside them, since codes that a recomputation made
may be of other bits than those of the first forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.ops import bitpack, groupquant
from actbench.ops.seeds import fresh_seed

_FEWEST = 8
"""Elements that are left behind the wider groups, unless none is: fewer could not be told from padding."""


def division(count: int, bits: float, group_size: int) -> tuple[int, int]:
    """Return the smaller width, and how many elements in front have one bit more: whole groups.

    Args:
        count: Elements.
        bits: An element has on average, 1 to 8.
        group_size: Elements of a group.
    """
    width = int(bits)
    wider = round((bits - width) * count / group_size) * group_size
    if count % group_size == 0 and wider == count:
        return width + 1, 0
    return width, max(0, min(wider, (count - _FEWEST) // group_size * group_size))


def mean_bits(count: int, bits: float, group_size: int) -> float:
    """Return the bits that an element has on average, arguments as for :func:`division`."""
    width, wider = division(count, bits, group_size)
    return width + wider / count


def encode(flat: Tensor, bits: float, group_size: int, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Encode a vector of 8 elements or more as :func:`actbench.ops.groupquant.encode` does, in as many groups.

    Args:
        flat: (n,) of a float type, contiguous.
        bits: An element is to have on average, 1 to 8.
        group_size: Elements of a group.
        stochastic: Whether rounding is.

    Returns:
        uint8 codes, those of the wider groups first, and the int32 words of the groups.
    """
    width, wider = division(flat.numel(), bits, group_size)
    if not wider:
        return groupquant.encode(flat, width, group_size, fresh_seed(), stochastic)
    front, split = wider * (width + 1) // 8, wider // group_size
    # Written to their places: if they were joined afterwards, both parts and the whole would be there at once.
    codes = flat.new_empty(front + bitpack.packed_bytes(flat.numel() - wider, width), dtype=torch.uint8)
    words = flat.new_empty(-(-flat.numel() // group_size), dtype=torch.int32)
    for part in (
        (codes[:front], words[:split], flat[:wider], width + 1),
        (codes[front:], words[split:], flat[wider:], width),
    ):
        groupquant.encode_(*part, group_size, fresh_seed(), stochastic)
    return codes, words


def decode(
    parts: tuple[Tensor, ...],
    count: int,
    group_size: int,
    dtype: torch.dtype,
    start: int = 0,
    wanted: int | None = None,
) -> Tensor:
    """Return elements of a vector that was encoded here.

    Args:
        parts: Codes and words, as :func:`encode` gives them.
        count: Elements of the vector.
        group_size: As when encoding.
        dtype: Of the result.
        start: Index of the first element that is wanted.
        wanted: How many are; None for all.
    """
    codes, words = parts
    width, wider = _division_of(codes, count)
    wanted = count - start if wanted is None else wanted
    if not wider:
        return groupquant.decode(codes, words, width, group_size, start, wanted, dtype)
    end, rest = start + wanted, (codes[wider * (width + 1) // 8 :], words[wider // group_size :])
    if end <= wider:
        return groupquant.decode(codes, words, width + 1, group_size, start, wanted, dtype)
    if start >= wider:
        return groupquant.decode(*rest, width, group_size, start - wider, wanted, dtype)
    out = codes.new_empty(wanted, dtype=dtype)
    groupquant.decode_(out[: wider - start], codes, words, width + 1, group_size, start)
    groupquant.decode_(out[wider - start :], *rest, width, group_size, 0)
    return out


def _division_of(codes: Tensor, count: int) -> tuple[int, int]:
    """Return what :func:`division` gave for codes of so many elements."""
    width = codes.numel() * 8 // count
    return width, (codes.numel() - bitpack.packed_bytes(count, width)) * 8
