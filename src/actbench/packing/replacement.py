"""Lists the modules of a model, and replaces some by a rule without any other change."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from actbench.errors import ConversionError
from actbench.model.records import Unreached
from actbench.packing.refusals import is_compiled
from actbench.packing.wrapped import bind_entries, unbind_entries


def census(model: nn.Module, kinds: int = 6, *, containers: bool = False) -> str:
    """Return the most common classes of modules without children, such as ``20 Conv2d, 20 BatchNorm2d``.

    With ``containers``, count the modules inside the model that have children, if there are any.
    """
    parts = [module for module in model.modules() if any(module.children()) is containers and module is not model]
    if containers and not parts:
        return census(model, kinds)
    found = Counter(type(module).__name__ for module in parts or [model])
    named = [f"{count} {name}" for name, count in found.most_common(kinds)]
    if len(found) > kinds:
        named.append(f"{len(found) - kinds} other kinds")
    return ", ".join(named)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the outermost modules that compute attention, and of each softmax layer outside of them.

    They are found by the names of their classes: ``nn.MultiheadAttention``, ``BertAttention``,
    ``ShiftedWindowAttention``.
    """
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        if "Attention" in type(module).__name__ or isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmax2d):
            inside.update(module.modules())
            yield path, module


def is_conv1d(kind: type[Any]) -> bool:
    """Return whether a class is ``Conv1D`` of transformers: a linear layer with a (d_in, d_out) weight.

    The check is by name, so that a model without it needs no transformers.
    """
    return f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D"


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is exactly ``nn.Linear`` or ``Conv1D``, not a subclass."""
    return type(layer) is nn.Linear or is_conv1d(type(layer))


def parametrized(layer: nn.Module) -> str | None:
    """Return why a parametrized layer, which torch makes a subclass, stays as it is; None for any other layer."""
    if not is_parametrized(layer):
        return None
    names = list(layer.parametrizations)  # type: ignore[arg-type]
    return f"its {' and '.join(names)} {'is' if len(names) == 1 else 'are'} parametrized (torch.nn.utils.parametrize)"


def reasons(left: Iterable[Unreached]) -> str:
    """Return where a model stays as it is, and why, in one line; empty if it does nowhere.

    Of places with one reason the first is named, and the others are counted.
    """
    groups: dict[str, list[str]] = {}
    for place in left:
        groups.setdefault(place.reason, []).append(place.path or place.kind)
    return "; ".join(
        f"{first} and {len(others)} more: {reason}" if others else f"{first}: {reason}"
        for reason, (first, *others) in groups.items()
    )


_SAME_MEMORY = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten, nn.Unflatten)
"""Modules that return their input or a view of it; dropout only if it drops nothing."""


def overwritten(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers of a model whose next module in a ``nn.Sequential`` works in place, with its name.

    What a model's own code changes in place is known only when it runs.
    """
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if _is_sequence(module):
            for layer, after in pairwise(_steps(module)):
                if getattr(after, "inplace", False):
                    found[layer] = f"{type(after).__name__}(inplace=True)"
    return found


def _steps(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that run one after the other, without those that return their input's memory."""
    if _is_sequence(module):
        for child in module.children():
            yield from _steps(child)
    elif not isinstance(module, _SAME_MEMORY) or getattr(module, "inplace", False):
        yield module


def _is_sequence(module: nn.Module) -> bool:
    is_one = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return is_one and "forward" not in vars(module)


def carry_hooks(exact: nn.Module, standin: nn.Module) -> None:
    """Give the hooks (shared) and the train/eval flag of a layer to its replacement."""
    for name in _hook_tables(exact):
        vars(standin)[name] = vars(exact)[name]
    standin.train(exact.training)


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy of a module without its hooks, which belong to the layer in the model."""
    bare = copy.copy(module)
    for name in _hook_tables(module):
        # _is_full_backward_hook is not a table
        vars(bare)[name] = OrderedDict() if isinstance(vars(module)[name], dict) else vars(nn.Module())[name]
    return bare


def _hook_tables(module: nn.Module) -> list[str]:
    # torch keeps each kind of hooks in an attribute that nn.Module.__init__ makes
    return [name for name in vars(nn.Module()) if "hook" in name]


M = TypeVar("M")
Rule = Callable[[nn.Module, str], nn.Module | None]


def swap(model: nn.Module, rule: Rule) -> nn.Module:
    """Replace every module for which ``rule(module, path)`` returns another one.

    Parents are visited before their children and each module once, by its first path (empty for the model), so a module
    that is used in two places is replaced by one module in both. A replaced module is not searched further. Rules call
    :func:`inherit`, which carries hooks, flag and attributes over.

    Returns:
        The model, changed in place, or what replaces it.

    Raises:
        ConversionError: A module that the rule replaces was compiled by itself, so that the compiled code would still
            run. The model is then unchanged.
    """
    unbind_entries(model)  # an entry belongs to the module that it is bound on
    swapped, changes = model, list[_Change]()
    try:
        # nothing is changed until the whole walk has raised no error
        swapped = _visit(model, "", rule, {}, changes)
        for parent, name, child in changes:
            parent._modules[name] = child
    finally:
        bind_entries(swapped)
    return swapped


_Change = tuple[nn.Module, str, nn.Module]
"""A module, the name of its child, and the child's replacement."""


def _visit(
    module: nn.Module, path: str, rule: Rule, memo: dict[int, nn.Module], changes: list[_Change], compiled: bool = False
) -> nn.Module:
    """Return a module's replacement or itself, and add the changes inside it to ``changes``."""
    if id(module) in memo:
        return memo[id(module)]
    replacement = rule(module, path)
    if replacement is not None and (compiled or is_compiled(module)):
        raise ConversionError(
            f"{path or 'the model'} is a {type(module).__name__} that torch.compile has compiled by itself: the "
            "compiled code would still run in place of the converted module; convert first, and compile then"
        )
    memo[id(module)] = module if replacement is None else replacement
    if replacement is None:
        for name, child in list(module._modules.items()):
            if child is not None:
                place = f"{path}.{name}" if path else name
                by_itself = is_compiled(module) and name == "_orig_mod"
                new = _visit(child, place, rule, memo, changes, by_itself)
                if new is not child:
                    changes.append((module, name, new))
    return memo[id(module)]


def standing_in(layer: nn.Module, cls: type[M], **attributes: Any) -> M:
    """Return a module of a class with these attributes and the identity of ``layer``."""
    new: Any = cls.__new__(cls)
    nn.Module.__init__(new)
    vars(new).update(attributes)
    inherit(new, layer)
    return new  # type: ignore[no-any-return]


def made_class(
    name: str, bases: tuple[type[Any], ...], make: Callable[[Any], type[Any] | None], kind: type[Any], **own: Any
) -> type[Any]:
    """Return the class that ``make(kind)`` makes at run time, with these bases and attributes.

    No module has its name, so its objects are pickled by ``make`` and ``kind``.
    """

    def reduced(layer: nn.Module) -> tuple[Any, ...]:
        return _unfilled, (make, kind), vars(layer)

    return type(name, bases, {**own, "__module__": make.__module__, "__reduce__": reduced})


def _unfilled(make: Callable[[Any], Any], kind: type[Any]) -> Any:
    cls = make(kind)
    return cls.__new__(cls)


def inherit(new: nn.Module, old: nn.Module) -> nn.Module:
    """Give ``new`` the identity of ``old``: its parameters, buffers, hooks and train/eval flag (shared, not copied)."""
    kept = set(vars(new)) - set(vars(nn.Module()))
    for name, value in vars(old).items():
        if name not in kept:
            vars(new)[name] = value
    return new
