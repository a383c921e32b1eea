"""Numbers as codes of 1 to 8 bits between two bounds that all of them share, to compare :mod:`groupquant` with.

A code means what it means there (:mod:`actbench.ops.groups`), of one group that is as large as the vector. Everything
is in plain torch on any device, a piece at a time, so that what it makes on the way stays small.

The operators are ``actbench::onegroup_encode`` and ``_decode``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from actbench.ops import bitpack, groups
from actbench.ops.arguments import check_bits, check_contiguous
from actbench.ops.library import EVERYWHERE, define

PIECE = 2**18
"""Elements of a piece, a multiple of 8, so that its codes begin at a whole byte."""


def _pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Give the ends of pieces that cover ``first .. last - 1``; each starts at a multiple of 8."""
    for start in range(first // 8 * 8, last, PIECE):
        yield start, min(last, start + PIECE)


def _check(x: Tensor, bits: int) -> None:
    check_bits(bits)
    check_contiguous(x)
    if x.dim() != 1:
        raise ValueError(f"the tensor must be a vector, found shape {tuple(x.shape)}")


def _encode(x: Tensor, bits: int, seed: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
    _check(x, bits)
    codes = x.new_empty(bitpack.packed_bytes(x.numel(), bits), dtype=torch.uint8)
    if x.numel() == 0:
        return codes, x.new_empty(0, dtype=torch.int32)
    words = groups.words_of(torch.stack(torch.aminmax(x))[None], 2)
    most = torch.full((1,), 2**bits - 1, device=x.device)
    for index, (start, end) in enumerate(_pieces(0, x.numel())):
        piece = x[start:end]
        found = groups.codes_of(piece[None], words, most, piece.numel(), int(seed.item()) + index, stochastic)
        stream = bitpack.pack_codes(found[0], bits)
        codes[start * bits // 8 :][: stream.numel()] = stream
    return codes, words[0]


def _encode_fake(x: Tensor, bits: int, seed: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
    _check(x, bits)
    codes = x.new_empty(bitpack.packed_bytes(x.numel(), bits), dtype=torch.uint8)
    return codes, x.new_empty(min(1, x.numel()), dtype=torch.int32)


def _decode(codes: Tensor, meta: Tensor, bits: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    check_bits(bits)
    out = codes.new_empty(count, dtype=dtype)
    most = torch.full((1,), 2**bits - 1, device=codes.device)
    for first, end in _pieces(start, start + count):
        stream = codes[first * bits // 8 :][: bitpack.packed_bytes(end - first, bits)]
        found = bitpack.unpack_codes(stream, bits, end - first)
        skipped = max(0, start - first)
        out[first + skipped - start : end - start] = groups.values_of(found[skipped:], meta, most, dtype)
    return out


def _decode_fake(codes: Tensor, meta: Tensor, bits: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    check_bits(bits)
    return codes.new_empty(count, dtype=dtype)


_ENCODE = "onegroup_encode(Tensor x, int bits, Tensor seed, bool stochastic) -> (Tensor, Tensor)"
_DECODE = "onegroup_decode(Tensor codes, Tensor meta, int bits, SymInt start, SymInt count, ScalarType dtype) -> Tensor"
define(_ENCODE, {EVERYWHERE: _encode}, _encode_fake)
define(_DECODE, {EVERYWHERE: _decode}, _decode_fake)


def encode(x: Tensor, bits: int, seed: Tensor, stochastic: bool = True) -> tuple[Tensor, Tensor]:
    """Encode a vector.

    Args:
        x: (n,), contiguous, of a float type.
        bits: 1 to 8.
        seed: Of the noise; 0-d int64 on the CPU.
        stochastic: False for the nearest code, which needs no noise and is biased.

    Returns:
        uint8 ``(ceil(n * bits / 8),)``, the codes, and int32 ``(1,)``, both bounds as bfloat16.

    Raises:
        ValueError: An argument is not as above.
    """
    made: tuple[Tensor, Tensor] = torch.ops.actbench.onegroup_encode.default(x, bits, seed, stochastic)
    return made


def decode(codes: Tensor, meta: Tensor, bits: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return elements ``start .. start + count - 1`` of what :func:`encode` was given, of a float type.

    Raises:
        ValueError: An argument is not as it was when encoding.
    """
    found: Tensor = torch.ops.actbench.onegroup_decode.default(codes, meta, bits, start, count, dtype)
    return found
