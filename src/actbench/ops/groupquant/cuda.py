"""Codes in groups on CUDA: the launches of ``kernels/groupquant.cu``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel
from actbench.ops.noise import state_of


def encode(
    codes: Tensor, meta: Tensor, x: Tensor, bits: int, group_size: int, seed: int | Tensor, stochastic: bool
) -> None:
    """Encode a vector."""
    counts = np.int64(x.numel()), np.int64(codes.numel()), np.int32(group_size), np.int32(bits)
    arguments = x, codes, meta, *counts, state_of(seed), np.uint32(stochastic)
    _launch("encode", x.dtype, group_size, _threads(1, x.numel(), group_size), arguments)


def encode_rows(
    codes: Tensor,
    meta: Tensor,
    x: Tensor,
    widths: Tensor,
    total_bits: int,
    group_size: int,
    seed: int | Tensor,
    stochastic: bool,
) -> None:
    """Encode rows of their own widths; those that would not fit are not written, and their words are NaN."""
    rows, columns = x.shape
    counts = np.uint32(rows), np.int64(columns), np.int64(codes.numel()), np.int32(group_size)
    places = widths, widths.cumsum(0, dtype=torch.int64)
    arguments = x, codes, meta, *counts, *places, state_of(seed), np.uint32(stochastic)
    _launch("encode_rows", x.dtype, group_size, _threads(rows, columns, group_size), arguments)


def words(meta: Tensor, x: Tensor, group_size: int) -> None:
    """Find the words of the groups of rows."""
    rows, columns = x.shape
    arguments = x, meta, np.uint32(rows), np.int64(columns), np.int32(group_size)
    _launch("words", x.dtype, group_size, _threads(rows, columns, group_size), arguments)


def decode(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, *_: object) -> None:
    """Decode elements of a vector."""
    counts = np.int64(out.numel()), np.int64(codes.numel()), np.int32(group_size), np.int32(bits), np.int64(start)
    threads = _threads(1, out.numel(), group_size, start)
    _launch("decode", out.dtype, group_size, threads, (codes, meta, out, *counts))


def decode_rows(out: Tensor, codes: Tensor, meta: Tensor, widths: Tensor, group_size: int, first_row: int) -> None:
    """Decode rows of their own widths."""
    rows, columns = out.shape
    counts = np.uint32(rows), np.int64(columns), np.int64(codes.numel()), np.int32(group_size)
    places = widths[first_row:], widths.cumsum(0, dtype=torch.int64)[first_row:]
    arguments = codes, meta[first_row * -(-columns // group_size) :], out, *counts, *places
    _launch("decode_rows", out.dtype, group_size, _threads(rows, columns, group_size), arguments)


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
