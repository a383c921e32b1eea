"""The backward pass of batch norm from the codes of its input, which is never decoded to memory.

Torch's operator needs the decoded input beside both gradients, and reads it twice. Here codes are decoded in registers,
once for the sums over each channel and once for the gradient: per element the codes are read in place of a float, and
nothing is written but the gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.batchnorm import cpu, reference
from actbench.ops import bitpack, rawkernel
from actbench.ops.allocation import allocator
from actbench.ops.library import Kernels, check_bits, check_contiguous, check_vector, copied, define


@functools.lru_cache(maxsize=4096)
def launcher(shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int) -> Callable[..., None]:
    """Do as :func:`cpu.filler` on CUDA: what a launch needs but for addresses takes as long as the launch."""
    start = launches(shape, dtype, bits, group_size)

    def run(
        dx: Tensor,
        for_weight: Tensor,
        for_bias: Tensor,
        sums: Tensor,
        dy: Tensor,
        codes: Tensor,
        words: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor,
    ) -> None:
        start.sums(dy, codes, words, mean, sums)
        start.totals(sums, invstd, for_weight, for_bias)
        start.gradient(dy, codes, words, mean, invstd, weight, sums, dx)

    return run


class Launches(NamedTuple):
    """Functions that launch each of the kernels; they take the kernel's tensors in its order."""

    sums: Callable[..., None]
    totals: Callable[..., None]
    gradient: Callable[..., None]


def launches(shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int) -> Launches:
    """Return what launches the kernels for gradients of a shape and type."""
    channels, columns = shape[1], math.prod(shape[2:])
    rows = shape[0] * channels
    scalar, vector = rawkernel.SCALARS[dtype], reference.vector_of(columns, dtype)
    macros: rawkernel.Macros = {"SCALAR": scalar, "BITS": bits, "GROUP": group_size, "VECTOR": vector}

    def launching(kernel: str, threads: int, last: np.generic) -> Callable[..., None]:
        counts = np.uint32(rows), np.uint32(channels), last
        return lambda *tensors: rawkernel.launch("batchnorm", kernel, macros, threads, *tensors, *counts)

    return Launches(
        launching("batchnorm_sums", 32 * rows, np.uint32(columns)),
        launching("batchnorm_totals", channels, np.float32(shape[0] * columns)),
        launching("batchnorm_gradient", 32 * rows, np.uint32(columns)),
    )


def _filling(prepared: Callable[..., Callable[..., None]]) -> Callable[..., None]:
    """Return what fills the operator's results, by the function that is prepared for the form of dy."""

    def fill(
        dx: Tensor,
        for_weight: Tensor,
        for_bias: Tensor,
        sums: Tensor,
        dy: Tensor,
        codes: Tensor,
        words: Tensor,
        bits: int,
        group_size: int,
        *statistics: Tensor,
    ) -> None:
        run = prepared(dy.shape, dy.dtype, bits, group_size)
        run(dx, for_weight, for_bias, sums, dy, codes, words, *statistics)

    return fill


launch = _filling(launcher)


def takes_rows(columns: int) -> bool:
    """Return whether a channel may have so many elements in a sample: fours of them, counted in 32 bits."""
    return columns % 4 == 0 and columns < 2**31


@define(
    "batchnorm_backward(Tensor dy, Tensor codes, Tensor words, int bits, int group_size, Tensor mean, Tensor invstd,"
    " Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)",
    Kernels(_filling(cpu.filler), launch, copied(reference.backward, results=4)),
)
def backward(
    dy: Tensor, codes: Tensor, words: Tensor, bits: int, group_size: int, mean: Tensor, invstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of batch norm in training, from the codes of its input.

    Args:
        dy: (N, C, ...) float32, float16, bfloat16 or float64, contiguous: the gradient of the output. A channel has a
            multiple of 4 elements in a sample, fewer than 2^31.
        codes: uint8 vector: the input, of the shape and type of dy, as ``groupquant.encode`` packs it.
        words: int32 vector: the words of its groups.
        bits: 1 to 8.
        group_size: A multiple of 32 from 32 to 1024.
        mean: float32 ``(C,)``, float64 for float64, as is what follows: the mean of each channel.
        invstd: ``(C,)``: 1 / deviation of each channel.
        weight: ``(C,)``: ones for a layer without.

    Returns:
        The gradients of the input, of the type of dy, of the weight and of the bias, ``(C,)``; and sums ``(2, N, C)``
        that the kernels needed.

    Raises:
        ValueError: A wrong argument.
        KernelError: The CUDA kernels cannot be compiled or launched.
    """
    check_bits(bits)
    check_contiguous(dy)
    check_vector(codes, torch.uint8, dy.device, "codes")
    check_vector(words, torch.int32, dy.device, "words")
    if dy.dim() < 2 or dy.numel() == 0:
        raise ValueError(f"dy must have samples, channels and elements, found shape {tuple(dy.shape)}")
    if not takes_rows(math.prod(dy.shape[2:])):
        raise ValueError(f"a channel must have a multiple of 4 elements in a sample, found shape {tuple(dy.shape)}")
    groupquant.check_group_size(group_size)
    if (codes.numel(), words.numel()) != (bitpack.packed_bytes(dy.numel(), bits), -(-dy.numel() // group_size)):
        found = f"{codes.numel()} bytes of codes and {words.numel()} words"
        raise ValueError(f"{dy.numel()} elements of {bits} bits in groups of {group_size} do not take {found}")
    samples, channels = dy.shape[:2]
    computed = torch.float64 if dy.dtype == torch.float64 else torch.float32
    for name, each in (("mean", mean), ("invstd", invstd), ("weight", weight)):
        check_vector(each, computed, dy.device, name)
        if each.numel() != channels:
            raise ValueError(f"{channels} channels need as many numbers in {name}, found {each.numel()}")
    sums = mean.new_empty(2, samples, channels)
    return torch.empty_like(dy), mean.new_empty(channels), mean.new_empty(channels), sums


@functools.lru_cache(maxsize=4096)
def gradients(
    shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return a function of dy, codes, words, mean, invstd and weight that does as :func:`backward` for one form of dy.

    It is for float32 and half types and for plain contiguous tensors on a CPU or CUDA device, statistics and weight in
    float32, while nothing sees operators (:func:`actbench.ops.library.is_watched`): what the operator checks and
    computes at each call is known of them.
    """
    samples, channels = shape[:2]
    fill = (launcher if device.type == "cuda" else cpu.filler)(shape, dtype, bits, group_size)
    new_dx, new_vector = allocator(shape, dtype, device), allocator((channels,), torch.float32, device)
    new_sums = allocator((2, samples, channels), torch.float32, device)

    def run(
        dy: Tensor, codes: Tensor, words: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx, for_weight, for_bias = new_dx(), new_vector(), new_vector()
        fill(dx, for_weight, for_bias, new_sums(), dy, codes, words, mean, invstd, weight)
        return dx, for_weight, for_bias

    return run
