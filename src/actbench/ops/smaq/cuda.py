"""SmaQ blocks on CUDA: the launches of ``kernels/smaq.cu``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel
from actbench.ops.noise import state_of
from actbench.ops.smaq.format import Format


def encode_into(
    packed: Tensor, x: Tensor, first_block: int, form: Format, seed: int | Tensor, stochastic: bool
) -> None:
    """Replace blocks by those of ``x``."""
    target = packed[first_block * form.block_bytes :]
    counts = np.int64(x.numel()), np.int64(first_block)
    noisy = state_of(seed), np.uint32(stochastic)
    _launch("encode", x.dtype, form, -(-x.numel() // form.block), (x, target, *counts, *_parts(form), *noisy))


def decode_into(packed: Tensor, first: int, form: Format, out: Tensor) -> None:
    """Write elements, from number ``first`` on, to all of a contiguous tensor."""
    before, room = first // form.block, form.room(packed.numel())
    blocks = -(-(first + out.numel()) // form.block) - before if out.numel() else 0
    counts = np.int64(packed.numel()), np.int64(room), np.int64(first), np.int64(out.numel())
    _launch("decode", out.dtype, form, blocks, (packed, out, *counts, *_parts(form)))


def _parts(form: Format) -> tuple[np.int32, ...]:
    return tuple(np.int32(part) for part in form)


def _launch(
    kernel: str, dtype: torch.dtype, form: Format, blocks: int, arguments: tuple[Tensor | np.generic, ...]
) -> None:
    macros: rawkernel.Macros = {"SCALAR": rawkernel.SCALARS[dtype], "TILES": 1 if form.block <= 256 else 4}
    rawkernel.launch("smaq", f"smaq_{kernel}", macros, 32 * blocks, *arguments)
