"""SmaQ blocks on CUDA: the launches of ``kernels/smaq.cu``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import noise, rawkernel
from actbench.ops.smaqformat import Format


def encode_into(packed: Tensor, x: Tensor, first_block: int, form: Format, seed: int, stochastic: bool) -> None:
    """Replace blocks by those of ``x``.

    Args:
        packed: uint8.
        x: float32, float16 or bfloat16, contiguous: whole blocks, or blocks up to the end.
        first_block: Index of the first block.
        form: Which SmaQ.
        seed: Of the noise.
        stochastic: False for the nearest code.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    target = packed[first_block * form.block_bytes :]
    counts = np.int64(x.numel()), np.int64(first_block)
    noisy = np.uint64(noise.mixed(seed)), np.uint32(stochastic)
    _launch("encode", x.dtype, form, -(-x.numel() // form.block), (x, target, *counts, *_parts(form), *noisy))


def decode(packed: Tensor, first: int, form: Format, out: Tensor) -> None:
    """Write elements, from number ``first`` on, to all of a contiguous tensor.

    Args:
        packed: uint8.
        first: Index of the first element.
        form: Which SmaQ.
        out: float32, float16 or bfloat16.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
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
