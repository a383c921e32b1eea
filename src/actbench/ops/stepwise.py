"""Few-bit derivatives: which step of a piecewise-constant function each element is on, packed, and read back.

``actbench::stepwise_encode(x, bounds, bits, fold)`` gives each element the number of bounds strictly below it (below
``|x|`` when folded, for even derivatives) and packs these codes as in :mod:`actbench.ops.bitpack`. NaN has code 0; it
is the forward output, which is exact, that carries a NaN on. Half types are compared as float32, which holds them
exactly; float64 is compared in float64 and is computed by the reference.

``actbench::stepwise_decode(packed, levels, grad, bits)`` is ``grad * levels[code]``, one product in float32 (float64
for float64) rounded once to the type of ``grad``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.ops import bitpack
from actbench.ops.arguments import check_bits, check_contiguous, check_packed, check_table
from actbench.ops.cpu import stepwise as cpu
from actbench.ops.cuda import stepwise as cuda
from actbench.ops.library import define, direct


def encode_reference(x: Tensor, bounds: Tensor, bits: int, fold: bool) -> Tensor:
    """Encode in plain torch, on any device: what every kernel is held to, bit for bit.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous.
        bounds: float32 ``(2**bits - 1,)``, ascending.
        bits: 1 to 8.
        fold: Compare ``|x|``.

    Returns:
        uint8 ``(ceil(x.numel() * bits / 8),)``.
    """
    _check_encode(x, bounds, bits)
    values = _wide(x).reshape(-1)
    values = values.abs() if fold else values
    codes = torch.bucketize(values, bounds.to(values.dtype)).to(torch.uint8)
    return bitpack.pack(codes.masked_fill(values.isnan(), 0), bits)


def decode_reference(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> Tensor:
    """Decode in plain torch, on any device: what every kernel is held to, bit for bit.

    Args:
        packed: uint8 ``(ceil(grad.numel() * bits / 8),)``.
        levels: float32 ``(2**bits,)``.
        grad: float32, float16, bfloat16 or float64, contiguous.
        bits: 1 to 8.

    Returns:
        A tensor like ``grad``.
    """
    _check_decode(packed, levels, grad, bits)
    codes = bitpack.unpack(packed, bits, grad.numel())
    wide = _wide(grad)
    return (wide * levels.to(wide.dtype)[codes].reshape(grad.shape)).to(grad.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _encode_cpu(x: Tensor, bounds: Tensor, bits: int, fold: bool) -> Tensor:
    if x.dtype == torch.float64:
        return encode_reference(x, bounds, bits, fold)
    _check_encode(x, bounds, bits)
    return cpu.encode(x, bounds, bits, fold)


def _decode_cpu(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> Tensor:
    if grad.dtype == torch.float64:
        return decode_reference(packed, levels, grad, bits)
    _check_decode(packed, levels, grad, bits)
    return cpu.decode(packed, levels, grad, bits)


def _encode_cuda(x: Tensor, bounds: Tensor, bits: int, fold: bool) -> Tensor:
    if x.dtype == torch.float64:
        return encode_reference(x, bounds, bits, fold)
    _check_encode(x, bounds, bits)
    return cuda.encode(x, bounds, bits, fold)


def _decode_cuda(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> Tensor:
    if grad.dtype == torch.float64:
        return decode_reference(packed, levels, grad, bits)
    _check_decode(packed, levels, grad, bits)
    return cuda.decode(packed, levels, grad, bits)


def _encode_fake(x: Tensor, bounds: Tensor, bits: int, fold: bool) -> Tensor:
    _check_encode(x, bounds, bits)
    return x.new_empty(bitpack.packed_bytes(x.numel(), bits), dtype=torch.uint8)


def _decode_fake(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> Tensor:
    _check_decode(packed, levels, grad, bits)
    return torch.empty_like(grad.contiguous())


def _check_encode(x: Tensor, bounds: Tensor, bits: int) -> None:
    check_bits(bits)
    check_contiguous(x)
    check_table(bounds, x, bits, (1 << bits) - 1, "bounds")


def _check_decode(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> None:
    check_bits(bits)
    check_contiguous(grad)
    check_table(levels, grad, bits, 1 << bits, "levels")
    check_packed(packed, grad, bits)


_ENCODE = "stepwise_encode(Tensor x, Tensor bounds, int bits, bool fold) -> Tensor"
_DECODE = "stepwise_decode(Tensor packed, Tensor levels, Tensor grad, int bits) -> Tensor"
define(_ENCODE, {"CPU": _encode_cpu, "CUDA": _encode_cuda}, _encode_fake)
define(_DECODE, {"CPU": _decode_cpu, "CUDA": _decode_cuda}, _decode_fake)

_ops = torch.ops.actbench


def encode(x: Tensor, bounds: Tensor, bits: int, fold: bool) -> Tensor:
    """Return packed codes: how many bounds lie strictly below each element; arguments as the reference's."""
    if direct(x):
        return _encode_cpu(x, bounds, bits, fold)
    packed: Tensor = _ops.stepwise_encode.default(x, bounds, bits, fold)
    return packed


def decode(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> Tensor:
    """Return each gradient times the level of its code; arguments as the reference's."""
    if type(packed) is Tensor and direct(grad):
        return _decode_cpu(packed, levels, grad, bits)
    product: Tensor = _ops.stepwise_decode.default(packed, levels, grad, bits)
    return product
