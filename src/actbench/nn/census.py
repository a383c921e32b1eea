"""What a model holds: its kinds of layers, attention modules, and layers whose output is written over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from torch import nn


def census(model: nn.Module, kinds: int = 6) -> str:
    """Return the commonest classes among the modules without children, such as ``20 Conv2d, 20 BatchNorm2d``.

    Args:
        model: The model.
        kinds: How many classes to name.
    """
    leaves = Counter(type(module).__name__ for module in model.modules() if not any(module.children()))
    named = [f"{count} {name}" for name, count in leaves.most_common(kinds)]
    if len(leaves) > kinds:
        named.append(f"{len(leaves) - kinds} other kinds")
    return ", ".join(named)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Give path and module of the outermost modules that compute attention, and of each softmax layer outside of them.

    Models name the class of these modules after what they do: ``nn.MultiheadAttention``, ``BertAttention``,
    ``ShiftedWindowAttention``.
    """
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        if "Attention" in type(module).__name__ or isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmax2d):
            inside.update(module.modules())
            yield path, module


_SAME_MEMORY = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten, nn.Unflatten)
"""Modules that give back what they were given, or a view of it, some of them only without dropping anything."""


def overwritten(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers of a model after which, in a ``nn.Sequential``, a module works in place, with its name.

    What is changed in place by a model's own code cannot be known before it runs.
    """
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if _is_sequence(module):
            for layer, after in pairwise(_steps(module)):
                if getattr(after, "inplace", False):
                    found[layer] = f"{type(after).__name__}(inplace=True)"
    return found


def _steps(module: nn.Module) -> Iterator[nn.Module]:
    """Give the modules that run one after the other, but for those that make no other tensor of what they are given."""
    if _is_sequence(module):
        for child in module.children():
            yield from _steps(child)
    elif not isinstance(module, _SAME_MEMORY) or getattr(module, "inplace", False):
        yield module


def _is_sequence(module: nn.Module) -> bool:
    is_one = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return is_one and "forward" not in vars(module)
