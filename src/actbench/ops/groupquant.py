"""Numbers as codes of 1 to 8 bits in groups of 32 to 1024, each with two bounds of its own; unbiased.

Elements keep their order: a vector's codes are one stream as in :mod:`actbench.ops.bitpack`, so 1 element costs what
any number of them costs, and any part can be decoded alone. Each group costs one 32-bit word more, its smallest and
largest value as bfloat16. What a code means is in :mod:`actbench.ops.groups`, which is also the reference.

The operators are ``actbench::groupquant_encode`` and so on, and ``_words``; the functions below are how to call them.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from actbench.ops import bitpack, groups
from actbench.ops.cpu import groupquant as cpu
from actbench.ops.cuda import groupquant as cuda
from actbench.ops.grouparguments import (
    check_decode,
    check_decode_rows,
    check_encode,
    check_encode_rows,
    check_encode_to,
    check_groups,
)
from actbench.ops.library import define, direct


def packed_bytes(count: int, bits: int, group_size: int) -> int:
    """Return the bytes that ``count`` numbers take: their codes, and 4 for each group."""
    return bitpack.packed_bytes(count, bits) + 4 * -(-count // group_size)


def _kernels(tensor: Tensor) -> ModuleType:
    return cuda if tensor.is_cuda else cpu


def _encode_to(
    codes: Tensor, meta: Tensor, x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool
) -> None:
    check_encode_to(codes, meta, x, bits, group_size, seed, stochastic)
    if x.dtype == torch.float64:
        for out, found in zip((codes, meta), groups.encode(x, bits, group_size, seed, stochastic), strict=True):
            out.copy_(found)
    else:
        _kernels(x).encode(codes, meta, x, bits, group_size, int(seed.item()), stochastic)


def _encode_fake(x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
    check_encode(x, bits, group_size, seed)
    codes = torch.empty(bitpack.packed_bytes(x.numel(), bits), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(-(-x.numel() // group_size), dtype=torch.int32, device=x.device)


def _encode(x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
    codes, meta = _encode_fake(x, bits, group_size, seed, stochastic)
    _encode_to(codes, meta, x, bits, group_size, seed, stochastic)
    return codes, meta


def _decode_to(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int) -> None:
    check_decode(out, codes, meta, bits, group_size, start)
    if out.dtype == torch.float64:
        found = groups.decode(codes, meta, bits, group_size, start, out.numel(), out.dtype)
        out.copy_(found.view(out.shape))
    else:
        _kernels(out).decode(codes, meta, bits, group_size, start, out)


def _decode(
    codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, count: int, dtype: torch.dtype
) -> Tensor:
    out = cpu.empty(count, dtype) if codes.is_cpu else torch.empty(count, dtype=dtype, device=codes.device)
    _decode_to(out, codes, meta, bits, group_size, start)
    return out


def _decode_fake(
    codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, count: int, dtype: torch.dtype
) -> Tensor:
    out = codes.new_empty(count, dtype=dtype)
    check_decode(out, codes, meta, bits, group_size, start)
    return out


def _encode_rows(
    x: Tensor, row_bits: Tensor, total_bits: int, group_size: int, seed: Tensor, stochastic: bool
) -> tuple[Tensor, Tensor]:
    check_encode_rows(x, row_bits, total_bits, group_size, seed)
    if x.dtype == torch.float64:
        return groups.encode_rows(x, row_bits, total_bits, group_size, seed, stochastic)
    size = -(-x.shape[1] // 8) * total_bits
    made: tuple[Tensor, Tensor] = _kernels(x).encode_rows(x, row_bits, size, group_size, int(seed.item()), stochastic)
    return made


def _encode_rows_fake(
    x: Tensor, row_bits: Tensor, total_bits: int, group_size: int, seed: Tensor, stochastic: bool
) -> tuple[Tensor, Tensor]:
    check_encode_rows(x, row_bits, total_bits, group_size, seed)
    codes = x.new_empty(-(-x.shape[1] // 8) * total_bits, dtype=torch.uint8)
    return codes, x.new_empty(x.shape[0] * -(-x.shape[1] // group_size), dtype=torch.int32)


def _decode_rows_to(
    out: Tensor, codes: Tensor, meta: Tensor, row_bits: Tensor, group_size: int, first_row: int
) -> None:
    check_decode_rows(out, codes, meta, row_bits, group_size, first_row)
    kernels = groups if out.dtype == torch.float64 else _kernels(out)
    kernels.decode_rows(codes, meta, row_bits, group_size, first_row, out)


def _words(x: Tensor, group_size: int) -> Tensor:
    check_groups(x, group_size, 2)
    words: Tensor = groups.words_of(x, group_size) if x.dtype == torch.float64 else _kernels(x).words(x, group_size)
    return words


def _words_fake(x: Tensor, group_size: int) -> Tensor:
    check_groups(x, group_size, 2)
    return x.new_empty(x.shape[0], -(-x.shape[1] // group_size), dtype=torch.int32)


define(
    "groupquant_encode(Tensor x, int bits, int group_size, Tensor seed, bool stochastic) -> (Tensor, Tensor)",
    _encode,
    _encode_fake,
)
define(
    "groupquant_encode_(Tensor(a!) codes, Tensor(b!) meta, Tensor x, int bits, int group_size, Tensor seed,"
    " bool stochastic) -> ()",
    _encode_to,
    check_encode_to,
)
define(
    "groupquant_decode(Tensor codes, Tensor meta, int bits, int group_size, SymInt start, SymInt count,"
    " ScalarType dtype) -> Tensor",
    _decode,
    _decode_fake,
)
define(
    "groupquant_decode_(Tensor(a!) out, Tensor codes, Tensor meta, int bits, int group_size, SymInt start) -> ()",
    _decode_to,
    check_decode,
)
define(
    "groupquant_encode_rows(Tensor x, Tensor row_bits, SymInt total_bits, int group_size, Tensor seed,"
    " bool stochastic) -> (Tensor, Tensor)",
    _encode_rows,
    _encode_rows_fake,
)
define(
    "groupquant_decode_rows(Tensor(a!) out, Tensor codes, Tensor meta, Tensor row_bits, int group_size,"
    " SymInt first_row) -> ()",
    _decode_rows_to,
    check_decode_rows,
)
define("groupquant_words(Tensor x, int group_size) -> Tensor", _words, _words_fake)

_ops = torch.ops.actbench


def encode(x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool = True) -> tuple[Tensor, Tensor]:
    """Encode a vector.

    Args:
        x: (n,) float32, float16, bfloat16 or float64, contiguous; n may be 0.
        bits: 1 to 8.
        group_size: A multiple of 32 from 32 to 1024.
        seed: Of the noise: a 0-d int64 tensor on the CPU.
        stochastic: False for the nearest code, which needs no noise and is biased.

    Returns:
        uint8 ``(ceil(n * bits / 8),)``, the codes, and int32 ``(ceil(n / group_size),)``, the words of the groups.

    Raises:
        ValueError: An argument is not as above.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    if direct(x):
        return _encode(x, bits, group_size, seed, stochastic)
    made: tuple[Tensor, Tensor] = _ops.groupquant_encode.default(x, bits, group_size, seed, stochastic)
    return made


def encode_(
    codes: Tensor, meta: Tensor, x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool = True
) -> None:
    """Encode a vector over contiguous ones of the sizes that :func:`encode` gives, which may be parts of larger ones.

    Arguments, and what is raised, as :func:`encode`.
    """
    if direct(x):
        _encode_to(codes, meta, x, bits, group_size, seed, stochastic)
    else:
        _ops.groupquant_encode_.default(codes, meta, x, bits, group_size, seed, stochastic)


def decode(
    codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, count: int, dtype: torch.dtype
) -> Tensor:
    """Return elements ``start .. start + count - 1`` of an encoded vector.

    Args:
        codes: uint8, as :func:`encode` gives it.
        meta: int32, as :func:`encode` gives it.
        bits: 1 to 8.
        group_size: As when encoding.
        start: Index of the first element.
        count: How many.
        dtype: float32, float16, bfloat16 or float64.

    Returns:
        (count,) of ``dtype``.

    Raises:
        ValueError: An argument is not as above, or the elements are not there.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    if direct(codes):
        return _decode(codes, meta, bits, group_size, start, count, dtype)
    out: Tensor = _ops.groupquant_decode.default(codes, meta, bits, group_size, start, count, dtype)
    return out


def decode_(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int) -> None:
    """Write elements ``start .. start + out.numel() - 1`` of an encoded vector over a contiguous tensor of any shape.

    Arguments, and what is raised, as :func:`decode`.
    """
    if direct(out):
        _decode_to(out, codes, meta, bits, group_size, start)
    else:
        _ops.groupquant_decode_.default(out, codes, meta, bits, group_size, start)


def encode_rows(
    x: Tensor, row_bits: Tensor, total_bits: int, group_size: int, seed: Tensor, stochastic: bool = True
) -> tuple[Tensor, Tensor]:
    """Encode rows, each with a number of bits of its own; no group belongs to two rows.

    Row r takes ``ceil(F / 8) * row_bits[r]`` bytes, after those of the rows before it. Nothing waits for the device: if
    its ``row_bits`` are not from 1 to 8, or their sum is above ``total_bits``, rows that do not fit are decoded to NaN.

    Args:
        x: (R, F) float32, float16, bfloat16 or float64, contiguous.
        row_bits: int32 ``(R,)`` on the device of x, each 1 to 8.
        total_bits: Their sum.
        group_size: A multiple of 32 from 32 to 1024.
        seed: Of the noise, which is that of the flattened rows: a 0-d int64 tensor on the CPU.
        stochastic: False for the nearest code, which needs no noise and is biased.

    Returns:
        uint8 ``(ceil(F / 8) * total_bits,)``, the codes, and int32 ``(R * ceil(F / group_size),)``, the groups' words.

    Raises:
        ValueError: An argument is not as above.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    if direct(x):
        return _encode_rows(x, row_bits, total_bits, group_size, seed, stochastic)
    made: tuple[Tensor, Tensor] = _ops.groupquant_encode_rows.default(
        x, row_bits, total_bits, group_size, seed, stochastic
    )
    return made


def decode_rows(codes: Tensor, meta: Tensor, row_bits: Tensor, group_size: int, first_row: int, out: Tensor) -> None:
    """Write rows ``first_row .. first_row + out.shape[0] - 1`` over a contiguous (rows, F) tensor of a float type.

    Args:
        codes: uint8, as :func:`encode_rows` gives it.
        meta: int32, as :func:`encode_rows` gives it.
        row_bits: int32 ``(R,)``, of all rows.
        group_size: As when encoding.
        first_row: Index of the first row.
        out: What to write to.

    Raises:
        ValueError: An argument is not as above, or the rows are not there.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    if direct(out):
        _decode_rows_to(out, codes, meta, row_bits, group_size, first_row)
    else:
        _ops.groupquant_decode_rows.default(out, codes, meta, row_bits, group_size, first_row)


def ranges(meta: Tensor) -> Tensor:
    """Return maximum minus offset of each word, float32 of the shape of ``meta``; NaN where a value was not finite."""
    low, high = groups.bounds_of(meta)
    return high - low


def group_ranges(x: Tensor, group_size: int) -> Tensor:
    """Return what :func:`ranges` will give for the groups of rows (R, F), before encoding: ``(R, groups a row)``."""
    words: Tensor = _words(x, group_size) if direct(x) else _ops.groupquant_words.default(x, group_size)
    return ranges(words)
