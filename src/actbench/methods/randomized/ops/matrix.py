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
from collections.abc import Callable
from typing import Final, Literal, get_args

import numpy as np
import torch
from numba import prange
from torch import Tensor

from actbench.ops import noise, rawkernel
from actbench.ops.allocation import allocator
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


def _allocator(columns: int, size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that does as :func:`_empty`, where nothing sees operators."""
    return allocator((size, columns), dtype, device, (1, space(size)))


def _allocated(columns: int, size: int) -> int:
    """Return how many entries columns are allocated with, the unused ones between columns with them."""
    return (columns - 1) * space(size) + size if columns and size else 0


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


@functools.lru_cache(maxsize=4096)
def maker(
    first: int, columns: int, size: int, kind: str, dtype: torch.dtype, copies: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return a function of a seed that does as :func:`sketch_columns` for the seeds of a CPU or CUDA device.

    It is for plain seeds, while nothing sees operators (:func:`actbench.ops.library.is_watched`): what the operator
    checks and computes at each call is known.
    """
    make = launching_maker if device.type == "cuda" else cpu_maker
    return make(first, columns, size, kind, dtype, copies, device)


def launching_maker(
    first: int, columns: int, size: int, kind: str, dtype: torch.dtype, copies: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Do as :func:`maker` by ``kernels/sketch.cu``; types that it does not write are converted from float32."""
    written = dtype if dtype in rawkernel.SCALARS else torch.float32
    new, count = _allocator(copies * columns, size, written, device), _allocated(copies * columns, size)
    # the last column is allocated without the space behind it, so that count may be less than the period
    period = columns * space(size)
    place = np.int64(first * space(size)), np.int64(period), np.int64(count)
    macros, groups = {"SCALAR": rawkernel.SCALARS[written]}, -(-min(period, count) // _TOGETHER)

    def run(seed: Tensor) -> Tensor:
        out, tables = new(), () if kind == "rademacher" else (_table(device),)
        rawkernel.launch("sketch", f"sketch_{kind}", macros, groups, *tables, out, seed, *place)
        return out if dtype == written else _empty(copies * columns, size, dtype, device).copy_(out)

    return run


def cpu_maker(
    first: int, columns: int, size: int, kind: str, dtype: torch.dtype, copies: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Do as :func:`maker` on the CPU, in float32 first."""
    new, count = _allocator(columns, size, torch.float32, device), _allocated(columns, size)
    start = first * space(size)

    def run(seed: Tensor) -> Tensor:
        out = new()
        if kind == "rademacher":
            _rademacher(count, seed.data_ptr(), start, count, out.data_ptr())
        else:
            _gaussian(count, seed.data_ptr(), start, gaussian_table(), count, out.data_ptr())
        if copies == 1 and dtype is torch.float32:
            return out
        return _empty(copies * columns, size, dtype, device).copy_(out.repeat(1, copies))

    return run


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Return the gaussian table on a device, where its 256 KiB stay."""
    return torch.from_numpy(gaussian_table()).to(device)


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
    if not (seed.is_cuda or seed.is_cpu):
        return reference(seed, first, columns, size, kind, dtype, copies)
    return maker(first, columns, size, kind, dtype, copies, seed.device)(seed)


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
