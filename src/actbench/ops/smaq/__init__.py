"""SmaQ, packed: few bits for numbers near the mean of their block, more for its outliers, of which each has so many.

The bytes are in :mod:`actbench.ops.smaq.format`, what a code means in :mod:`actbench.ops.smaq.reference`. Encoding is
one pass and waits for nothing; blocks can be read and replaced alone.

All raise a ValueError where an argument is not as they say, and a KernelError where the kernel for CUDA cannot be
compiled or launched.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel
from actbench.ops.arguments import check_contiguous, check_seed, check_vector
from actbench.ops.library import Implementation, Kernels, define
from actbench.ops.noise import state_of
from actbench.ops.smaq import cpu, reference
from actbench.ops.smaq.format import SMAQ, Format, check_format

_FORMAT = "int main_bits, int outlier_bits, int outliers, int block"


def launch_encode(
    packed: Tensor, x: Tensor, first_block: int, form: Format, seed: int | Tensor, stochastic: bool
) -> None:
    """Launch ``smaq_encode`` of ``kernels/smaq.cu``."""
    target = packed[first_block * form.block_bytes :]
    counts = np.int64(x.numel()), np.int64(first_block)
    noisy = state_of(seed), np.uint32(stochastic)
    _launch("encode", x.dtype, form, -(-x.numel() // form.block), (x, target, *counts, *_parts(form), *noisy))


def launch_decode(packed: Tensor, first: int, form: Format, out: Tensor) -> None:
    """Launch ``smaq_decode`` of ``kernels/smaq.cu``."""
    before, room = first // form.block, form.room(packed.numel())
    blocks = -(-(first + out.numel()) // form.block) - before if out.numel() else 0
    counts = np.int64(packed.numel()), np.int64(room), np.int64(first), np.int64(out.numel())
    _launch("decode", out.dtype, form, blocks, (packed, out, *counts, *_parts(form)))


def _parts(form: Format) -> tuple[np.int32, ...]:
    return tuple(np.int32(part) for part in form)


def _launch(
    kernel: str, dtype: torch.dtype, form: Format, blocks: int, arguments: tuple[Tensor | np.generic, ...]
) -> None:
    macros: rawkernel.Macros = {"SCALAR": rawkernel.SCALARS[dtype], "TILES": 1 if form.block <= 256 else 4}
    rawkernel.launch("smaq", f"smaq_{kernel}", macros, 32 * blocks, *arguments)


def _encoding(fill: Implementation) -> Implementation:
    return lambda packed, x, seed, stochastic, *parts: fill(packed, x, 0, Format(*parts), seed, stochastic)


def _encoding_into(fill: Implementation) -> Implementation:
    return lambda packed, x, first_block, seed, stochastic, *parts: fill(
        packed, x, first_block, Format(*parts), seed, stochastic
    )


def _decoding(fill: Implementation) -> Implementation:
    return lambda out, packed, first, count, dtype, *parts: fill(packed, first, Format(*parts), out)


def _decoding_into(fill: Implementation) -> Implementation:
    return lambda out, packed, first, *parts: fill(packed, first, Format(*parts), out)


_ENCODE = cpu.encode_into, launch_encode, reference.encode_into
_DECODE = cpu.decode_into, launch_decode, reference.decode_into


@define(
    f"smaq_encode(Tensor x, Tensor seed, bool stochastic, {_FORMAT}) -> Tensor",
    Kernels(*map(_encoding, _ENCODE)),
)
def _encode(x: Tensor, seed: Tensor, stochastic: bool, *parts: int) -> Tensor:
    form = Format(*parts)
    _check_encode(x, seed, form)
    return x.new_empty(form.packed_bytes(x.numel()), dtype=torch.uint8)


@define(
    f"smaq_encode_(Tensor(a!) packed, Tensor x, SymInt first_block, Tensor seed, bool stochastic, {_FORMAT}) -> ()",
    Kernels(*map(_encoding_into, _ENCODE)),
    decided_by="x",
)
def _encode_into(packed: Tensor, x: Tensor, first_block: int, seed: Tensor, stochastic: bool, *parts: int) -> None:
    form = Format(*parts)
    _check_encode(x, seed, form)
    check_vector(packed, torch.uint8, x.device, "packed")
    start, end = first_block * form.block_bytes, first_block * form.block_bytes + form.packed_bytes(x.numel())
    if start < 0 or end > packed.numel():
        raise ValueError(f"bytes {start} to {end} of {packed.numel()} are not there")
    if x.numel() % form.block and end != packed.numel():
        raise ValueError(f"{x.numel()} elements are no whole blocks of {form.block}, and do not end with the last one")


@define(
    f"smaq_decode(Tensor packed, SymInt first, SymInt count, ScalarType dtype, {_FORMAT}) -> Tensor",
    Kernels(*map(_decoding, _DECODE)),
)
def _decode(packed: Tensor, first: int, count: int, dtype: torch.dtype, *parts: int) -> Tensor:
    out = packed.new_empty(count, dtype=dtype)
    _check_decode(out, packed, first, Format(*parts))
    return out


@define(
    f"smaq_decode_(Tensor(a!) out, Tensor packed, SymInt first, {_FORMAT}) -> ()",
    Kernels(*map(_decoding_into, _DECODE)),
)
def _decode_into(out: Tensor, packed: Tensor, first: int, *parts: int) -> None:
    _check_decode(out, packed, first, Format(*parts))


def _check_encode(x: Tensor, seed: Tensor, form: Format) -> None:
    check_format(form)
    check_contiguous(x)
    check_seed(seed)


def _check_decode(out: Tensor, packed: Tensor, first: int, form: Format) -> None:
    check_format(form)
    check_contiguous(out)
    check_vector(packed, torch.uint8, out.device, "packed")
    room = form.room(packed.numel())
    if first < 0 or first + out.numel() > room:
        raise ValueError(f"elements {first} to {first + out.numel()} are not in {packed.numel()} bytes of {form}")


def encode(x: Tensor, seed: Tensor, form: Format = SMAQ, *, stochastic: bool = True) -> Tensor:
    """Encode the elements of a tensor, in order.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous, of any shape, n elements; n may be 0.
        seed: Of the noise: a 0-d int64 tensor on the CPU.
        form: Which SmaQ.
        stochastic: False for the nearest code, which needs no noise and is biased.

    Returns:
        uint8 ``(form.packed_bytes(n),)``. A block with a value that is not finite, or from 2**126 on, decodes to NaN.
    """
    return _encode(x, seed, stochastic, *form)


def encode_into(
    packed: Tensor, x: Tensor, first_block: int, seed: Tensor, form: Format = SMAQ, *, stochastic: bool = True
) -> None:
    """Replace blocks of what :func:`encode` gave, in place, by those of other numbers; else as :func:`encode`.

    The noise is that of the elements' places among all: to encode a tensor in parts is to encode it whole. ``x`` is
    whole blocks, or blocks up to the end, of which the first is number ``first_block``.
    """
    _encode_into(packed, x, first_block, seed, stochastic, *form)


def decode(packed: Tensor, count: int, dtype: torch.dtype, first: int = 0, form: Format = SMAQ) -> Tensor:
    """Return elements ``first .. first + count - 1`` of what :func:`encode` gave: (count,) of a float type."""
    return _decode(packed, first, count, dtype, *form)


def decode_(out: Tensor, packed: Tensor, first: int = 0, form: Format = SMAQ) -> None:
    """Write elements ``first .. first + out.numel() - 1`` of what was encoded over a contiguous tensor of any shape."""
    _decode_into(out, packed, first, *form)
