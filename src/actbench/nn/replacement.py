"""A layer that stands in a model for another one, which it holds and calls: its hooks and its flag."""

from __future__ import annotations

import copy
from collections import OrderedDict

from torch import nn


def carry_hooks(exact: nn.Module, standin: nn.Module) -> None:
    """Give the hooks (shared) and the train/eval flag of a layer to the one that stands in for it."""
    for name in _hook_tables(exact):
        vars(standin)[name] = vars(exact)[name]
    standin.train(exact.training)


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a module that computes the same; hooks belong to the layer that stands in the model."""
    bare = copy.copy(module)
    for name in _hook_tables(module):
        vars(bare)[name] = OrderedDict() if isinstance(vars(module)[name], dict) else vars(nn.Module())[name]
    return bare


def _hook_tables(module: nn.Module) -> list[str]:
    return [name for name in vars(nn.Module()) if "hook" in name]
