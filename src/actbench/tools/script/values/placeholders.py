"""Values assumed where data is unknown, as it depends on weights or activations: 1 in every element.

So ``loss.item()`` is 1.0, and a predicate such as ``isnan(loss)``, ``norm > 1`` or ``isfinite(x).all()`` is what it is
for ones. Checks that all elements are valid, as torch's distributions have, pass. Shares of a whole are equal.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from actbench.simulator import known
from actbench.simulator.cachingmode import tensors_of
from actbench.tools.script.values import bounds

aten = torch.ops.aten

_NAME = "_actbench_plausible"
"""The attribute of a fake tensor with unknown values that holds the value assumed for all of them, if it is not 1."""

_SAME = frozenset(
    getattr(aten, name)
    for name in (
        *("_to_copy", "view", "reshape", "select", "squeeze", "unsqueeze", "stack", "cat", "clone", "detach", "alias"),
        *("slice", "expand", "transpose", "permute", "t", "unbind", "index"),
    )
)
"""Operators whose result has the values of their first argument."""

_PREDICATES = frozenset(
    getattr(aten, name)
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "any", "all", "isnan", "isinf", "isposinf", "isneginf", "signbit"),
        *("logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "mul"),
    )
)
"""Operators whose truth values follow from placeholders."""

_ALL_VALID = aten._is_all_true
"""What distributions and ``torch._check_tensor_all`` ask for: whether a check holds for each element."""

_DECIDED = {
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), True),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), False),
}
"""Operators whose result is this truth value where one argument is, whatever the other is."""

_disabled: Any = torch._C._DisableTorchDispatch


def forget(tensor: Tensor) -> None:
    """Drop the placeholder of a tensor whose values were written."""
    vars(tensor).pop(_NAME, None)


def one(tensor: Tensor) -> Any:
    """Return the placeholder of each element, as a number of the tensor's type; the value of a known single element.

    Unknown truth values count as False.
    """
    value = known.value_of(tensor)
    if value is not None and value.numel() == 1:
        with _disabled():
            return value.item()
    with _disabled():
        return torch.full((), vars(tensor).get(_NAME, tensor.dtype is not torch.bool), dtype=tensor.dtype).item()


def follow(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Note the placeholder of an operator's result, unless its values are known."""
    if type(result) is not FakeTensor or known.NAME in vars(result):
        return
    if func in _DECIDED:
        _decide(func, args, result)
    found = _taken_for(func, args, kwargs, result)
    if found is not None:
        vars(result)[_NAME] = found


def _taken_for(func: Any, args: Any, kwargs: Any, result: FakeTensor) -> float | None:
    """Return the placeholder of a result with unknown values; None for 1.

    Truth values are those of ones. Shares of a whole, as softmax returns, are equal: ``numpy.random.choice`` draws by
    them, and checks that their sum is 1.
    """
    packet = getattr(func, "overloadpacket", None)
    if packet in _SAME:
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        return vars(first).get(_NAME) if result.dtype is not torch.bool else bool(one(first))
    if result.dtype is torch.bool:
        return True if packet is _ALL_VALID else _evaluated(func, args, kwargs) if packet in _PREDICATES else None
    if packet is aten.max and not result.is_floating_point() and (below := bounds.below(args[0])) is not None:
        return below - 1
    if packet in (aten._softmax, aten._log_softmax) and result.dim():
        share = 1 / max(result.shape[args[1]], 1)
        return share if packet is aten._softmax else math.log(share)
    logarithm = vars(args[0]).get(_NAME) if packet is aten.exp else None
    return None if logarithm is None or logarithm > 0 else math.exp(logarithm)


def _evaluated(func: Any, args: Any, kwargs: Any) -> bool:
    """Return what a predicate is for placeholders of one element each."""
    if not any(isinstance(each, FakeTensor) for each in tensors_of((args, kwargs))):
        return False

    def element(value: Any) -> Any:
        return torch.full((1,), one(value), dtype=value.dtype) if isinstance(value, Tensor) else value

    with _disabled():
        if func.overloadpacket in (aten.any, aten.all):
            return bool(element(args[0]).any())
        return bool(func(*tree_map(element, args), **tree_map(element, kwargs)).any())


def _decide(func: Any, args: Any, result: FakeTensor) -> None:
    """Keep the values of a result that one argument decides: ``is_at_its_end | is_end_token`` ends a generation."""
    if _DECIDED[func] and result.dtype is not torch.bool:
        return  # one bit of an integer decides no others
    for truth in args:
        value = known.value_of(truth)
        if value is not None and value.dtype is torch.bool and value.shape == result.shape:
            with _disabled():
                if bool((value if _DECIDED[func] else ~value).all()):
                    known.keep(result, value.to(result.dtype, copy=True))
