"""Group quantization in plain torch, the reference: every kernel must agree with it bit for bit.

A group's smallest and largest value first become bfloat16: ``offset`` rounded down and ``maximum`` rounded up. They are
one 32-bit word, the offset in its low half. All else is computed from these two bounds, so no value lies outside. With
``B = 2**bits - 1``, in float32 (float64 for float64), each operation rounded by itself:

    scale  = 2**-64, 1 or 2**64                           # for huge, ordinary or tiny bounds: nothing overflows
    range  = maximum * scale - offset * scale
    above  = x * scale - offset * scale                   # then clamped to 0 .. range
    place  = above * (B / range) + 256 + n / 32768        # a fused multiply-add: rounded once, to a 32768th
    code   = floor(place) - 256
    value  = (code * (range / B) + offset * scale) * (1 / scale)

where n is 15 random bits, the element's number of :func:`actbench.ops.noise.numbers`: group g is unit g, and its lanes
are :func:`lanes_of`. As the place is rounded to a 32768th, the mean of the code is the rounded ``place - 256`` without
noise. For the nearest code n is 16384. If both bounds are equal all codes are 0; if a value is NaN or infinite both
bounds are NaN, all codes are 0, and the whole group decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from actbench.ops import bitpack, noise
from actbench.ops.library import wide

NAN_WORD: Final = 0x7FC07FC0
"""The word of a group with a non-finite value: both bounds NaN."""

PIECE = 2**18
"""Elements of a piece of one group, a multiple of 8, so that its codes begin at a whole byte."""

HUGE, TINY, SHIFT = 2.0**60, 2.0**-60, 2.0**64
"""The bound from which numbers are scaled down, the bound below which they are scaled up, and the factor."""

_LARGEST = torch.tensor(0x7F7F, dtype=torch.int16, device="cpu").view(torch.bfloat16)
# 65280: above, float16 overflows.
_LARGEST_FOR_HALF = torch.tensor(0x477F, dtype=torch.int16, device="cpu").view(torch.bfloat16)


def words_of(x: Tensor, group_size: int) -> Tensor:
    """Return the word of each group of each row of (R, F): int32 ``(R, ceil(F / group_size))``.

    The last group of a row may have fewer elements.
    """
    if x.numel() == 0:
        return torch.empty(x.shape[0], -(-x.shape[1] // group_size), dtype=torch.int32, device=x.device)
    groups = _grouped(x, group_size)
    largest = (_LARGEST_FOR_HALF if x.dtype == torch.float16 else _LARGEST).to(x.device)
    least, most = groups.amin(2), groups.amax(2)
    low, high = least.to(torch.bfloat16), most.to(torch.bfloat16)
    # nextafter takes no number: the product is an infinity in the type and on the device of the bounds
    low = torch.where(low.to(least.dtype) > least, torch.nextafter(low, -torch.inf * largest), low)
    high = torch.where(high.to(most.dtype) < most, torch.nextafter(high, torch.inf * largest), high)
    # + 0.0: no bound is -0.0, for which of two zeros is the least differs between devices
    low, high = (torch.clamp(bound, -largest, largest) + 0.0 for bound in (low, high))
    word = (low.view(torch.int16).int() & 0xFFFF) | (high.view(torch.int16).int() << 16)
    return torch.where(groups.float().isfinite().all(2), word, NAN_WORD)


def _grouped(x: Tensor, group_size: int) -> Tensor:
    """Return (R, groups, group_size), the rest of the last group filled with that group's first value."""
    rows, columns = x.shape
    groups = -(-columns // group_size)
    last = x[:, (groups - 1) * group_size, None].expand(rows, groups * group_size - columns)
    return wide(torch.cat([x, last], 1)).view(rows, groups, group_size)


def lanes_of(group_size: int) -> int:
    """Return how many sequences of noise, or lanes of a warp, share a group: one for 32 elements, or 32."""
    return group_size // 32 if group_size in (32, 64, 128, 256, 512) else 32


def bounds_of(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return offset and maximum of words, as float32 tensors of their shape."""
    # a bfloat16 is the upper half of a float32
    return (words << 16).view(torch.float32), (words & -65536).view(torch.float32)


def _scaled(words: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale of each word, and its scaled offset and range."""
    low, high = (bound.to(dtype) for bound in bounds_of(words))
    largest = torch.maximum(low.abs(), high.abs())
    scale = torch.ones_like(low).masked_fill(largest >= HUGE, 1 / SHIFT).masked_fill(largest < TINY, SHIFT)
    return scale, low * scale, high * scale - low * scale


def codes_of(x: Tensor, words: Tensor, most: Tensor, group_size: int, seed: int | Tensor, stochastic: bool) -> Tensor:
    """Return the codes of floats (R, F), uint8 of that shape, from the words of :func:`words_of`.

    ``most`` is the largest code of each row, ``(R,)``; the other arguments are those of the operator.
    """
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    groups = _grouped(x, group_size)
    scale, offset, span = (part[..., None] for part in _scaled(words, groups.dtype))
    top = most.to(groups.dtype)[:, None, None]
    slope = torch.where(span > 0, top / span, 0)
    above = (groups * scale - offset).masked_fill(~(span > 0), 0).clamp(min=0)
    place = torch.minimum(above, span.nan_to_num(0)).double() * slope.double() * 32768  # exact, for float32
    numbers = _noise(seed, words.numel(), group_size, x.device).view(groups.shape) if stochastic else 16384
    # A tie goes to the even sum with the number of noise. One near a tie has bits left for 1 more.
    odd = numbers & 1
    codes = ((place + odd).round().long() - odd + numbers) >> 15
    return codes.flatten(1)[:, : x.shape[1]].to(torch.uint8)


def _noise(seed: int | Tensor, groups: int, group_size: int, device: torch.device) -> Tensor:
    """Return the noise of groups: int64 ``(groups, group_size)``."""
    lanes = lanes_of(group_size)
    units = -(-group_size // (32 * lanes))  # more than one only for a piece of a tensor that is one group
    return noise.numbers(seed, 0, groups * units, lanes, device).view(groups, -1)[:, :group_size]


def values_of(codes: Tensor, words: Tensor, most: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of int64 codes in a type; ``words`` and ``most`` have the shape of codes, or expand to it."""
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    scale, offset, span = _scaled(words, computed)
    step = span / most.to(computed)
    return ((codes.to(computed) * step + offset) * (1 / scale)).to(dtype)


def encode(x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Encode a vector."""
    words, most = words_of(x[None], group_size), torch.full((1,), 2**bits - 1, device=x.device)
    codes = codes_of(x[None], words, most, group_size, seed, stochastic)
    return bitpack.pack(codes[0], bits), words[0]


def decode(
    codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, count: int, dtype: torch.dtype
) -> Tensor:
    """Decode a part of a vector."""
    skipped = start % 8
    found = bitpack.unpack(codes[start // 8 * bits :], bits, skipped + count)[skipped:]
    group = torch.arange(start, start + count, device=codes.device) // group_size
    return values_of(found, meta[group], torch.full((1,), 2**bits - 1, device=codes.device), dtype)


def decode_(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int) -> None:
    """Decode a part of a vector into a tensor."""
    out.copy_(decode(codes, meta, bits, group_size, start, out.numel(), out.dtype).view(out.shape))


def fitting(widths: Tensor, columns: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the byte where each row's codes start, and whether its bits are 1 to 8 and its codes in the buffer."""
    ends = widths.cumsum(0, dtype=torch.int64) * (-(-columns // 8))
    starts = ends - widths * (-(-columns // 8))
    return starts, (widths >= 1) & (widths <= 8) & (starts >= 0) & (ends <= size)


def encode_rows(
    x: Tensor, row_bits: Tensor, total_bits: int, group_size: int, seed: Tensor, stochastic: bool
) -> tuple[Tensor, Tensor]:
    """Encode rows."""
    codes = torch.zeros(-(-x.shape[1] // 8) * total_bits, dtype=torch.uint8, device=x.device)
    starts, fits = fitting(row_bits, x.shape[1], codes.numel())
    words, most = words_of(x, group_size), (1 << row_bits.clamp(1, 8)) - 1
    found = codes_of(x, words, most, group_size, seed, stochastic)
    for row in fits.nonzero().flatten().tolist():
        stream = bitpack.pack(found[row], int(row_bits[row]))
        codes[int(starts[row]) :][: stream.numel()] = stream
    return codes, words.masked_fill(~fits[:, None], NAN_WORD).flatten()


def decode_rows(out: Tensor, codes: Tensor, meta: Tensor, row_bits: Tensor, group_size: int, first_row: int) -> None:
    """Decode rows into a matrix."""
    rows, columns = out.shape
    if out.numel() == 0:
        return
    starts, fits = fitting(row_bits, columns, codes.numel())
    group = torch.arange(columns, device=out.device) // group_size
    words = meta.view(row_bits.numel(), -1)
    for row in range(rows):
        width, start = int(row_bits[first_row + row]), int(starts[first_row + row])
        if not fits[first_row + row]:
            out[row] = torch.nan
            continue
        found = bitpack.unpack(codes[start:][: -(-columns // 8) * width], width, columns)
        most = torch.full((1,), 2**width - 1, device=out.device)
        out[row] = values_of(found, words[first_row + row][group], most, out.dtype)


def encode_in_one(x: Tensor, bits: int, seed: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Encode a vector as one group, a piece at a time, so that temporaries stay small."""
    codes = x.new_empty(bitpack.packed_bytes(x.numel(), bits), dtype=torch.uint8)
    if x.numel() == 0:
        return codes, x.new_empty(0, dtype=torch.int32)
    words = words_of(torch.stack(torch.aminmax(x))[None], 2)
    most = torch.full((1,), 2**bits - 1, device=x.device)
    for index, (start, end) in enumerate(_pieces(0, x.numel())):
        piece = x[start:end]
        own = seed + (index << 40)  # seeds next to it are those of other sites
        found = codes_of(piece[None], words, most, piece.numel(), own, stochastic)
        stream = bitpack.pack_codes(found[0], bits)
        codes[start * bits // 8 :][: stream.numel()] = stream
    return codes, words[0]


def decode_in_one(codes: Tensor, meta: Tensor, bits: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """Decode a part of a vector that is one group."""
    out = codes.new_empty(count, dtype=dtype)
    most = torch.full((1,), 2**bits - 1, device=codes.device)
    for first, end in _pieces(start, start + count):
        stream = codes[first * bits // 8 :][: bitpack.packed_bytes(end - first, bits)]
        found = bitpack.unpack_codes(stream, bits, end - first)
        skipped = max(0, start - first)
        out[first + skipped - start : end - start] = values_of(found[skipped:], meta, most, dtype)
    return out


def _pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of pieces that cover ``first .. last - 1``; each starts at a multiple of 8."""
    for start in range(first // 8 * 8, last, PIECE):
        yield start, min(last, start + PIECE)
