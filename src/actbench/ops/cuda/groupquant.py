"""Codes in groups on CUDA: the launches of ``kernels/groupquant.cu``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import noise, rawkernel


def encode(codes: Tensor, meta: Tensor, x: Tensor, bits: int, group_size: int, seed: int, stochastic: bool) -> None:
    """Encode a vector.

    Args:
        codes: uint8 ``(ceil(n * bits / 8),)``, to be written.
        meta: int32 ``(ceil(n / group_size),)``, to be written.
        x: (n,) float32, float16 or bfloat16, contiguous.
        bits: 1 to 8.
        group_size: A multiple of 32, at most 1024.
        seed: Of the noise.
        stochastic: False for the nearest code.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    counts = np.int64(x.numel()), np.int64(codes.numel()), np.int32(group_size), np.int32(bits)
    arguments = x, codes, meta, *counts, np.uint64(noise.mixed(seed)), np.uint32(stochastic)
    _launch("encode", x.dtype, group_size, _threads(1, x.numel(), group_size), arguments)


def encode_rows(
    x: Tensor, widths: Tensor, size: int, group_size: int, seed: int, stochastic: bool
) -> tuple[Tensor, Tensor]:
    """Encode rows of their own widths; those whose codes would not fit are not written, and their words are NaN.

    Args:
        x: (R, F) float32, float16 or bfloat16, contiguous.
        widths: int32 ``(R,)``.
        size: Bytes of codes.
        group_size: A multiple of 32, at most 1024.
        seed: Of the noise.
        stochastic: False for the nearest code.

    Returns:
        uint8 ``(size,)`` and int32 ``(R * ceil(F / group_size),)``.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    rows, columns = x.shape
    codes, meta = _outputs(x, size, rows * -(-columns // group_size))
    counts = np.uint32(rows), np.int64(columns), np.int64(size), np.int32(group_size)
    places = widths, widths.cumsum(0, dtype=torch.int64)
    arguments = x, codes, meta, *counts, *places, np.uint64(noise.mixed(seed)), np.uint32(stochastic)
    _launch("encode_rows", x.dtype, group_size, _threads(rows, columns, group_size), arguments)
    return codes, meta


def words(x: Tensor, group_size: int) -> Tensor:
    """Return the words of the groups of rows.

    Args:
        x: (R, F) float32, float16 or bfloat16, contiguous.
        group_size: A multiple of 32, at most 1024.

    Returns:
        int32 ``(R, ceil(F / group_size))``.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    rows, columns = x.shape
    meta = torch.empty(rows, -(-columns // group_size), dtype=torch.int32, device=x.device)
    arguments = x, meta, np.uint32(rows), np.int64(columns), np.int32(group_size)
    _launch("words", x.dtype, group_size, _threads(rows, columns, group_size), arguments)
    return meta


def decode(codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, out: Tensor) -> None:
    """Write elements of a vector, from ``start`` on, to all of a contiguous tensor.

    Args:
        codes: uint8, as :func:`encode` gives it.
        meta: int32, as :func:`encode` gives it.
        bits: 1 to 8.
        group_size: As when encoding.
        start: Index of the first element.
        out: float32, float16 or bfloat16.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    counts = np.int64(out.numel()), np.int64(codes.numel()), np.int32(group_size), np.int32(bits), np.int64(start)
    threads = _threads(1, out.numel(), group_size, start)
    _launch("decode", out.dtype, group_size, threads, (codes, meta, out, *counts))


def decode_rows(codes: Tensor, meta: Tensor, widths: Tensor, group_size: int, first_row: int, out: Tensor) -> None:
    """Write rows of their own widths, from ``first_row`` on, to all of a contiguous matrix.

    Args:
        codes: uint8, as :func:`encode_rows` gives it.
        meta: int32, as :func:`encode_rows` gives it.
        widths: int32, of all rows.
        group_size: As when encoding.
        first_row: Index of the first row.
        out: (rows, F) float32, float16 or bfloat16.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    rows, columns = out.shape
    counts = np.uint32(rows), np.int64(columns), np.int64(codes.numel()), np.int32(group_size)
    places = widths[first_row:], widths.cumsum(0, dtype=torch.int64)[first_row:]
    arguments = codes, meta[first_row * -(-columns // group_size) :], out, *counts, *places
    _launch("decode_rows", out.dtype, group_size, _threads(rows, columns, group_size), arguments)


def _outputs(x: Tensor, size: int, groups: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(size, dtype=torch.uint8, device=x.device)
    return codes, torch.empty(groups, dtype=torch.int32, device=x.device)


def _threads(rows: int, columns: int, group_size: int, start: int = 0) -> int:
    """Return the lanes that have work: a warp for each group, or for each 256 elements of groups of 32, 64 and 128."""
    if columns == 0:
        return 0
    groups = -(-(start + columns) // group_size) - start // group_size
    together = 256 // group_size if group_size in (32, 64, 128) else 1
    return rows * -(-groups // together) * 32


def _launch(
    kernel: str, dtype: torch.dtype, group_size: int, threads: int, arguments: tuple[Tensor | np.generic, ...]
) -> None:
    macros: rawkernel.Macros = {"SCALAR": rawkernel.SCALARS[dtype], "TILES": 1 if group_size <= 256 else 4}
    rawkernel.launch("groupquant", f"groupquant_{kernel}", macros, threads, *arguments)
