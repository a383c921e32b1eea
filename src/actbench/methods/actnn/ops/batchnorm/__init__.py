"""The backward pass of batch norm from the codes of its input, which is never decoded to memory.

Torch's operator needs the decoded input beside both gradients, and reads it twice. Here codes are decoded in registers,
once for the sums over each channel and once for the gradient: per element the codes are read in place of a float, and
nothing is written but the gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.batchnorm import cpu, reference
from actbench.ops import bitpack, rawkernel
from actbench.ops.allocation import allocator
from actbench.ops.library import Kernels, check_bits, check_contiguous, check_vector, copied, define


def launch(
    dx: Tensor,
    for_weight: Tensor,
    for_bias: Tensor,
    sums: Tensor,
    dy: Tensor,
    codes: Tensor,
    words: Tensor,
    bits: int,
    group_size: int,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
) -> None:
    """Launch the three kernels of ``kernels/batchnorm.cu``."""
    start = launcher(dy.shape, dy.dtype, bits, group_size)
    start(dx, for_weight, for_bias, sums, dy, codes, words, mean, invstd, weight)


@functools.lru_cache(maxsize=4096)
def launcher(shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int) -> Callable[..., None]:
    """Do as :func:`cpu.filler` on CUDA: what a launch needs but for addresses takes as long as the launch."""
    form = shape, dtype, bits, group_size
    launch_sums, launch_gradient = sums_launcher(*form), gradient_launcher(*form)
    macros, rows, channels, columns = _place(*form)
    counts = np.uint32(rows), np.uint32(channels), np.float32(rows // channels * columns)

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
        launch_sums(sums, dy, codes, words, mean)
        arguments = sums, invstd, for_weight, for_bias, *counts
        rawkernel.launch("batchnorm", "batchnorm_totals", macros, channels, *arguments)
        launch_gradient(dx, sums, dy, codes, words, mean, invstd, weight)

    return run


def sums_launcher(shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int) -> Callable[..., None]:
    """Return a function that launches ``batchnorm_sums``: of the sums, dy, codes, words and mean."""
    macros, rows, channels, columns = _place(shape, dtype, bits, group_size)
    counts = np.uint32(rows), np.uint32(channels), np.uint32(columns)

    def run(sums: Tensor, dy: Tensor, codes: Tensor, words: Tensor, mean: Tensor) -> None:
        rawkernel.launch("batchnorm", "batchnorm_sums", macros, 32 * rows, dy, codes, words, mean, sums, *counts)

    return run


def gradient_launcher(shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int) -> Callable[..., None]:
    """Return a function that launches ``batchnorm_gradient``: of dx, sums, dy, codes, words and the statistics."""
    macros, rows, channels, columns = _place(shape, dtype, bits, group_size)
    counts = np.uint32(rows), np.uint32(channels), np.uint32(columns)

    def run(dx: Tensor, sums: Tensor, *others: Tensor) -> None:
        rawkernel.launch("batchnorm", "batchnorm_gradient", macros, 32 * rows, *others, sums, dx, *counts)

    return run


def _place(shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int) -> tuple[rawkernel.Macros, int, int, int]:
    """Return the macros, and how many rows there are, how many channels, and how many elements of a row."""
    samples, channels, columns = shape[0], shape[1], math.prod(shape[2:])
    macros: rawkernel.Macros = {
        "SCALAR": rawkernel.SCALARS[dtype],
        "BITS": bits,
        "GROUP": group_size,
        "VECTOR": reference.vector_of(columns, dtype),
    }
    return macros, samples * channels, channels, columns


@define(
    "batchnorm_backward(Tensor dy, Tensor codes, Tensor words, int bits, int group_size, Tensor mean, Tensor invstd,"
    " Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)",
    Kernels(cpu.backward, launch, copied(reference.backward, results=4)),
)
def backward(
    dy: Tensor, codes: Tensor, words: Tensor, bits: int, group_size: int, mean: Tensor, invstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of batch norm in training, from the codes of its input.

    Args:
        dy: (N, C, ...) float32, float16, bfloat16 or float64, contiguous: the gradient of the output.
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

    It is for float32 and half types and for plain tensors, while nothing sees operators
    (:func:`actbench.ops.library.is_watched`): what the operator checks and computes at each call is known of them.
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
