"""Small parameters, which are made real, become fake when a module gets them: they move to the card with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook

from actbench.simulator import known

_TWIN = "_actbench_twin"
"""The attribute of a real parameter that has the fake one: several modules may get the same."""


@contextmanager
def faked_when_registered(mode: FakeTensorMode) -> Iterator[None]:
    """Inside the block, let modules get fake parameters of ``mode``, where the real ones are."""

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
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
        yield
    finally:
        handle.remove()
