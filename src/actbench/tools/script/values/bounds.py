"""How many values integers can have that a script computes from weights: the classes that a model chooses among.

``argmax`` of scores (rows, 10) returns integers below 10. Metrics ask for their different values, or count them.
Numbers that are clamped have bounds too: the levels of a pyramid, among which a detector deals its regions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.simulator import known
from actbench.simulator.cachingmode import tensors_of

aten = torch.ops.aten

_NAME = "_actbench_below"
"""The attribute of a fake tensor of integers: a number that they are below, or a table of known ones that they are in.

The largest of a table is looked for only when it is asked for.
"""


def _overloads(*names: str) -> list[Any]:
    packets = [getattr(aten, name) for name in names]
    return [getattr(packet, each) for packet in packets for each in packet.overloads()]


def _places_of_dim() -> dict[Any, int]:
    names = ("argmax", "argmin", "max", "min", "sort", "argsort", "mode", "median", "topk", "kthvalue")
    found = {}
    for each in _overloads(*names):
        arguments = [argument.name for argument in each._schema.arguments]
        if "dim" in arguments:
            found[each] = arguments.index("dim")
    return found


_CHOOSE = _places_of_dim()
"""Operators whose last result chooses along a dimension, and the place of the dimension among their arguments."""

_KEEP = frozenset(
    (
        *_overloads("_to_copy", "clone", "detach", "alias", "view", "_unsafe_view", "reshape", "expand", "permute"),
        *_overloads("transpose", "t", "select", "slice", "squeeze", "unsqueeze", "split", "unbind", "index", "gather"),
        *_overloads("index_select", "masked_select", "cat", "stack", "repeat", "flip", "roll"),
        *(aten.max.default, aten.min.default, aten.median.default),
    )
)
"""Operators that return elements of their first argument, or of the tensors in it."""

_DRAW = aten.multinomial.default

_RANGE = "_actbench_range"
"""The attribute of a fake tensor whose numbers are clamped: the smallest and the largest that they can be."""

_SHIFT = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
_IN_RANGE = frozenset((aten.clamp.default, aten._to_copy.default, aten.floor.default, aten.round.default, *_SHIFT))
"""Operators whose results are in a range that follows from that of their first argument."""


def below(tensor: Tensor) -> int | None:
    """Return a number that all elements of a tensor are below, and none is negative; None if there is none."""
    if tensor.dtype is torch.bool:
        return 2
    found = _found(tensor)
    if not isinstance(found, Tensor):
        return found
    with torch._C._DisableTorchDispatch():
        return int(found.max()) + 1 if found.numel() and found.min() >= 0 else None


def choices(tensor: Tensor) -> int | None:
    """Return how many numbers there are to choose among for each element of a tensor of unknown values."""
    found = _found(tensor)
    return found if isinstance(found, int) else None


def forget(tensor: Tensor) -> None:
    """Forget what is known of a tensor whose integers were written."""
    vars(tensor).pop(_NAME, None)
    vars(tensor).pop(_RANGE, None)


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Note below what number the integers are that an operator returned."""
    if func in _IN_RANGE:
        _bound_by_range(func, args, kwargs, result)
    if func not in _CHOOSE and func not in _KEEP and func is not _DRAW:
        return
    made = [each for each in tensors_of(result) if isinstance(each, FakeTensor) and not each.is_floating_point()]
    made = [each for each in made if known.NAME not in vars(each)]
    if not made:
        return
    if func in _KEEP:
        sources = tensors_of(args[0])
        found = _found(sources[0]) if len(sources) == 1 else _largest([below(each) for each in sources])
        for each in made:
            if found is not None or _RANGE not in vars(each):
                vars(each)[_NAME] = found
    else:
        vars(made[-1])[_NAME] = args[0].shape[-1] if func is _DRAW else _choices(func, args, kwargs)


def _bound_by_range(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    if type(result) is not FakeTensor or known.NAME in vars(result):
        return
    ends = _ends(func, args, kwargs)
    if ends is None:
        return
    vars(result)[_RANGE] = ends
    if not result.is_floating_point() and ends[0] == 0:
        vars(result)[_NAME] = int(ends[1]) + 1


def _ends(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the smallest and the largest number that an operator can return; None if one is unknown."""
    if func is aten.clamp.default:
        low, high = (*args[1:], *(kwargs[name] for name in ("min", "max") if name in kwargs), None)[:2]
        return None if low is None or high is None else (low, high)
    ends: tuple[float, float] | None = vars(args[0]).get(_RANGE) if isinstance(args[0], Tensor) else None
    if ends is None or func not in _SHIFT:
        return ends
    by, is_plain = args[1], kwargs.get("alpha", 1) == 1
    if not (is_plain and isinstance(by, int | float)):
        return None
    return ends[0] + _SHIFT[func] * by, ends[1] + _SHIFT[func] * by


def _found(tensor: Tensor) -> int | Tensor | None:
    value = known.value_of(tensor)
    has_integers = value is not None and not value.is_floating_point() and value.dtype is not torch.bool
    return value if has_integers else vars(tensor).get(_NAME)


def _largest(bounds: Sequence[int | None]) -> int | None:
    return max((each or 0 for each in bounds), default=None) if None not in bounds else None


def _choices(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many elements an operator chooses among."""
    x, place = args[0], _CHOOSE[func]
    named = kwargs.get("dim", func._schema.arguments[place].default_value)
    dim = args[place] if len(args) > place else named
    return int(x.numel() if dim is None or not x.dim() else x.shape[dim])
