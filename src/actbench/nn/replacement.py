"""Replacing modules of a model by a rule, without touching anything else in it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from actbench.errors import ConversionError
from actbench.nn.refusals import is_compiled
from actbench.nn.wrapped import bind_entries, unbind_entries


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


M = TypeVar("M")
Rule = Callable[[nn.Module, str], nn.Module | None]


def swap(model: nn.Module, rule: Rule) -> nn.Module:
    """Replace every module for which ``rule(module, path)`` returns another one.

    Parents are visited before their children and each module once, so a module that is used in two places is
    replaced by one module in both. What was replaced is not descended into. Forward and backward hooks, the
    train/eval flag and attributes set by others are carried over by :func:`inherit`, which rules call.

    Args:
        model: The model; changed in place unless it is itself replaced.
        rule: Called once for each distinct module with its first path (empty for the model).

    Returns:
        The model, or what replaces it.

    Raises:
        ConversionError: A module that the rule replaces was compiled by itself, so that what is compiled would run on.
    """
    unbind_entries(model)  # an entry is of the module that it stands on, and of no other
    swapped = model
    try:
        swapped = _visit(model, "", rule, {})
    finally:
        bind_entries(swapped)
    return swapped


def _visit(module: nn.Module, path: str, rule: Rule, memo: dict[int, nn.Module], compiled: bool = False) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]
    replacement = rule(module, path)
    if replacement is not None and (compiled or is_compiled(module)):
        raise ConversionError(
            f"{path or 'the model'} is a {type(module).__name__} that torch.compile has compiled by itself, and what "
            "is compiled would run on in place of what it is converted to; convert first, and compile then"
        )
    memo[id(module)] = module if replacement is None else replacement
    if replacement is None:
        for name, child in list(module._modules.items()):
            if child is not None:
                place = f"{path}.{name}" if path else name
                module._modules[name] = _visit(child, place, rule, memo, is_compiled(module) and name == "_orig_mod")
    return memo[id(module)]


def standing_in(layer: nn.Module, cls: type[M], **attributes: Any) -> M:
    """Return a module of a class with attributes of its own and the identity of ``layer``."""
    new: Any = cls.__new__(cls)
    nn.Module.__init__(new)
    vars(new).update(attributes)
    inherit(new, layer)
    return new  # type: ignore[no-any-return]


def inherit(new: nn.Module, old: nn.Module) -> nn.Module:
    """Give ``new`` the identity of ``old``: its parameters, buffers, hooks and train/eval flag (shared, not copied)."""
    kept = set(vars(new)) - set(vars(nn.Module()))
    for name, value in vars(old).items():
        if name not in kept:
            vars(new)[name] = value
    return new
