"""Products of fake tensors of two dtypes, which are refused as real operators do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actbench.errors import ModelError

_aten = torch.ops.aten
OF_MATRICES = frozenset(
    overload.default for overload in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot)
)
"""Operators that cuBLAS computes on a CUDA device."""

PRODUCTS = OF_MATRICES | {_aten.convolution.default}
"""Operators whose tensors must have one dtype, which their fake forms do not check."""


def check_one_type(func: Any, args: Sequence[Any]) -> None:
    """Raise a ModelError if a product is of tensors of two dtypes."""
    found = list(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in args if isinstance(x, Tensor)))
    if len(found) > 1:
        raise ModelError(
            f"the model gives {func} tensors of {' and '.join(found)}, which torch refuses in a real step; cast one of "
            "them, make batches of the dtype of the weights, or set --dtype or --autocast"
        )
