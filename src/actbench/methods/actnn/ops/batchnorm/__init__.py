"""The backward pass of batch norm from the codes of its input, which is never decoded to memory.

Torch's operator needs the decoded input beside both gradients, and reads it twice. Here codes are decoded in registers,
once for the sums over each channel and once for the gradient: per element the codes are read in place of a float, and
nothing is written but the gradient.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.batchnorm import cpu, reference
from actbench.ops import bitpack, rawkernel
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
    packed = codes, words, bits, group_size
    launch_sums(sums, dy, *packed, mean)
    launch_totals(for_weight, for_bias, sums, dy, *packed, invstd)
    launch_gradient(dx, sums, dy, *packed, mean, invstd, weight)


def launch_sums(
    sums: Tensor, dy: Tensor, codes: Tensor, words: Tensor, bits: int, group_size: int, mean: Tensor
) -> None:
    """Launch ``batchnorm_sums``."""
    macros, rows, channels, columns = _place(dy, bits, group_size)
    counts = np.uint32(rows), np.uint32(channels), np.uint32(columns)
    rawkernel.launch("batchnorm", "batchnorm_sums", macros, 32 * rows, dy, codes, words, mean, sums, *counts)


def launch_totals(
    for_weight: Tensor,
    for_bias: Tensor,
    sums: Tensor,
    dy: Tensor,
    codes: Tensor,
    words: Tensor,
    bits: int,
    group_size: int,
    invstd: Tensor,
) -> None:
    """Launch ``batchnorm_totals``."""
    macros, rows, channels, columns = _place(dy, bits, group_size)
    counts = np.uint32(rows), np.uint32(channels), np.float32(rows // channels * columns)
    arguments = sums, invstd, for_weight, for_bias, *counts
    rawkernel.launch("batchnorm", "batchnorm_totals", macros, channels, *arguments)


def launch_gradient(
    dx: Tensor,
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
    """Launch ``batchnorm_gradient``."""
    macros, rows, channels, columns = _place(dy, bits, group_size)
    arguments = dy, codes, words, mean, invstd, weight, sums, dx
    counts = np.uint32(rows), np.uint32(channels), np.uint32(columns)
    rawkernel.launch("batchnorm", "batchnorm_gradient", macros, 32 * rows, *arguments, *counts)


def _place(dy: Tensor, bits: int, group_size: int) -> tuple[rawkernel.Macros, int, int, int]:
    """Return the macros, and how many rows there are, how many channels, and how many elements of a row."""
    samples, channels, columns = dy.shape[0], dy.shape[1], math.prod(dy.shape[2:])
    scalar, vector = rawkernel.SCALARS[dy.dtype], reference.vector_of(columns, dy.dtype)
    return (
        {"SCALAR": scalar, "BITS": bits, "GROUP": group_size, "VECTOR": vector},
        samples * channels,
        channels,
        columns,
    )


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
