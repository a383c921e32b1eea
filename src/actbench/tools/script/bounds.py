"""How many values integers can have that a script computes from weights: the classes that a model chooses among.

``argmax`` of scores (rows, 10) returns integers below 10. Metrics ask for their different values, or count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.simulator import known
from actbench.simulator.recalled import tensors_of

aten = torch.ops.aten

_NAME = "_actbench_below"
"""The attribute of a fake tensor of integers that are not negative and below this number."""


def _overloads(*names: str) -> dict[Any, str]:
    packets = {name: getattr(aten, name) for name in names}
    return {getattr(packet, each): name for name, packet in packets.items() for each in packet.overloads()}


_DIM_AT = dict.fromkeys(("argmax", "argmin", "max", "min", "sort", "argsort", "mode", "median"), 1)
_DIM_AT |= {"topk": 2, "kthvalue": 2, "multinomial": 3}
"""Operators whose last result chooses along a dimension, and the place of the dimension among their arguments."""

_CHOOSE = _overloads(*_DIM_AT)
_KEEP = _overloads(
    *("_to_copy", "clone", "detach", "alias", "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t"),
    *("select", "slice", "squeeze", "unsqueeze", "split", "unbind", "index", "index_select", "gather", "masked_select"),
    *("cat", "stack", "repeat", "flip", "roll"),
)
"""Operators that return elements of their first argument, or of the tensors in it."""

BOUNDING = frozenset((*_CHOOSE, *_KEEP))
"""Operators that :func:`bound` knows."""


def below(tensor: Tensor) -> int | None:
    """Return a number that all elements of a tensor are below, and none is negative; None if there is none."""
    value = known.value_of(tensor)
    if tensor.dtype is torch.bool:
        return 2
    if value is None or not value.numel() or value.is_floating_point():
        return vars(tensor).get(_NAME)
    with torch._C._DisableTorchDispatch():
        return None if value.min() < 0 else int(value.max()) + 1


def bound(func: Any, args: Sequence[Any], result: Any) -> None:
    """Note below what number the integers are that one of ``BOUNDING`` returned."""
    made = [each for each in tensors_of(result) if isinstance(each, FakeTensor) and not each.is_floating_point()]
    made = [each for each in made if known.NAME not in vars(each)]
    if made and func in _CHOOSE:
        vars(made[-1])[_NAME] = _choices(_CHOOSE[func], args)
    elif made:
        bounds = [below(each) for each in tensors_of(args[0])]
        numbers = [each for each in bounds if each is not None]
        if numbers and len(numbers) == len(bounds):
            for each in made:
                vars(each)[_NAME] = max(numbers)


def _choices(name: str, args: Sequence[Any]) -> int:
    """Return how many elements an operator chooses among."""
    x: Tensor = args[0]
    dim = args[_DIM_AT[name]] if len(args) > _DIM_AT[name] else None if name.startswith("arg") else -1
    return x.numel() if dim is None or not x.dim() else x.shape[dim]
