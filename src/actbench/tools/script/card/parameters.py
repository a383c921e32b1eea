"""Parameters move to the card with their module: small ones, which are made real, and those without a shape yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook

from actbench.device.patches import attribute
from actbench.simulator import known
from actbench.simulator.fake import LAZY_PLACE

_Lazy: Any = nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_TWIN = "_actbench_twin"
"""The attribute of a real parameter that has the fake one: several modules may get the same."""


@contextmanager
def faked_when_registered(mode: FakeTensorMode) -> Iterator[None]:
    """Inside the block, let modules get fake parameters of ``mode``, where the real ones are."""
    this_thread = threading.get_ident()  # others compute for real in host memory

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if type(parameter) is not nn.Parameter or parameter.is_meta or threading.get_ident() != this_thread:
            return None
        twin: nn.Parameter | None = getattr(parameter, _TWIN, None)
        if twin is None and not hasattr(parameter, "fake_mode"):
            bare = mode.from_tensor(parameter.detach())
            vars(bare).pop(known.NAME, None)  # what optimizers change has no value that anybody knows
            twin = nn.Parameter(bare, requires_grad=parameter.requires_grad)
            for key, value in vars(parameter).items():
                vars(twin).setdefault(key, value)
            vars(parameter)[_TWIN] = twin
        return twin

    hook: Any = registered  # torch says that such a hook returns nothing
    handle = register_module_parameter_registration_hook(hook)
    try:
        with attribute(_Lazy, "to", _move), attribute(_Lazy, "cuda", _to_card):
            yield
    finally:
        handle.remove()


def _move(lazy: Any, *args: Any, **kwargs: Any) -> Any:
    """Note where a parameter without a shape is to be made, and return it."""
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    if device is None or device.type != "cuda":
        return Tensor.to(lazy, *args, **kwargs)
    vars(lazy)[LAZY_PLACE] = device
    return lazy


def _to_card(lazy: Any, device: Any = None, **_: Any) -> Any:
    return _move(lazy, "cuda" if device is None else device)
