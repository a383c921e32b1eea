"""What transformers would do otherwise on fake tensors, by chance, or by slow reference code.

Attention over rows that are one unpadded sequence each needs no mask but the triangle that its kernels know.
Transformers looks that up in values. On fake tensors it cannot, and builds masks of batch times length times length,
which no real step has, and by which a simulation of a CUDA device would choose another kernel.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute, if it is there, by what ``change`` makes of it, inside the block."""
    if not hasattr(owner, name):
        yield
        return
    own = getattr(owner, name)
    setattr(owner, name, change(own))
    try:
        yield
    finally:
        setattr(owner, name, own)


_MASKING = "transformers.masking_utils"
_ASK_FOR_PADDING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def full_rows(batch: Mapping[str, Any]) -> Iterator[None]:
    """Let models take each row of a fake batch for one unpadded sequence inside the block.

    Masks are built all the same for a batch that gives positions, which may hold several sequences in a row, or a mask.
    """
    masking = sys.modules.get(_MASKING)  # it is there where a model of transformers is
    with ExitStack() as stack:
        if masking is not None and "position_ids" not in batch:
            stack.enter_context(replaced(masking, "find_packed_sequence_indices", _not_packed))
        if masking is not None and not any("mask" in str(name) for name in batch):
            for name in _ASK_FOR_PADDING:
                stack.enter_context(replaced(masking, name, _not_padded))
        yield


def _not_packed(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def found(position_ids: Any) -> Any:
        return None if isinstance(position_ids, FakeTensor) else find(position_ids)

    return found


def _not_padded(ask: Callable[..., bool]) -> Callable[..., bool]:
    def asked(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        return ask(None if isinstance(padding_mask, FakeTensor) else padding_mask, *args, **kwargs)

    return asked


DISTRIBUTIONS = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}


def missing_kernels(module: nn.Module) -> tuple[str, ...]:
    """Return the packages for want of which transformers runs reference code in a model, sorted.

    Transformers wraps a function that a package has a kernel for, and notes there whether it found it; its earlier
    versions have ``is_fast_path_available`` beside such layers. Parts that are not of transformers are passed over.
    """
    names = {type(part).__module__ for part in module.modules()}
    places = [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]
    return tuple(sorted({package for place in places for package in _wanted(place)}))


def _wanted(place: ModuleType) -> Iterator[str]:
    if vars(place).get("is_fast_path_available") is False:
        yield "the packages of its fast path"
    for value in vars(place).values():
        if inspect.isfunction(value) and hasattr(value, "__wrapped__"):
            known = inspect.getclosurevars(value).nonlocals
            if known.get("is_new_implementation") is False and isinstance(known.get("package"), str):
                yield DISTRIBUTIONS.get(known["package"], known["package"])


def chances(module: nn.Module) -> tuple[str, ...]:
    """Return what a model leaves to chance: LayerDrop and SpecAugment."""
    found = {name for owner in _owners(module) for name in _switches(owner)}
    told = ("LayerDrop" if name.endswith("layerdrop") else "SpecAugment" for name in found)
    return tuple(sorted(set(told)))


@contextmanager
def steady(module: nn.Module) -> Iterator[None]:
    """Run all layers of a model on all of its features inside the block.

    Which layers LayerDrop skips is drawn anew in each step, so that no two steps would need the same memory.
    """
    with _zeroed(module, _switches):
        yield


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Drop nothing inside the block: rates of modules and configs are zero. What a loss drops by itself stays."""
    with _zeroed(module, _rates):
        yield


@contextmanager
def _zeroed(module: nn.Module, names: Callable[[Any], list[str]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner in _owners(module) for name in names(owner)]
    for owner, name, value in before:
        setattr(owner, name, type(value)(0))
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _owners(module: nn.Module) -> list[Any]:
    parts = list(module.modules())
    configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
    return [*parts, *configs.values()]


def _rates(owner: Any) -> list[str]:
    values = getattr(owner, "__dict__", {})
    drops = "drop" in type(owner).__name__.lower() or type(owner).__name__ == "StochasticDepth"
    return [
        name
        for name, value in values.items()
        if type(value) is float and ("drop" in name.lower() or (drops and name == "p"))
    ]


def _switches(owner: Any) -> list[str]:
    values = getattr(owner, "__dict__", {})  # a config may be anything
    drops = [name for name, value in values.items() if name.endswith("layerdrop") and type(value) is float and value]
    return [*drops, *(["apply_spec_augment"] if values.get("apply_spec_augment") is True else [])]
