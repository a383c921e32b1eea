"""Layers whose output the module that runs after them writes over."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import nn

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
