"""Entries of a sketch's matrix on the CPU: the words of a block first, then the entries cut from them."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from actbench.ops import noise
from actbench.ops.cpu import CPU
from actbench.ops.cpu.compiled import BLOCK, inlined, kernel

_GOLDEN, _FIRST, _SECOND = np.uint64(noise.GOLDEN), np.uint64(noise.FIRST), np.uint64(noise.SECOND)


def rows(seed: int, first_row: int, rows: int, dim: int, kind: str) -> Tensor:
    """Return (rows, dim) float32 entries of the matrix of a seed, from row ``first_row`` on."""
    from actbench.ops.sketch import gaussian_table

    out = torch.empty(rows, dim, device=CPU)
    state, first, flat = np.uint64(noise.mixed(seed)), first_row * dim, out.numpy().reshape(-1)
    if kind == "rademacher":
        _rademacher(out.numel(), state, first, flat)
    else:
        _gaussian(out.numel(), state, first, gaussian_table(), flat)
    return out


@inlined
def _fill(state: np.uint64, first: int, words: np.ndarray) -> None:
    for i in range(words.size):
        word = state + np.uint64(first + i + 1) * _GOLDEN
        word = (word ^ (word >> np.uint64(30))) * _FIRST
        word = (word ^ (word >> np.uint64(27))) * _SECOND
        words[i] = word ^ (word >> np.uint64(31))


@kernel
def _rademacher(blocks: int, state: np.uint64, first: int, out: np.ndarray) -> None:
    for block in prange(blocks):
        part = out[block * BLOCK : (block + 1) * BLOCK]
        start = first + block * BLOCK
        words = np.empty(BLOCK // 64 + 1, np.uint64)
        _fill(state, start // 64, words)
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
        _fill(state, start // 4, words)
        indices = words.view(np.uint16)
        skipped = start % 4
        for i in range(part.size):
            part[i] = table[indices[skipped + i]]
