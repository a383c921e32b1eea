"""Models that transformers runs by slow reference code, because packages with their kernels are missing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType

from torch import nn

DISTRIBUTIONS = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}


def missing_kernels(module: nn.Module) -> tuple[str, ...]:
    """Return the packages for want of which transformers runs reference code in a model, sorted.

    Transformers wraps a function that a package has a kernel for, and says there whether it found it; its earlier
    versions have ``is_fast_path_available`` beside such layers.

    Args:
        module: A model; parts that are not of transformers are passed over.
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
