"""What the kernels of groups would read past or misread is refused, before any of them and on fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.ops import bitpack
from actbench.ops.arguments import check_bits, check_contiguous


def check_groups(tensor: Tensor, group_size: int, dimensions: int) -> None:
    """Raise a ValueError unless this is a contiguous float tensor that may be cut into groups of a size."""
    check_contiguous(tensor)
    if tensor.dim() != dimensions:
        raise ValueError(f"the tensor must have {dimensions} dimensions, found shape {tuple(tensor.shape)}")
    if group_size % 32 or not 32 <= group_size <= 1024:
        raise ValueError(f"group_size must be a multiple of 32 from 32 to 1024, found {group_size}")


def _check_seed(seed: Tensor) -> None:
    if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device.type != "cpu":
        raise ValueError(f"the seed must be a 0-d int64 tensor on the CPU, found {seed.dtype} {tuple(seed.shape)}")


def _check_vector(vector: Tensor, dtype: torch.dtype, device: torch.device, what: str) -> None:
    if vector.dtype != dtype or vector.dim() != 1 or not vector.is_contiguous() or vector.device != device:
        found = f"{vector.dtype} {tuple(vector.shape)} on {vector.device}"
        raise ValueError(f"{what} must be a contiguous {dtype} vector on {device}, found {found}")


def check_encode(x: Tensor, bits: int, group_size: int, seed: Tensor) -> None:
    """Raise a ValueError unless these are arguments of ``groupquant_encode``."""
    check_bits(bits)
    check_groups(x, group_size, 1)
    _check_seed(seed)


def check_encode_to(
    codes: Tensor, meta: Tensor, x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool
) -> None:
    """Raise a ValueError unless these are arguments of ``groupquant_encode_``."""
    check_encode(x, bits, group_size, seed)
    _check_vector(codes, torch.uint8, x.device, "codes")
    _check_vector(meta, torch.int32, x.device, "meta")
    if (codes.numel(), meta.numel()) != (bitpack.packed_bytes(x.numel(), bits), -(-x.numel() // group_size)):
        found = f"{codes.numel()} bytes of codes and {meta.numel()} words"
        raise ValueError(f"{x.numel()} elements of {bits} bits in groups of {group_size} do not take {found}")


def check_decode(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int) -> None:
    """Raise a ValueError unless these are arguments of ``groupquant_decode_``."""
    check_bits(bits)
    check_groups(out, group_size, out.dim())
    _check_vector(codes, torch.uint8, out.device, "codes")
    _check_vector(meta, torch.int32, out.device, "meta")
    end = start + out.numel()
    if start < 0 or end > meta.numel() * group_size or bitpack.packed_bytes(end, bits) > codes.numel():
        held = f"{codes.numel()} bytes of codes of {bits} bits in {meta.numel()} groups of {group_size}"
        raise ValueError(f"elements {start} to {end} are not in {held}")


def check_encode_rows(x: Tensor, row_bits: Tensor, total_bits: int, group_size: int, seed: Tensor) -> None:
    """Raise a ValueError unless these are arguments of ``groupquant_encode_rows``."""
    check_groups(x, group_size, 2)
    _check_vector(row_bits, torch.int32, x.device, "row_bits")
    _check_seed(seed)
    if row_bits.numel() != x.shape[0] or total_bits < 0:
        raise ValueError(f"{x.shape[0]} rows need as many row_bits, found {row_bits.numel()} of sum {total_bits}")


def check_decode_rows(
    out: Tensor, codes: Tensor, meta: Tensor, row_bits: Tensor, group_size: int, first_row: int
) -> None:
    """Raise a ValueError unless these are arguments of ``groupquant_decode_rows``."""
    check_groups(out, group_size, 2)
    _check_vector(codes, torch.uint8, out.device, "codes")
    _check_vector(meta, torch.int32, out.device, "meta")
    _check_vector(row_bits, torch.int32, out.device, "row_bits")
    rows, last = row_bits.numel(), first_row + out.shape[0]
    if first_row < 0 or last > rows:
        raise ValueError(f"rows {first_row} to {last} of {rows} are not there")
    if meta.numel() != rows * -(-out.shape[1] // group_size):
        raise ValueError(f"{rows} rows of {out.shape[1]} elements have other groups than {meta.numel()}")
