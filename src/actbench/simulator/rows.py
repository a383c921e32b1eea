"""Views and rows of fake tensors whose results have the same form wherever they begin in a storage.

Loops over tokens select one row after the other: without this, each row would be another operator to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
_ROWS = frozenset((_aten.select.int, _aten.select_backward.default))
"""Operators of one row, whose results have the same form for every row: loops over tokens run them."""

RELATIVE = frozenset(
    overload
    for packet in (
        *(_aten.alias, _aten.detach, _aten.expand, _aten.permute, _aten.select, _aten.slice, _aten.split),
        *(_aten.squeeze, _aten.t, _aten.transpose, _aten.unbind, _aten.unsqueeze, _aten.view),
    )
    for overload in (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
    if overload is not _aten.view.dtype
)
"""Views whose distance from the beginning of their argument does not depend on where that begins in its storage."""


def is_row(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator of one row names its row by a number in range."""
    if func not in _ROWS or [type(arg) for arg in args] != [
        FakeTensor,
        *([int, int] if func is _aten.select.int else [list, int, int]),
    ]:
        return False
    shape, dim = (args[0].shape if func is _aten.select.int else args[1]), args[-2]
    return bool(-len(shape) <= dim < len(shape) and 0 <= args[-1] < shape[dim])


def before_row(func: Any, args: Sequence[Any]) -> int:
    """Return the elements of a storage between the beginning of an argument and the row that is selected from it."""
    return args[2] * args[0].stride(args[1]) if func is _aten.select.int and is_row(func, args) else 0
