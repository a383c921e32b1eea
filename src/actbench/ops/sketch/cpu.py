"""Entries of a sketch's matrix on the CPU: the words of a block first, then the entries cut from them."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from actbench.ops import noise
from actbench.ops.cpu.compiled import BLOCK, kernel
from actbench.ops.cpu.halves import fill_random

_CPU = torch.device("cpu")  # whatever the program's default is


def rows(seed: int | Tensor, first_row: int, rows: int, dim: int, table: np.ndarray | None) -> Tensor:
    """Return (rows, dim) float32 entries: those of a table, or rademacher."""
    out = torch.empty(rows, dim, dtype=torch.float32, device=_CPU)
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
