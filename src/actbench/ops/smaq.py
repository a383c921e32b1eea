"""SmaQ, packed: few bits for numbers near the mean of their block, more for its outliers, of which each has so many.

The format and its bytes are in :mod:`actbench.ops.smaqformat`, what a code means in :mod:`actbench.ops.smaqblocks`,
which is also the reference. Encoding is one pass and waits for nothing; blocks can be read and replaced alone.

The operators are ``actbench::smaq_encode``, ``smaq_encode_``, ``smaq_decode`` and ``smaq_decode_``; the functions below
are how to call them. These take the format apart: bits of main and outlier codes, outliers of a block, its elements.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from actbench.ops import smaqblocks
from actbench.ops.cpu import smaq as cpu
from actbench.ops.cpu.groupquant import empty
from actbench.ops.cuda import smaq as cuda
from actbench.ops.library import define, direct
from actbench.ops.smaqformat import Format, check_decode, check_encode, check_encode_into, format_of


def _kernels(tensor: Tensor) -> ModuleType:
    return cuda if tensor.is_cuda else cpu


def _encode_to(packed: Tensor, x: Tensor, first_block: int, seed: Tensor, stochastic: bool, form: Format) -> None:
    value = int(seed.item())
    if x.dtype == torch.float64:
        found = smaqblocks.encode(x.view(-1), first_block, form, value, stochastic)
        packed[first_block * form.block_bytes :][: found.numel()] = found
    else:
        _kernels(x).encode_into(packed, x, first_block, form, value, stochastic)


def _encode(x: Tensor, seed: Tensor, stochastic: bool, *parts: int) -> Tensor:
    form = Format(*parts)
    packed = _encode_fake(x, seed, stochastic, *parts)
    _encode_to(packed, x, 0, seed, stochastic, form)
    return packed


def _encode_fake(x: Tensor, seed: Tensor, stochastic: bool, *parts: int) -> Tensor:
    form = Format(*parts)
    check_encode(x, seed, form)
    return x.new_empty(form.packed_bytes(x.numel()), dtype=torch.uint8)


def _encode_into(packed: Tensor, x: Tensor, first_block: int, seed: Tensor, stochastic: bool, *parts: int) -> None:
    _encode_into_fake(packed, x, first_block, seed, stochastic, *parts)
    _encode_to(packed, x, first_block, seed, stochastic, Format(*parts))


def _encode_into_fake(packed: Tensor, x: Tensor, first_block: int, seed: Tensor, stochastic: bool, *parts: int) -> None:
    check_encode_into(packed, x, first_block, seed, Format(*parts))


def _decode_to(out: Tensor, packed: Tensor, first: int, *parts: int) -> None:
    form = Format(*parts)
    check_decode(out, packed, first, form)
    if out.dtype == torch.float64:
        out.copy_(smaqblocks.decode(packed, first, out.numel(), form, out.dtype).view(out.shape))
    else:
        _kernels(out).decode(packed, first, form, out)


def _decode_to_fake(out: Tensor, packed: Tensor, first: int, *parts: int) -> None:
    check_decode(out, packed, first, Format(*parts))


def _decode(packed: Tensor, first: int, count: int, dtype: torch.dtype, *parts: int) -> Tensor:
    out = empty(count, dtype) if packed.is_cpu else torch.empty(count, dtype=dtype, device=packed.device)
    _decode_to(out, packed, first, *parts)
    return out


def _decode_fake(packed: Tensor, first: int, count: int, dtype: torch.dtype, *parts: int) -> Tensor:
    out = packed.new_empty(count, dtype=dtype)
    check_decode(out, packed, first, Format(*parts))
    return out


_FORMAT = "int main_bits, int outlier_bits, int outliers, int block"
define(f"smaq_encode(Tensor x, Tensor seed, bool stochastic, {_FORMAT}) -> Tensor", _encode, _encode_fake)
define(
    f"smaq_encode_(Tensor(a!) packed, Tensor x, SymInt first_block, Tensor seed, bool stochastic, {_FORMAT}) -> ()",
    _encode_into,
    _encode_into_fake,
)
define(
    f"smaq_decode(Tensor packed, SymInt first, SymInt count, ScalarType dtype, {_FORMAT}) -> Tensor",
    _decode,
    _decode_fake,
)
define(
    f"smaq_decode_(Tensor(a!) out, Tensor packed, SymInt first, {_FORMAT}) -> ()",
    _decode_to,
    _decode_to_fake,
)

_ops = torch.ops.actbench


def packed_bytes(
    count: int, *, main_bits: int = 6, outlier_bits: int = 7, outliers: float = 1 / 4, block: int = 256
) -> int:
    """Return the bytes that ``count`` numbers take.

    That is ``main_bits + (outlier_bits - main_bits) * outliers + 64 / block`` bits a number of whole blocks, where the
    outliers' bits fill whole bytes; see :mod:`actbench.ops.smaqformat`. Arguments and errors are :func:`encode`'s.
    """
    return format_of(main_bits, outlier_bits, outliers, block).packed_bytes(count)


def encode(
    x: Tensor,
    seed: Tensor,
    *,
    main_bits: int = 6,
    outlier_bits: int = 7,
    outliers: float = 1 / 4,
    block: int = 256,
    stochastic: bool = True,
) -> Tensor:
    """Encode the elements of a tensor, in order.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous, of any shape, n elements; n may be 0.
        seed: Of the noise: a 0-d int64 tensor on the CPU.
        main_bits: Bits of an element that is no outlier, 3 to 8.
        outlier_bits: Bits of an outlier, ``main_bits`` to 8.
        outliers: Their share of each block, 0 to 1; ``outliers * block`` must be whole.
        block: Elements of a block, a multiple of 32 from 64 to 1024.
        stochastic: False for the nearest code, which needs no noise and is biased.

    Returns:
        uint8 ``(packed_bytes(n),)``. A block with a value that is not finite, or from 2**126 on, is decoded to NaN.

    Raises:
        ValueError: An argument is not as above.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    form = format_of(main_bits, outlier_bits, outliers, block)
    if direct(x):
        return _encode(x, seed, stochastic, *form)
    packed: Tensor = _ops.smaq_encode.default(x, seed, stochastic, *form)
    return packed


def encode_into(
    packed: Tensor,
    x: Tensor,
    first_block: int,
    seed: Tensor,
    *,
    main_bits: int = 6,
    outlier_bits: int = 7,
    outliers: float = 1 / 4,
    block: int = 256,
    stochastic: bool = True,
) -> None:
    """Replace blocks of what :func:`encode` gave, in place, by those of other numbers.

    The noise is that of the elements' places among all: to encode a tensor in parts is to encode it whole.

    Args:
        packed: uint8, as :func:`encode` gives it.
        x: What to put there: whole blocks, or blocks up to the end; else as in :func:`encode`.
        first_block: Index of the first block.
        seed: As in :func:`encode`, and so all that follows.
        main_bits: As when encoding.
        outlier_bits: As when encoding.
        outliers: As when encoding.
        block: As when encoding.
        stochastic: False for the nearest code.

    Raises:
        ValueError: An argument is not as above, or the blocks are not there.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    form = format_of(main_bits, outlier_bits, outliers, block)
    if direct(packed):
        _encode_into(packed, x, first_block, seed, stochastic, *form)
    else:
        _ops.smaq_encode_.default(packed, x, first_block, seed, stochastic, *form)


def decode(
    packed: Tensor,
    count: int,
    dtype: torch.dtype,
    first: int = 0,
    *,
    main_bits: int = 6,
    outlier_bits: int = 7,
    outliers: float = 1 / 4,
    block: int = 256,
) -> Tensor:
    """Return elements ``first .. first + count - 1`` of what was encoded.

    Args:
        packed: uint8, as :func:`encode` gives it.
        count: How many.
        dtype: float32, float16, bfloat16 or float64.
        first: Index of the first element.
        main_bits: As when encoding.
        outlier_bits: As when encoding.
        outliers: As when encoding.
        block: As when encoding.

    Returns:
        (count,) of ``dtype``.

    Raises:
        ValueError: An argument is not as above, or the elements are not there.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    form = format_of(main_bits, outlier_bits, outliers, block)
    if direct(packed):
        return _decode(packed, first, count, dtype, *form)
    out: Tensor = _ops.smaq_decode.default(packed, first, count, dtype, *form)
    return out


def decode_(
    out: Tensor,
    packed: Tensor,
    first: int = 0,
    *,
    main_bits: int = 6,
    outlier_bits: int = 7,
    outliers: float = 1 / 4,
    block: int = 256,
) -> None:
    """Write elements ``first .. first + out.numel() - 1`` of what was encoded over a contiguous tensor of any shape.

    Arguments, and what is raised, as :func:`decode`.
    """
    form = format_of(main_bits, outlier_bits, outliers, block)
    if direct(out):
        _decode_to(out, packed, first, *form)
    else:
        _ops.smaq_decode_.default(out, packed, first, *form)
