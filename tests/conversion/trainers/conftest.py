from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from actbench.packing.forwardwrapper import ReboundForward
from actbench.tools.convert.model import conversion_of


def _tables(model: nn.Module) -> list[dict[str, Any]]:
    """Return what the modules of a model hold: attributes, children, hooks."""
    found = []
    for module in model.modules():
        found.append({name: value for name, value in vars(module).items() if name != "training"})
        found += [dict(value) for value in vars(module).values() if isinstance(value, dict)]
    return found


@pytest.fixture
def tables() -> Callable[[nn.Module], list[dict[str, Any]]]:
    return _tables


@pytest.fixture
def is_plain() -> Callable[[nn.Module], bool]:
    """Return whether nothing of a scheme is on a model, in autograd or in torch's modes."""

    def check(model: nn.Module) -> bool:
        ours = any(type(module).__module__.startswith("actbench.") for module in model.modules())
        bound = any(isinstance(vars(module).get("forward"), ReboundForward) for module in model.modules())
        hooks = any(module._forward_pre_hooks for module in model.modules())
        saving = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        return not (ours or bound or hooks or saving or modes) and conversion_of(model) is None

    return check
