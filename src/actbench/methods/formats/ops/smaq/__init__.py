"""SmaQ, packed: few bits for numbers near the mean of their block, more for a fixed number of outliers in each block.

:mod:`actbench.methods.formats.ops.smaq.format` says how the bytes are laid out,
:mod:`actbench.methods.formats.ops.smaq.reference` what a code means. Encoding is one pass and waits for nothing, and
any part can be decoded alone.

All functions raise a ValueError for a wrong argument, and a KernelError if the CUDA kernel cannot be compiled or
launched.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.methods.formats.ops.smaq import cpu, reference
from actbench.methods.formats.ops.smaq.format import SMAQ, Format, check_format
from actbench.ops import rawkernel
from actbench.ops.library import Kernels, check_contiguous, check_vector, copied, define
from actbench.ops.noise import check_seed

_FORMAT = "int main_bits, int outlier_bits, int outliers, int block"


def launch_encode(packed: Tensor, x: Tensor, seed: Tensor, stochastic: bool, *parts: int) -> None:
    """Launch ``smaq_encode`` of ``kernels/smaq.cu``."""
    form, noisy = Format(*parts), (seed, np.uint32(stochastic))
    blocks, count = -(-x.numel() // form.block), np.int64(x.numel())
    _launch("encode", x.dtype, form, blocks, (x, packed, count, *sizes_of(form), *noisy))


def launch_decode(out: Tensor, packed: Tensor, first: int, count: int, dtype: torch.dtype, *parts: int) -> None:
    """Launch ``smaq_decode`` of ``kernels/smaq.cu``."""
    form = Format(*parts)
    before, room = first // form.block, form.room(packed.numel())
    blocks = -(-(first + count) // form.block) - before if count else 0
    counts = np.int64(packed.numel()), np.int64(room), np.int64(first), np.int64(count)
    _launch("decode", dtype, form, blocks, (packed, out, *counts, *sizes_of(form)))


def _launch(
    kernel: str, dtype: torch.dtype, form: Format, blocks: int, arguments: tuple[Tensor | np.generic, ...]
) -> None:
    rawkernel.launch("smaq", f"smaq_{kernel}", macros_of(dtype, form), lanes_of(form) * blocks, *arguments)


def lanes_of(form: Format) -> int:
    """Return how many lanes of a warp work on one block, with 32 elements each."""
    return 8 if form.block <= 256 else 32


def macros_of(dtype: torch.dtype, form: Format) -> rawkernel.Macros:
    """Return what a kernel for this type and format is compiled with."""
    bits = {"MAIN_BITS": form.main_bits, "OUTLIER_BITS": form.outlier_bits}
    return {"SCALAR": rawkernel.SCALARS[dtype], "LANES": lanes_of(form), **bits}


def sizes_of(form: Format) -> tuple[np.int32, np.int32]:
    """Return a kernel's arguments that say the rest of a format."""
    return np.int32(form.outliers), np.int32(form.block)


@define(
    f"smaq_encode(Tensor x, Tensor seed, bool stochastic, {_FORMAT}) -> Tensor",
    Kernels(cpu.encode, launch_encode, copied(reference.encode)),
)
def _encode(x: Tensor, seed: Tensor, stochastic: bool, *parts: int) -> Tensor:
    form = Format(*parts)
    check_format(form)
    check_contiguous(x)
    check_seed(seed, x.device)
    return x.new_empty(form.packed_bytes(x.numel()), dtype=torch.uint8)


@define(
    f"smaq_decode(Tensor packed, SymInt first, SymInt count, ScalarType dtype, {_FORMAT}) -> Tensor",
    Kernels(cpu.decode, launch_decode, copied(reference.decode)),
)
def _decode(packed: Tensor, first: int, count: int, dtype: torch.dtype, *parts: int) -> Tensor:
    form, out = Format(*parts), packed.new_empty(count, dtype=dtype)
    check_format(form)
    check_contiguous(out)
    check_vector(packed, torch.uint8, out.device, "packed")
    if first < 0 or first + count > form.room(packed.numel()):
        raise ValueError(f"elements {first} to {first + count} are not in {packed.numel()} bytes of {form}")
    return out


def encode(x: Tensor, seed: Tensor, form: Format = SMAQ, *, stochastic: bool = True) -> Tensor:
    """Encode the elements of a tensor, in order.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous, of any shape, n elements; n may be 0.
        seed: Seed of the noise: a 0-d int64 tensor on the device of x.
        form: The format of SmaQ.
        stochastic: False for the nearest code, which needs no noise and is biased.

    Returns:
        uint8 ``(form.packed_bytes(n),)``. A block with a non-finite value decodes to NaN, and
        so may one with a value of 2**123 or more.
    """
    return _encode(x, seed, stochastic, *form)


def decode(packed: Tensor, count: int, dtype: torch.dtype, first: int = 0, form: Format = SMAQ) -> Tensor:
    """Return elements ``first .. first + count - 1`` of the encoded tensor: (count,) of a float type."""
    return _decode(packed, first, count, dtype, *form)
