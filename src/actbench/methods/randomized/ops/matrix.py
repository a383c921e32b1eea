"""Rows of the random matrix that a sketch multiplies with, made from a seed when needed.

The matrix has endless rows and ``dim`` columns. Entry (i, j) is number ``i * dim + j`` of the seed. Entries are
independent, with mean 0 and mean square 1.

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
from actbench.ops.cpu import BLOCK, kernel
from actbench.ops.cpu.halves import fill_random
from actbench.ops.library import HOST_NUMBER, define

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


def reference(
    seed: Tensor, first_row: int, rows: int, dim: int, kind: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Do what :func:`sketch_rows` does, in plain torch; every kernel must agree bit for bit."""
    number, first, count = int(seed.item()), first_row * dim, rows * dim
    if kind == "rademacher":
        entries = 1 - 2 * noise.lanes(number, first, count, 1, device)
    else:
        entries = torch.from_numpy(gaussian_table()).to(device)[noise.lanes(number, first, count, 16, device)]
    return entries.to(dtype).view(rows, dim)


def launch(
    seed: int | Tensor, first_row: int, rows: int, dim: int, kind: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the rows from ``kernels/sketch.cu``; types that it does not write are converted from float32."""
    written = dtype if dtype in rawkernel.SCALARS else torch.float32
    out = torch.empty(rows, dim, dtype=written, device=device)
    place = (out, noise.state_of(seed), np.int64(first_row * dim), np.int64(out.numel()))
    tables = () if kind == "rademacher" else (_table(out.device),)
    macros, groups = {"SCALAR": rawkernel.SCALARS[written]}, -(-out.numel() // 8)
    rawkernel.launch("sketch", f"sketch_{kind}", macros, groups, *tables, *place)
    return out.to(dtype)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Return the gaussian table on a device, where its 256 KiB stay."""
    return torch.from_numpy(gaussian_table()).to(device)


def rows_on_cpu(seed: int | Tensor, first_row: int, rows: int, dim: int, table: np.ndarray | None) -> Tensor:
    """Return (rows, dim) float32 entries: from the table, or rademacher without one."""
    out = torch.empty(rows, dim, dtype=torch.float32, device=torch.device("cpu"))
    state, first, flat = noise.state_of(seed), first_row * dim, out.numpy().reshape(-1)
    if table is None:
        _rademacher(out.numel(), state, first, flat)
    else:
        _gaussian(out.numel(), state, first, table, flat)
    return out


@kernel
def _rademacher(blocks: int, state: np.uint64, first: int, out: np.ndarray) -> None:
    for block in prange(blocks):
        part = out[block * BLOCK : (block + 1) * BLOCK]
        start = first + block * BLOCK
        words = np.empty(BLOCK // 64 + 1, np.uint64)
        fill_random(state, start // 64, words)
        skipped = start % 64
        for i in range(part.size):
            place = skipped + i
            bit = (words[place >> 6] >> np.uint64(place & 63)) & np.uint64(1)
            part[i] = np.float32(1) - np.float32(2) * np.float32(bit)


@kernel
def _gaussian(blocks: int, state: np.uint64, first: int, table: np.ndarray, out: np.ndarray) -> None:
    for block in prange(blocks):
        part = out[block * BLOCK : (block + 1) * BLOCK]
        start = first + block * BLOCK
        words = np.empty(BLOCK // 4 + 1, np.uint64)
        fill_random(state, start // 4, words)
        indices = words.view(np.uint16)
        skipped = start % 4
        for i in range(part.size):
            part[i] = table[indices[skipped + i]]


def _check(seed: Tensor, first_row: int, rows: int, dim: int, kind: str, dtype: torch.dtype) -> None:
    torch._check_value(kind in KINDS, lambda: f"a sketch is {' or '.join(KINDS)}, not {kind!r}")
    torch._check_value(seed.dtype == torch.int64 and seed.dim() == 0, lambda: "the seed must be a 0-d int64 tensor")
    torch._check_value(dtype.is_floating_point, lambda: f"a sketch has float entries, not {dtype}")
    torch._check_value(first_row >= 0 and rows >= 0 and dim >= 0, lambda: "rows and columns are not negative")


def _make(
    seed: Tensor, first_row: int, rows: int, dim: int, kind: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make the rows on ``device``: the seed is on the CPU, so the dispatcher cannot choose the device."""
    _check(seed, first_row, rows, dim, kind, dtype)
    if device.type == "cpu":
        table = None if kind == "rademacher" else gaussian_table()
        return rows_on_cpu(seed, first_row, rows, dim, table).to(dtype)
    made = launch if device.type == "cuda" else reference
    return made(seed, first_row, rows, dim, kind, dtype, device)


@define(
    "sketch_rows(Tensor seed, SymInt first_row, SymInt rows, SymInt dim, str kind, ScalarType dtype, Device device)"
    " -> Tensor",
    {"CPU": _make},  # where the seed is
    tags=HOST_NUMBER,
)
def sketch_rows(
    seed: Tensor, first_row: int, rows: int, dim: int, kind: Kind, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return rows ``first_row .. first_row + rows - 1`` of the matrix of a seed, rounded to a float type.

    The seed is a 0-d int64 tensor on the CPU, the result (rows, dim) on ``device``.

    Raises:
        KernelError: The kernel for CUDA cannot be compiled or launched.
        ValueError: The seed, kind or type is not as above.
    """
    _check(seed, first_row, rows, dim, kind, dtype)
    return torch.empty(rows, dim, dtype=dtype, device=device)
