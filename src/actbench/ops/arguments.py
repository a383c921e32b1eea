"""Checks of arguments that a kernel would misread or read past; plain ``if``s, since every call pays for them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.ops import bitpack

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def wide(tensor: Tensor) -> Tensor:
    """Return a float tensor in the type that operators compute in: float64 for float64, else float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def check_contiguous(tensor: Tensor) -> None:
    """Raise a ValueError unless the tensor is contiguous and of a float type that the operators take.

    A fake tensor may have other strides: a compiler's passes try layouts that no kernel will get.
    """
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{tensor.dtype} is not one of {DTYPES}")
    if not tensor.is_contiguous() and not isinstance(tensor, FakeTensor):
        raise ValueError(f"the tensor must be contiguous, found strides {tensor.stride()}")


def check_bits(bits: int) -> None:
    """Raise a ValueError unless ``bits`` is from 1 to 8."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be from 1 to 8, found {bits}")


def check_seed(seed: Tensor) -> None:
    """Raise a ValueError unless the seed is a 0-d int64 tensor on the CPU."""
    if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device.type != "cpu":
        raise ValueError(f"the seed must be a 0-d int64 tensor on the CPU, found {seed.dtype} {tuple(seed.shape)}")


def check_vector(vector: Tensor, dtype: torch.dtype, device: torch.device, what: str) -> None:
    """Raise a ValueError, which names ``what``, unless ``vector`` is contiguous and of this type and device."""
    if vector.dtype != dtype or vector.dim() != 1 or not vector.is_contiguous() or vector.device != device:
        found = f"{vector.dtype} {tuple(vector.shape)} on {vector.device}"
        raise ValueError(f"{what} must be a contiguous {dtype} vector on {device}, found {found}")


def check_table(table: Tensor, tensor: Tensor, bits: int, entries: int, what: str) -> None:
    """Raise a ValueError unless a table of bounds or levels has these entries and fits the tensor."""
    if table.dtype != torch.float32 or table.dim() != 1 or not table.is_contiguous():
        raise ValueError(f"{what} must be a contiguous float32 vector, found {table.dtype} {tuple(table.shape)}")
    if table.numel() != entries:
        raise ValueError(f"{bits} bits take {entries} {what}, found {table.numel()}")
    if table.device != tensor.device:
        raise ValueError(f"{what} on {table.device}, the tensor on {tensor.device}")


def check_packed(packed: Tensor, tensor: Tensor, bits: int) -> None:
    """Raise a ValueError unless ``packed`` is a stream of one code for each element of the tensor."""
    if packed.dtype != torch.uint8 or not packed.is_contiguous() or packed.device != tensor.device:
        raise ValueError(f"packed must be contiguous uint8 on {tensor.device}, found {packed.dtype} on {packed.device}")
    expected = bitpack.packed_bytes(tensor.numel(), bits)
    if packed.numel() != expected:
        raise ValueError(f"packed must have {expected} bytes, found {packed.numel()}")
