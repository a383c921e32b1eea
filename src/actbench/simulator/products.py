"""Products of matrices: those of two dtypes are refused as real operators do, and operands may be copied first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actbench.errors import ModelError

_aten = torch.ops.aten
_MAKING = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot, _aten.vdot)
_ADDING = (_aten.addmm_, _aten.baddbmm_, _aten.addmv_)

OF_MATRICES = frozenset(
    getattr(packet, name)
    for packet in (*_MAKING, *_ADDING, _aten._scaled_mm)
    for name in packet.overloads()  # type: ignore[no-untyped-call]
)
"""Operators that cuBLAS or cuBLASLt computes on a CUDA device."""

PRODUCTS = frozenset(packet.default for packet in (*_MAKING, _aten.convolution))
"""Operators whose tensors must have one dtype, which their fake forms do not check."""


def check_one_type(func: Any, args: Sequence[Any]) -> None:
    """Raise a ModelError if a product is of tensors of two dtypes."""
    found = list(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in args if isinstance(x, Tensor)))
    if len(found) > 1:
        raise ModelError(
            f"the model gives {func} tensors of {' and '.join(found)}, which torch refuses in a real step; cast one of "
            "them, make batches of the dtype of the weights, or set --dtype or --autocast"
        )


def copied_bytes(args: Sequence[Any], result: Tensor) -> int:
    """Return the bytes of the copies of operands that BLAS cannot read, such as the expanded gradient of a sum."""
    return sum(each.numel() * each.element_size() for each in args[-2:] if not _is_readable(each))


def _is_readable(matrix: Tensor) -> bool:
    """Return whether one of the last two dimensions is dense, and the other steps over it."""
    if matrix.is_contiguous() or matrix.mT.is_contiguous():  # a dimension of size 1 may have any stride
        return 0 not in matrix.stride()[-2:] or matrix.dim() == 2
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))
