"""b-bit codes as one contiguous little-endian stream; :func:`pack` and :func:`unpack` are the reference.

Code i takes bits ``[i * b, i * b + b)``, bit k of the stream being bit ``k % 8`` of byte ``k // 8``. A stream of n
codes has exactly ``ceil(n * b / 8)`` bytes; the bits past its end are zero.

All functions raise a ValueError for a wrong argument, and a KernelError if the CUDA kernel cannot be compiled or
launched.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel
from actbench.ops.bitpack import cpu
from actbench.ops.library import Kernels, check_bits, define


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that ``count`` codes of ``bits`` bits take."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``(n,)``, each below ``2**bits``, in plain torch on any device."""
    places = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = codes.new_zeros(packed_bytes(codes.numel(), bits) * 8)
    stream[: codes.numel() * bits] = ((codes[:, None] >> places) & 1).reshape(-1)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=codes.device)
    # torch adds bytes up to int64 unless it is told a type
    return torch.sum(stream.reshape(-1, 8) * weights, 1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first ``count`` codes, int64 ``(count,)``, in plain torch on any device."""
    first_bit = torch.arange(count, device=packed.device) * bits
    # the last code may end with the last byte, and then has no second one
    bytes_and_zero = torch.cat([packed, packed.new_zeros(1)]).long()
    byte = first_bit // 8
    two_bytes = bytes_and_zero[byte] | (bytes_and_zero[byte + 1] << 8)
    codes: Tensor = (two_bytes >> (first_bit % 8)) & (2**bits - 1)
    return codes


def launch_pack(packed: Tensor, codes: Tensor, bits: int) -> None:
    """Launch ``pack_codes`` of ``kernels/bitpack.cu``."""
    count = codes.numel()
    rawkernel.launch("bitpack", "pack_codes", {"BITS": bits}, -(-count // 8), codes, packed, np.int64(count))


def launch_unpack(codes: Tensor, packed: Tensor, bits: int, count: int) -> None:
    """Launch ``unpack_codes`` of ``kernels/bitpack.cu``."""
    rawkernel.launch("bitpack", "unpack_codes", {"BITS": bits}, -(-count // 8), packed, codes, np.int64(count))


@define("pack_codes(Tensor codes, int bits) -> Tensor", Kernels(cpu.pack_codes, launch_pack))
def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack the low bits, 1 to 8, of contiguous uint8 codes ``(n,)``: uint8 ``(ceil(n * bits / 8),)``."""
    _check(codes, bits)
    return codes.new_empty(packed_bytes(codes.numel(), bits))


@define("unpack_codes(Tensor packed, int bits, SymInt count) -> Tensor", Kernels(cpu.unpack_codes, launch_unpack))
def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the ``count`` codes of a contiguous stream, uint8 ``(count,)``."""
    _check(packed, bits)
    if packed.numel() != packed_bytes(count, bits):
        raise ValueError(f"{count} codes of {bits} bits are {packed_bytes(count, bits)} bytes, found {packed.numel()}")
    return packed.new_empty(count)


def _check(codes: Tensor, bits: int) -> None:
    check_bits(bits)
    if codes.dtype != torch.uint8 or codes.dim() != 1 or not codes.is_contiguous():
        raise ValueError(f"codes must be a contiguous uint8 vector, found {codes.dtype} {tuple(codes.shape)}")


def check_packed(packed: Tensor, tensor: Tensor, bits: int) -> None:
    """Raise a ValueError unless ``packed`` is a stream of one code for each element of the tensor."""
    if packed.dtype != torch.uint8 or not packed.is_contiguous() or packed.device != tensor.device:
        raise ValueError(f"packed must be contiguous uint8 on {tensor.device}, found {packed.dtype} on {packed.device}")
    expected = packed_bytes(tensor.numel(), bits)
    if packed.numel() != expected:
        raise ValueError(f"packed must have {expected} bytes, found {packed.numel()}")
