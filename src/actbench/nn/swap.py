"""Replace modules of a model by a rule, without touching anything else in it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

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
    """
    return _visit(model, "", rule, {})


def _visit(module: nn.Module, path: str, rule: Rule, memo: dict[int, nn.Module]) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]
    replacement = rule(module, path)
    memo[id(module)] = module if replacement is None else replacement
    if replacement is None:
        for name, child in list(module._modules.items()):
            if child is not None:
                module._modules[name] = _visit(child, f"{path}.{name}" if path else name, rule, memo)
    return memo[id(module)]


def inherit(new: nn.Module, old: nn.Module) -> nn.Module:
    """Give ``new`` the identity of ``old``: its parameters, buffers, hooks and train/eval flag (shared, not copied)."""
    kept = set(vars(new)) - set(vars(nn.Module()))
    for name, value in vars(old).items():
        if name not in kept:
            vars(new)[name] = value
    return new
