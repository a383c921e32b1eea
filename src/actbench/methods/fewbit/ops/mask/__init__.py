"""ReLU and its exact derivative of one bit an element, packed as in :mod:`actbench.ops.bitpack`.

On the CPU one pass reads the bits of the values: to read a sign, no type needs widening.

All functions raise a ValueError for a wrong argument, and a KernelError if the CUDA kernel cannot be compiled or
launched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import prange
from torch import Tensor

from actbench.ops import bitpack, rawkernel
from actbench.ops.cpu import BLOCK, at, inlined, intrinsic, kernel
from actbench.ops.cpu.vectors import LONG, MANY, Step, emitted
from actbench.ops.library import Implementation, Kernels, check_contiguous, copied, define, empty_contiguous

_AT_ONCE = 128  # values that one step selects
_NEGATIVE_INFINITY = {torch.float16: 0xFC00, torch.bfloat16: 0xFF80}


def positive(x: Tensor) -> Tensor:
    """Return where ReLU passes the gradient: above zero, and at NaN."""
    return ~(x <= 0)


def relu_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do what :func:`relu` does, in plain torch on any device."""
    return torch.relu(x.detach()), bitpack.pack(positive(x.reshape(-1)).to(torch.uint8), 1)


_fill_relu = copied(relu_reference, results=2)


def _over(fill: Implementation) -> Implementation:
    return lambda mask, x: fill(x, mask, x)


def select_reference(mask: Tensor, grad: Tensor) -> Tensor:
    """Do what :func:`select` does, in plain torch on any device."""
    bits = bitpack.unpack(mask, 1, grad.numel()).reshape(grad.shape)
    return torch.where(bits.bool(), grad.detach(), 0)


def launch_relu(out: Tensor, mask: Tensor, x: Tensor) -> None:
    """Launch ``relu_mask`` of ``kernels/mask.cu``; ``out`` may be x."""
    macros, groups = {"SCALAR": rawkernel.SCALARS[x.dtype]}, -(-x.numel() // 8)
    rawkernel.launch("mask", "relu_mask", macros, groups, x, out, mask, np.int64(x.numel()))


def launch_select(out: Tensor, mask: Tensor, grad: Tensor) -> None:
    """Launch ``mask_select`` of ``kernels/mask.cu``."""
    macros, groups = {"SCALAR": rawkernel.SCALARS[grad.dtype]}, -(-grad.numel() // 8)
    rawkernel.launch("mask", "mask_select", macros, groups, mask, grad, out, np.int64(grad.numel()))


def _relu_on_cpu(out: Tensor, mask: Tensor, x: Tensor) -> None:
    """Write ReLU of x, which keeps negative zeros and NaN, and its mask; ``out`` may be x."""
    count = x.numel()
    if x.dtype == torch.float32:
        _relu32(count, count, x.data_ptr(), out.data_ptr(), mask.data_ptr())
    else:
        _relu16(count, count, x.data_ptr(), _NEGATIVE_INFINITY[x.dtype], out.data_ptr(), mask.data_ptr())


def _select_on_cpu(out: Tensor, mask: Tensor, grad: Tensor) -> None:
    """Write each gradient whose bit is 1, and zero in place of the others."""
    count, choose = grad.numel(), _select32 if grad.dtype == torch.float32 else _select16
    choose(count, count, mask.data_ptr(), grad.data_ptr(), out.data_ptr())


@intrinsic
def _positive(typing_context: Any, index: Any, x: Any, infinity: Any, out: Any, mask: Any) -> Any:
    """Write ReLU of 32 values and, as one bit each, whether they are above zero or NaN; ``index`` is a multiple of 32.

    A negative zero stays, as in torch on the CPU. Values and infinity are bits: uint32, or uint16 for the half types.
    """

    def emit(step: Step, index: Any) -> None:
        builder, width = step.builder, signature.args[1].dtype.bitwidth
        vector = ir.VectorType(ir.IntType(width), MANY)
        value, zero = step.load(1, index, vector), ir.Constant(vector, [0] * MANY)
        below_all = step.spread(step.argument(2, ir.IntType(width)), MANY)
        # a float above zero, and a NaN without a sign, is a positive integer; a NaN with a sign is above -inf, unsigned
        above = builder.icmp_signed(">", value, zero)
        passed = builder.or_(above, builder.icmp_unsigned(">", value, below_all))
        minus_zero = builder.icmp_signed("==", value, ir.Constant(vector, [1 << (width - 1)] * MANY))
        step.store(builder.select(builder.or_(passed, minus_zero), value, zero), 3, index)
        step.store(builder.bitcast(passed, ir.IntType(MANY)), 4, builder.lshr(index, LONG(3)))

    signature, generate = emitted(emit, index, x, infinity, out, mask)
    return signature, generate


@intrinsic
def _keep(typing_context: Any, index: Any, mask: Any, values: Any, out: Any) -> Any:
    """Write 128 values from ``index``, a multiple of 128, where their mask bits are 1, and zero elsewhere.

    All values are read before the first is written, which is a tenth faster from memory.
    """

    def emit(step: Step, index: Any) -> None:
        builder, vector = step.builder, ir.VectorType(ir.IntType(signature.args[2].dtype.bitwidth), MANY)
        places = [builder.add(index, LONG(first)) for first in range(0, _AT_ONCE, MANY)]
        words = [step.load(1, builder.lshr(place, LONG(3)), ir.IntType(MANY)) for place in places]
        read = [step.load(2, place, vector) for place in places]
        for place, word, value in zip(places, words, read, strict=True):
            bits = builder.bitcast(word, ir.VectorType(ir.IntType(1), MANY))
            step.store(builder.select(bits, value, ir.Constant(vector, [0] * MANY)), 3, place)

    signature, generate = emitted(emit, index, mask, values, out)
    return signature, generate


@inlined
def _relu_block(x: np.ndarray, infinity: int, out: np.ndarray, mask: np.ndarray) -> None:
    done = x.size // MANY * MANY
    for i in range(0, done, MANY):
        _positive(i, x, infinity, out, mask)
    if done < x.size:
        # the steps read and write 32 values, which the rest of a block does not have
        rest, kept, bits = np.zeros(MANY, x.dtype), np.empty(MANY, x.dtype), np.empty(MANY // 8, np.uint8)
        rest[: x.size - done] = x[done:]
        _positive(0, rest, infinity, kept, bits)
        out[done:] = kept[: x.size - done]
        mask[done // 8 :] = bits[: mask.size - done // 8]


@inlined
def _select_block(mask: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
    done = grad.size // _AT_ONCE * _AT_ONCE
    for i in range(0, done, _AT_ONCE):
        _keep(i, mask, grad, out)
    for i in range(done, grad.size):
        kept = mask[i >> 3] & np.uint8(1 << (i & 7))
        out[i] = grad[i] if kept != 0 else grad.dtype.type(0)


@kernel
def _relu32(blocks: int, count: int, x: int, out: int, mask: int) -> None:
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        bits = at(mask, (count + 7) // 8, np.uint8)[first // 8 : (end + 7) // 8]
        _relu_block(at(x, count, np.uint32)[first:end], 0xFF80_0000, at(out, count, np.uint32)[first:end], bits)


@kernel
def _relu16(blocks: int, count: int, x: int, infinity: int, out: int, mask: int) -> None:
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        bits = at(mask, (count + 7) // 8, np.uint8)[first // 8 : (end + 7) // 8]
        _relu_block(at(x, count, np.uint16)[first:end], infinity, at(out, count, np.uint16)[first:end], bits)


@kernel
def _select32(blocks: int, count: int, mask: int, grad: int, out: int) -> None:
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        bits = at(mask, (count + 7) // 8, np.uint8)[first // 8 : (end + 7) // 8]
        _select_block(bits, at(grad, count, np.uint32)[first:end], at(out, count, np.uint32)[first:end])


@kernel
def _select16(blocks: int, count: int, mask: int, grad: int, out: int) -> None:
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        bits = at(mask, (count + 7) // 8, np.uint8)[first // 8 : (end + 7) // 8]
        _select_block(bits, at(grad, count, np.uint16)[first:end], at(out, count, np.uint16)[first:end])


@define("relu_mask(Tensor x) -> (Tensor, Tensor)", Kernels(_relu_on_cpu, launch_relu, _fill_relu))
def relu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ReLU of x, as torch computes it on that device, and the packed bits of :func:`positive`.

    x is float32, float16, bfloat16 or float64, contiguous; the bits are uint8 ``(ceil(x.numel() / 8),)``.
    """
    check_contiguous(x)
    return empty_contiguous(x), x.new_empty(bitpack.packed_bytes(x.numel(), 1), dtype=torch.uint8)


@define("relu_mask_(Tensor(a!) x) -> Tensor", Kernels(*map(_over, (_relu_on_cpu, launch_relu, _fill_relu))))
def relu_(x: Tensor) -> Tensor:
    """Replace x by its ReLU and return the packed mask; else as :func:`relu`."""
    check_contiguous(x)
    return x.new_empty(bitpack.packed_bytes(x.numel(), 1), dtype=torch.uint8)


@define(
    "mask_select(Tensor mask, Tensor grad) -> Tensor", Kernels(_select_on_cpu, launch_select, copied(select_reference))
)
def select(mask: Tensor, grad: Tensor) -> Tensor:
    """Return each gradient whose bit is 1, and zero in place of the others.

    This selects and does not multiply, so that an infinite gradient at a dead unit gives 0, as in torch. Gradients are
    float32, float16, bfloat16 or float64, contiguous; the mask is uint8 ``(ceil(grad.numel() / 8),)``.
    """
    check_contiguous(grad)
    bitpack.check_packed(mask, grad, 1)
    return empty_contiguous(grad)
