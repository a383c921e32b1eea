"""The types that torch's operators compute in under autocast, without autocast itself.

Autocast caches the cast copy of a parameter for the rest of its region. A copy made without autograd, as in the forward
of an autograd function, would cut off the gradient at the next use of the parameter. So the functions here cast
explicitly, with autocast off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_WITH_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu") if torch.amp.is_autocast_available(kind)
)
"""Asked once, since torch.compile of some versions breaks a graph at the question."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to sum numbers of a type in."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type that torch would multiply ``x`` in: autocast's if it is on."""
    # autocast leaves float64 as it is (cached_cast of aten/src/ATen/autocast_mode.cpp)
    if not _is_autocast(x) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def norm_dtype(x: Tensor) -> torch.dtype | None:
    """Return the type that autocast casts x and the parameters of a layer or group norm to, or None if it does not."""
    # autocast has layer and group norm in its float32 list on CUDA, and in none on a CPU
    if not _is_autocast(x) or x.dtype == torch.float64 or x.device.type != "cuda":
        return None
    return torch.float32


def cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a tensor cast to a type; unchanged if either is None."""
    return tensor if tensor is None or dtype is None or tensor.dtype == dtype else tensor.to(dtype)


def dtypes_of(*tensors: Tensor | None) -> list[torch.dtype | None]:
    """Return the type of each tensor, for :func:`cast_all`."""
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def other_dtypes(dtype: torch.dtype, *tensors: Tensor | None) -> list[torch.dtype | None] | None:
    """Return the type of each tensor as :func:`dtypes_of`, or None if all have this type."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype != dtype:
            return dtypes_of(*tensors)
    return None


def cast_all(tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None] | None) -> Sequence[Tensor | None]:
    """Return each tensor in its type, as :func:`cast` does; None for the types that they have."""
    if dtypes is None:
        return tensors
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        if tensor is not None and dtype is not None and tensor.dtype != dtype:
            return [cast(each, own) for each, own in zip(tensors, dtypes, strict=True)]
    return tensors  # as nearly always


_AS_IT_IS = nullcontext()


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off on the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if _is_autocast(x) else _AS_IT_IS


def _is_autocast(x: Tensor) -> bool:
    if not _is_any_autocast():  # one question for all devices comes first
        return False
    return x.device.type in _WITH_AUTOCAST and torch.is_autocast_enabled(x.device.type)


_is_any_autocast: Callable[[], bool] = vars(torch._C)["_is_any_autocast_enabled"]
