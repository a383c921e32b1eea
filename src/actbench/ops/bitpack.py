"""b-bit codes as one contiguous little-endian stream.

``actbench::pack_codes(codes, bits)`` packs, ``actbench::unpack_codes(packed, bits, count)`` reads them back as uint8.
:func:`pack` and :func:`unpack` are the reference, in plain torch on any device.

Code i stands at bits ``[i * b, i * b + b)``, bit k of the stream being bit ``k % 8`` of byte ``k // 8``. A stream of n
codes has exactly ``ceil(n * b / 8)`` bytes; the bits past its end are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.ops.cpu import bitpack as cpu
from actbench.ops.cuda import bitpack as cuda
from actbench.ops.library import define


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


def _check_codes(codes: Tensor, bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be from 1 to 8, found {bits}")
    if codes.dtype != torch.uint8 or codes.dim() != 1 or not codes.is_contiguous():
        raise ValueError(f"codes must be a contiguous uint8 vector, found {codes.dtype} {tuple(codes.shape)}")


def _check_stream(packed: Tensor, bits: int, count: int) -> None:
    _check_codes(packed, bits)
    if packed.numel() != packed_bytes(count, bits):
        raise ValueError(f"{count} codes of {bits} bits are {packed_bytes(count, bits)} bytes, found {packed.numel()}")


def _pack_cpu(codes: Tensor, bits: int) -> Tensor:
    _check_codes(codes, bits)
    return cpu.pack_codes(codes, bits)


def _pack_cuda(codes: Tensor, bits: int) -> Tensor:
    _check_codes(codes, bits)
    return cuda.pack_codes(codes, bits)


def _pack_fake(codes: Tensor, bits: int) -> Tensor:
    _check_codes(codes, bits)
    return codes.new_empty(packed_bytes(codes.numel(), bits))


def _unpack_cpu(packed: Tensor, bits: int, count: int) -> Tensor:
    _check_stream(packed, bits, count)
    return cpu.unpack_codes(packed, bits, count)


def _unpack_cuda(packed: Tensor, bits: int, count: int) -> Tensor:
    _check_stream(packed, bits, count)
    return cuda.unpack_codes(packed, bits, count)


def _unpack_fake(packed: Tensor, bits: int, count: int) -> Tensor:
    _check_stream(packed, bits, count)
    return packed.new_empty(count)


_PACK = "pack_codes(Tensor codes, int bits) -> Tensor"
_UNPACK = "unpack_codes(Tensor packed, int bits, SymInt count) -> Tensor"
define(_PACK, {"CPU": _pack_cpu, "CUDA": _pack_cuda}, _pack_fake)
define(_UNPACK, {"CPU": _unpack_cpu, "CUDA": _unpack_cuda}, _unpack_fake)

pack_codes = torch.ops.actbench.pack_codes.default
unpack_codes = torch.ops.actbench.unpack_codes.default
