"""Columns of the random matrix S that a sketch multiplies with, made from a seed when needed.

S has k rows and endless columns. Columns lie one after the other, each in a space of k entries rounded up to a multiple
of eight: matrix units read 16 bytes at a time, and 819 bfloat16 numbers end between them. Entry (i, j) is
number ``j * space + i`` of the seed. Entries are independent, with mean 0 and mean square 1.

* ``rademacher``: +1 or -1, from one bit each (0 is +1).
* ``gaussian``: one of 65,536 midpoints of equally probable slices of N(0, 1), from 16 bits each. A table gives the same
  number on every device; a logarithm does not.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Final, Literal, get_args

import numpy as np
import torch
from numba import prange
from torch import Tensor

from actbench.ops import noise, rawkernel
from actbench.ops.cpu import BLOCK, at, kernel
from actbench.ops.cpu.halves import fill_random, state_at
from actbench.ops.library import EVERYWHERE, define

Kind = Literal["gaussian", "rademacher"]
KINDS: Final = get_args(Kind)


@functools.cache
def gaussian_table() -> np.ndarray:
    """Return the 65,536 values of ``gaussian``: float32, ascending, antisymmetric, scaled to a mean square of 1."""
    inverse = statistics.NormalDist().inv_cdf
    upper = [inverse((index + 0.5) / 65536) for index in range(32768, 65536)]
    scale = math.sqrt(len(upper) / math.fsum(value * value for value in upper))
    half = (np.array(upper) * scale).astype(np.float32)
    return np.concatenate([-half[::-1], half])


def fourth_moment(kind: Kind) -> float:
    """Return E[s^4] of an entry: 1 for rademacher, a little less than the 3 of N(0, 1) for the gaussian table."""
    return 1.0 if kind == "rademacher" else float(np.mean(gaussian_table().astype(np.float64) ** 4))


_TOGETHER = 8
"""Entries that a lane of the kernel writes at once."""


def space(size: int) -> int:
    """Return the entries from the start of one column of k = ``size`` entries to the next."""
    return -(-size // _TOGETHER) * _TOGETHER


def _empty(columns: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided((size, columns), (1, space(size)), dtype=dtype, device=device)


def _flat(entries: Tensor) -> Tensor:
    """Return all that was allocated, the unused entries between columns with it."""
    return entries.as_strided((entries.untyped_storage().nbytes() // entries.itemsize,), (1,))


def reference(
    seed: Tensor,
    first: int,
    columns: int,
    size: int,
    kind: str,
    dtype: torch.dtype,
    copies: int = 1,
) -> Tensor:
    """Do what :func:`sketch_columns` does, in plain torch; every kernel must agree bit for bit."""
    start, count, device = first * space(size), columns * space(size), seed.device
    if kind == "rademacher":
        entries = 1 - 2 * noise.lanes(seed, start, count, 1, device)
    else:
        entries = torch.from_numpy(gaussian_table()).to(device)[noise.lanes(seed, start, count, 16, device)]
    out = _empty(copies * columns, size, dtype, seed.device)
    return out.copy_(entries.view(columns, space(size))[:, :size].t().repeat(1, copies))


def launch(
    seed: Tensor,
    first: int,
    columns: int,
    size: int,
    kind: str,
    dtype: torch.dtype,
    copies: int = 1,
) -> Tensor:
    """Return the columns from ``kernels/sketch.cu``; types that it does not write are converted from float32."""
    written = dtype if dtype in rawkernel.SCALARS else torch.float32
    out = _empty(copies * columns, size, written, seed.device)
    # the last column is allocated without the space behind it, so that flat may be shorter than the period
    flat, period = _flat(out), columns * space(size)
    place = (flat, seed, np.int64(first * space(size)), np.int64(period), np.int64(flat.numel()))
    tables = () if kind == "rademacher" else (_table(out.device),)
    macros, groups = {"SCALAR": rawkernel.SCALARS[written]}, -(-min(period, flat.numel()) // _TOGETHER)
    rawkernel.launch("sketch", f"sketch_{kind}", macros, groups, *tables, *place)
    return out if dtype == written else _empty(copies * columns, size, dtype, seed.device).copy_(out)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Return the gaussian table on a device, where its 256 KiB stay."""
    return torch.from_numpy(gaussian_table()).to(device)


def columns_on_cpu(seed: Tensor, first: int, columns: int, size: int, table: np.ndarray | None) -> Tensor:
    """Return (size, columns) float32 entries: from the table, or rademacher without one."""
    out = _empty(columns, size, torch.float32, torch.device("cpu"))
    start, count = first * space(size), out.untyped_storage().nbytes() // out.itemsize
    if table is None:
        _rademacher(count, seed.data_ptr(), start, count, out.data_ptr())
    else:
        _gaussian(count, seed.data_ptr(), start, table, count, out.data_ptr())
    return out


@kernel
def _rademacher(blocks: int, seed: int, first: int, count: int, out: int) -> None:
    state, entries = state_at(seed), at(out, count, np.float32)
    for block in prange(blocks):
        part = entries[block * BLOCK : (block + 1) * BLOCK]
        start = first + block * BLOCK
        words = np.empty(BLOCK // 64 + 1, np.uint64)  # one more: a block may begin inside a word
        fill_random(state, start // 64, words)
        skipped = start % 64
        for i in range(part.size):
            place = skipped + i
            bit = (words[place >> 6] >> np.uint64(place & 63)) & np.uint64(1)
            part[i] = np.float32(1) - np.float32(2) * np.float32(bit)


@kernel
def _gaussian(blocks: int, seed: int, first: int, table: np.ndarray, count: int, out: int) -> None:
    state, entries = state_at(seed), at(out, count, np.float32)
    for block in prange(blocks):
        part = entries[block * BLOCK : (block + 1) * BLOCK]
        start = first + block * BLOCK
        words = np.empty(BLOCK // 4 + 1, np.uint64)  # as above
        fill_random(state, start // 4, words)
        indices = words.view(np.uint16)
        skipped = start % 4
        for i in range(part.size):
            part[i] = table[indices[skipped + i]]


def _check(seed: Tensor, first: int, columns: int, size: int, kind: str, dtype: torch.dtype, copies: int) -> None:
    if kind not in KINDS:
        raise ValueError(f"a sketch is {' or '.join(KINDS)}, not {kind!r}")
    if seed.dtype != torch.int64 or seed.dim() != 0:
        raise ValueError("the seed must be a 0-d int64 tensor")
    if not dtype.is_floating_point:
        raise ValueError(f"a sketch has float entries, not {dtype}")
    if first < 0 or columns < 0 or size < 0 or copies < 1:
        raise ValueError("rows and columns are not negative")


def _make(
    seed: Tensor,
    first: int,
    columns: int,
    size: int,
    kind: str,
    dtype: torch.dtype,
    copies: int = 1,
) -> Tensor:
    """Make the columns where the seed is."""
    _check(seed, first, columns, size, kind, dtype, copies)
    if seed.is_cuda:
        return launch(seed, first, columns, size, kind, dtype, copies)
    if not seed.is_cpu:
        return reference(seed, first, columns, size, kind, dtype, copies)
    table = None if kind == "rademacher" else gaussian_table()
    made = columns_on_cpu(seed, first, columns, size, table)
    if copies == 1 and dtype == torch.float32:
        return made
    return _empty(copies * columns, size, dtype, seed.device).copy_(made.repeat(1, copies))


@define(
    "sketch_columns(Tensor seed, SymInt first, SymInt columns, SymInt size, str kind, ScalarType dtype,"
    " SymInt copies=1) -> Tensor",
    {EVERYWHERE: _make},
)
def sketch_columns(
    seed: Tensor,
    first: int,
    columns: int,
    size: int,
    kind: Kind,
    dtype: torch.dtype,
    copies: int = 1,
) -> Tensor:
    """Return columns ``first .. first + columns - 1`` of the matrix of a seed, rounded to a float type.

    The seed is a 0-d int64 tensor, and the result (size, copies * columns) on its device: the columns as often as
    ``copies`` says, for a product with as many parts of one matrix. Columns are dense, and start at multiples of
    eight entries.

    Raises:
        KernelError: The kernel for CUDA cannot be compiled or launched.
        ValueError: The seed, kind or type is not as above.
    """
    _check(seed, first, columns, size, kind, dtype, copies)
    return _empty(copies * columns, size, dtype, seed.device)
