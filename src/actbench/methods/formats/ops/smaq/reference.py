"""SmaQ blocks in plain torch, the reference: every kernel must agree with it bit for bit.

After Shoghi et al., "SmaQ: Smart Quantization for DNN Training by Exploiting Value Clustering" (2021): few bits for
values near the mean, more for outliers. In each block of B elements exactly k are outliers, so the bytes are known
beforehand. In float32 (float64 for float64), each operation rounded by itself:

    mean      the sum of x divided by B, as bfloat16; :func:`_mean_of` has the order of the sum
    d         x - mean
    keys      the upper 16 bits of |d| as a float32: bfloat16 numbers that are not above |d|
    outliers  the elements with the k largest keys; among equals the first
    ends      main end: the bfloat16 after the largest key of the others; tail start: the least key of outliers; tail
              end: the bfloat16 after their largest
    steps     main step = main end / M, tail step = (tail end - tail start) / T
    main      code = floor(fma(d, M / main end, 256 + w)) - 256 + M
              value = (code - M) * main step + mean
    outlier   code = floor(fma(|d| - tail start, T / (tail end - tail start), 256 + w)) - 256, its sign above it
              value = sign * (code * tail step + tail start) + mean

where M = ``main_steps``, T = ``tail_steps``, fma rounds a product and a sum once, and w is the element's noise: n/2**15
for its number n of :func:`actbench.ops.noise.numbers` in units of 32 elements. The mean over w is the element. For the
nearest code w is 1/2. Nothing lies outside the ends. No upper end is below :data:`LEAST`, which keeps quotients finite.
The deviation sigma of SmaQ would divide d and the ends, and cancels. In its place the tail has a start, and no code is
spent on the gap between main values and outliers.

If a value is NaN or infinite, |d| reaches :data:`HUGE`, or the mean half of it, the header is NaN, and the whole block
decodes to NaN. Values below :data:`LARGEST` do neither, nor does the sum of 32 of them overflow.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from actbench.methods.formats.ops.smaq.format import HEADER_BYTES, Format
from actbench.ops import bitpack, noise
from actbench.ops.library import wide

HUGE: Final = 2.0**127
"""The distance from the mean that makes its block NaN: the decoded values of all other blocks are finite."""

LARGEST: Final = 2.0**123
"""A block whose magnitudes are all below it is not NaN."""

LEAST: Final = 2.0**-90
"""The least main end and tail end."""

NAN_HALF: Final = 0x7FC0
"""Each of the four numbers in the header of a NaN block."""

_NEAREST: Final = 1 << (noise.NOISE_BITS - 1)  # in place of a number of noise

HALF_MOST: Final = 65504.0
"""The largest float16: decoded values are clamped to it, since ends are rounded outwards."""


def encode(x: Tensor, seed: int | Tensor, stochastic: bool, *parts: int) -> Tensor:
    """Encode the elements of a tensor."""
    x, form = x.reshape(-1), Format(*parts)
    whole = x.numel() // form.block * form.block
    blocks = [_encoded(x[:whole].view(-1, form.block), 0, form, seed, stochastic)]
    if whole < x.numel():
        blocks.append(_encoded(x[None, whole:], whole, form, seed, stochastic))
    return torch.cat([part.flatten() for part in blocks])


def _encoded(x: Tensor, first: int, form: Format, seed: int | Tensor, stochastic: bool) -> Tensor:
    """Return the bytes of blocks (R, count), whose first element is number ``first`` of the tensor."""
    blocks, count = x.shape
    if x.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    values = wide(x)
    mean = _mean_of(values, form.block)
    d = values - mean
    bad = ~((d.abs() < HUGE).all(1, keepdim=True) & (mean.abs() < HUGE / 2))
    mean, d = mean.masked_fill(bad, 0), d.masked_fill(bad, 0)
    outlier, ends = _parted(_keys_of(d), form.outliers_of(count))
    numbers = _numbers(seed, first, x) if stochastic else torch.full_like(d, _NEAREST, dtype=torch.int64)
    main_end, start, end = (end.to(d.dtype) for end in ends)
    main = _codes(d, main_end, form.main_steps, numbers) + form.main_steps
    tail = _codes(d.abs() - start, end - start, form.tail_steps, numbers) | (
        d.signbit().long() << (form.outlier_bits - 2)
    )
    high = 1 << (form.main_bits - 1)
    codes = torch.where(outlier, high | (tail & (high - 1)), main).masked_fill(bad, 0)
    rest = (tail >> (form.main_bits - 1))[outlier].view(blocks, -1).masked_fill(bad, 0)
    header = torch.cat([part.to(torch.bfloat16) for part in (mean, *ends)], 1).view(torch.int16)
    header = header.masked_fill(bad, NAN_HALF).view(torch.uint8)
    parts = [header, _packed(codes, form.main_bits, -(-count // 8) * form.main_bits)]
    if form.rest_bits:
        parts.append(_packed(rest, form.rest_bits, form.bytes_of(count) - form.rest_start(count)))
    return torch.cat(parts, 1)


def _numbers(seed: int | Tensor, first: int, x: Tensor) -> Tensor:
    """Return the numbers of noise of elements (R, count), from number ``first`` on."""
    units = -(-x.numel() // noise.NUMBERS)
    return noise.numbers(seed, first // noise.NUMBERS, units, 1, x.device).flatten()[: x.numel()].view(x.shape)


def _mean_of(values: Tensor, block: int) -> Tensor:
    """Return the mean of each block as a bfloat16, in the type of the values.

    32 neighbours are summed by halves: the first 16 and the other 16, then 8 and 8. Their sums, divided by 1024, are
    summed in the same way, as 8 numbers in blocks of at most 256 elements and else as 32.
    """
    thirty_twos = 8 if block <= 256 else 32
    parts = pad(values, (0, 32 * thirty_twos - values.shape[1])).view(len(values), thirty_twos, 32)
    sums = _halved(parts)
    sums = sums.masked_fill(sums.double().abs() >= 2.0**128, torch.inf)  # float64, too
    total = _halved(sums * 2.0**-10)  # exact, and no sum over a block, of at most 1,024 elements, overflows
    mean = total[:, None] / torch.full_like(values[:, :1], values.shape[1] / 1024)
    return mean.to(torch.bfloat16).to(values.dtype)


def _halved(numbers: Tensor) -> Tensor:
    """Return the sums over the last dimension, a power of two."""
    while numbers.shape[-1] > 1:
        first, second = numbers.chunk(2, -1)
        numbers = first + second
    return numbers[..., 0]


def _keys_of(d: Tensor) -> Tensor:
    """Return the upper 16 bits of distances as float32, int16."""
    distance = d.abs()
    near = distance.float()
    near = torch.where(near.to(d.dtype) > distance, torch.nextafter(near, torch.zeros_like(near)), near)  # of float64
    return (near.view(torch.int32) >> 16).to(torch.int16)


def _parted(keys: Tensor, outliers: int) -> tuple[Tensor, list[Tensor]]:
    """Return which elements are outliers, and main end, tail start and tail end as bfloat16."""
    order = keys.argsort(dim=1, descending=True, stable=True)
    outlier = torch.zeros_like(keys, dtype=torch.bool).scatter_(1, order[:, :outliers], True)
    least = torch.full_like(keys[:, :1], LEAST, dtype=torch.bfloat16).view(torch.int16)
    start, end, main_end = torch.zeros_like(least), least, least
    if outliers:
        start = keys.gather(1, order[:, outliers - 1 : outliers])
        end = torch.maximum(keys.gather(1, order[:, :1]) + 1, least)
    if outliers < keys.shape[1]:
        main_end = torch.maximum(keys.gather(1, order[:, outliers : outliers + 1]) + 1, least)
    return outlier, [each.view(torch.bfloat16) for each in (main_end, start, end)]


def _codes(distance: Tensor, end: Tensor, steps: int, numbers: Tensor) -> Tensor:
    """Return the steps from zero to each distance, with its noise, rounded down.

    A float32 sum is a multiple of 2**-15 from 256 on, and of 2**-16 below. It is rounded once, and a tie goes to the
    even sum. The product is exact in float64.
    """
    slope = torch.full_like(end, steps) / end
    place = distance.double() * slope.double() * 2.0**noise.NOISE_BITS
    odd = numbers & 1
    upper = (place + odd).round().long() - odd + numbers
    lower = (2 * place).round().long() + 2 * numbers
    return torch.where(place + numbers >= 0, 2 * upper, lower) >> (noise.NOISE_BITS + 1)


def _packed(codes: Tensor, bits: int, size: int) -> Tensor:
    """Return each row's codes as a stream of ``size`` bytes."""
    codes = pad(codes.to(torch.uint8), (0, -(-size // bits) * 8 - codes.shape[1]))
    return bitpack.pack(codes.flatten(), bits).view(len(codes), -1)[:, :size]


def decode(packed: Tensor, first: int, count: int, dtype: torch.dtype, *parts: int) -> Tensor:
    """Return elements ``first .. first + count - 1`` of the encoded tensor."""
    form = Format(*parts)
    whole = packed.numel() // form.block_bytes
    left = form.room(packed.numel()) - whole * form.block
    blocks = packed[: whole * form.block_bytes].view(whole, form.block_bytes)
    found = [_decoded(blocks, form.block, form, dtype)]
    if left:
        found.append(_decoded(packed[None, whole * form.block_bytes :], left, form, dtype))
    return torch.cat([part.flatten() for part in found])[first : first + count]


def half_steps(packed: Tensor, count: int, form: Format) -> Tensor:
    """Return half the main step of each element's block, float32 ``(count,)``, of ``count`` encoded elements."""
    starts = torch.arange(-(-count // form.block), device=packed.device)[:, None] * form.block_bytes
    places = starts + torch.arange(HEADER_BYTES, device=packed.device)
    ends = packed[places].view(torch.bfloat16)[:, 1].float()
    return (ends / torch.full_like(ends, form.main_steps) * 0.5).repeat_interleave(form.block)[:count]


def _decoded(blocks: Tensor, count: int, form: Format, dtype: torch.dtype) -> Tensor:
    """Return the elements (R, count) of blocks; ``count`` is a multiple of 8."""
    if blocks.numel() == 0:
        return torch.empty(0, dtype=dtype, device=blocks.device)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    # a view as bfloat16 begins at an even byte of its storage
    header = blocks[:, :HEADER_BYTES].flatten().clone().view(torch.bfloat16).view(-1, 4).to(computed)
    mean, main_end, start, end = (header[:, i : i + 1] for i in range(4))
    codes = _unpacked(blocks[:, HEADER_BYTES : form.rest_start(count)], form.main_bits, count)
    high = 1 << (form.main_bits - 1)
    outlier, low = codes >= high, codes & (high - 1)
    if form.rest_bits:
        rest = _unpacked(blocks[:, form.rest_start(count) :], form.rest_bits, count)
        low = low | rest.gather(1, (outlier.cumsum(1) - 1).clamp(min=0)).masked_fill(~outlier, 0) * high
    main = (low - form.main_steps).to(computed) * (main_end / torch.full_like(main_end, form.main_steps))
    tail = (low & form.tail_steps).to(computed) * ((end - start) / torch.full_like(end, form.tail_steps)) + start
    tail = torch.where(low > form.tail_steps, -tail, tail)
    values = torch.where(outlier, tail, main) + mean
    return (values.clamp(-HALF_MOST, HALF_MOST) if dtype == torch.float16 else values).to(dtype)


def _unpacked(streams: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes of each row, int64 ``(R, count)``, 0 past the stream's end."""
    size = -(-count // 8) * bits
    streams = pad(streams, (0, size - streams.shape[1])).contiguous()
    codes: Tensor = bitpack.unpack(streams.flatten(), bits, len(streams) * size * 8 // bits)
    return codes.view(len(streams), -1)[:, :count]
