"""SmaQ blocks in plain torch, the reference: every kernel must agree with it bit for bit.

After Shoghi et al., "SmaQ: Smart Quantization for DNN Training by Exploiting Value Clustering" (2021): few bits for
values near the mean, more for outliers. In each block of B elements exactly k are outliers, so the bytes are known
beforehand. In float32 (float64 for float64), each operation rounded by itself:

    mean      the sum of rint(x * s) over B, divided by s, as bfloat16; s is the power of two that brings the largest
              magnitude to 2**19 .. 2**20, so the sum is one of integers, whose order does not matter
    d         x - mean
    outliers  the k largest |d|; among equals the first
    ends      main end: the largest |d| of the others; tail start, tail end: the least and the largest |d| of outliers
    steps     main step = main end / M, tail step = (tail end - tail start) / T
    main      code = (rint(d * (65536 M / main end)) + 65536 M + w) >> 16
              value = (code - M) * main step + mean
    outlier   code = (rint((|d| - tail start) * (65536 T / (tail end - tail start))) + w) >> 16, its sign above it
              value = sign * (code * tail step + tail start) + mean

where M = ``main_steps``, T = ``tail_steps`` and w is number i of :func:`actbench.ops.noise.lanes`, 16 bits, for element
i of the tensor: the mean over w is the element. For the nearest code w is 32768. The ends first become bfloat16,
rounded so that nothing lies outside; no upper end is below :data:`LEAST`, which keeps quotients finite. The deviation
sigma of SmaQ would divide d and the ends, and cancels. In its place the tail has a start, and no code is spent on the
gap between main values and outliers.

If a value is NaN, infinite, or as large as :data:`HUGE`, the header is NaN, and the whole block decodes to NaN.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from actbench.methods.formats.ops.smaq.format import HEADER_BYTES, Format
from actbench.ops import bitpack, noise
from actbench.ops.library import wide

HUGE: Final = 2.0**126
"""The magnitude from which a value makes its block NaN; the difference of two smaller values is below 2**127."""

LEAST: Final = 2.0**-90
"""The least main end and tail end."""

NAN_HALF: Final = 0x7FC0
"""Each of the four numbers in the header of a NaN block."""

HALF_MOST: Final = 65504.0
"""The largest float16: decoded values are clamped to it, since ends are rounded outwards."""


def encode(x: Tensor, seed: int | Tensor, stochastic: bool, *parts: int) -> Tensor:
    """Encode the elements of a tensor."""
    x, form = x.reshape(-1), Format(*parts)
    whole = x.numel() // form.block * form.block
    blocks = [_encoded(x[:whole].view(-1, form.block), 0, form, int(seed), stochastic)]
    if whole < x.numel():
        blocks.append(_encoded(x[None, whole:], whole, form, int(seed), stochastic))
    return torch.cat([part.flatten() for part in blocks])


def _encoded(x: Tensor, first: int, form: Format, seed: int, stochastic: bool) -> Tensor:
    """Return the bytes of blocks (R, count), whose first element is number ``first`` of the tensor."""
    blocks, count = x.shape
    if x.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    values = wide(x)
    bad = ~(values.abs() < HUGE).all(1, keepdim=True)
    values = values.masked_fill(bad, 0)
    mean = _mean_of(values)
    outlier, ends = _parted(values - mean, form.outliers_of(count))
    lanes = noise.lanes(seed, first, x.numel(), 16, x.device).view(x.shape) if stochastic else 32768
    main = _main_codes(values - mean, ends[0], form, lanes)
    tail = _tail_codes(values - mean, ends[1], ends[2], form, lanes)
    high = 1 << (form.main_bits - 1)
    codes = torch.where(outlier, high | (tail & (high - 1)), main).masked_fill(bad, 0)
    rest = (tail >> (form.main_bits - 1))[outlier].view(blocks, -1).masked_fill(bad, 0)
    header = torch.cat([part.to(torch.bfloat16) for part in (mean, *ends)], 1).view(torch.int16)
    header = header.masked_fill(bad, NAN_HALF).view(torch.uint8)
    parts = [header, _packed(codes, form.main_bits, -(-count // 8) * form.main_bits)]
    if form.rest_bits:
        parts.append(_packed(rest, form.rest_bits, form.bytes_of(count) - form.rest_start(count)))
    return torch.cat(parts, 1)


def _mean_of(values: Tensor) -> Tensor:
    """Return the mean of each block as a bfloat16, in the type of the values."""
    _, exponent = torch.frexp(values.abs().amax(1, keepdim=True))
    exponent = exponent.clamp(min=-93)  # else the scale would not be finite; such values are far below LEAST
    one = torch.ones_like(values[:, :1])
    total = (values * torch.ldexp(one, 20 - exponent)).round().long().sum(1, keepdim=True)
    mean = total.to(values.dtype) / (one * values.shape[1]) * torch.ldexp(one, exponent - 20)
    return mean.to(torch.bfloat16).to(values.dtype)


def _parted(d: Tensor, outliers: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return which elements are outliers, and main end, tail start and tail end."""
    distance = d.abs()
    order = distance.argsort(dim=1, descending=True, stable=True)
    outlier = torch.zeros_like(d, dtype=torch.bool).scatter_(1, order[:, :outliers], True)
    zero = torch.zeros_like(d[:, :1])
    start, end = zero, zero
    if outliers:
        start = distance.gather(1, order[:, outliers - 1 : outliers])
        end = distance.gather(1, order[:, :1])
    main = distance.gather(1, order[:, outliers : outliers + 1]) if outliers < d.shape[1] else zero
    main, end = (_outwards(upper, torch.inf).clamp(min=LEAST) for upper in (main, end))
    return outlier, (main, _outwards(start, -torch.inf), end)


def _outwards(end: Tensor, way: float) -> Tensor:
    """Return ends as bfloat16, in their own type, rounded the way of minus or plus infinity."""
    near = end.to(torch.bfloat16)
    inside = near.to(end.dtype) > end if way < 0 else near.to(end.dtype) < end
    return torch.where(inside, torch.nextafter(near, way * torch.ones_like(near)), near).to(end.dtype)


def _main_codes(d: Tensor, end: Tensor, form: Format, lanes: Tensor | int) -> Tensor:
    top = 65536 * form.main_steps
    place = (d * (torch.full_like(end, top) / end)).round().clamp(-top, top).long()
    return (place + top + lanes) >> 16


def _tail_codes(d: Tensor, start: Tensor, end: Tensor, form: Format, lanes: Tensor | int) -> Tensor:
    top, span = 65536 * form.tail_steps, end - start
    slope = torch.where(span > 0, torch.full_like(span, top) / span, 0)
    place = ((d.abs() - start) * slope).round().clamp(0, top).long()
    return ((place + lanes) >> 16) | ((d < 0).long() << (form.outlier_bits - 2))


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
