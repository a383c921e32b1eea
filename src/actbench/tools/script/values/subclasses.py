"""Classes of tensors that a script or a library brings: fake tensors that are objects of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from actbench.device.patches import attribute
from actbench.tools.script.libraries.importpatches import changed


@contextmanager
def subclasses_made() -> Iterator[None]:
    """Inside the block, let classes of tensors, such as bitsandbytes' parameters and MONAI's images, take fake tensors.

    torch makes no object of a class from a tensor that is an object of another class already. So the new object gets a
    class that is both: its methods are those of the library, its operators those of fake tensors.
    """
    both = _Both()

    def making(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(cls: Any, data: Tensor, requires_grad: bool = False, **options: Any) -> Tensor:
            mode = _running_mode() if cls.__module__.startswith("bitsandbytes.") else None
            if mode is not None and not isinstance(data, FakeTensor):
                data = mode.from_tensor(data)  # a small one, which is real, and is in host memory
            if not isinstance(data, FakeTensor) or _dispatches(cls):
                return own(cls, data, requires_grad, **options)
            made = both.classed(FakeTensor.detach(data), cls)
            if issubclass(cls, nn.Parameter):
                made._is_param = True
            found: Tensor = made.requires_grad_(requires_grad)
            return found

        return make

    own_as_subclass = Tensor.as_subclass

    def as_subclass(tensor: Any, cls: Any) -> Any:
        if cls is Tensor or _dispatches(cls):
            return own_as_subclass(tensor, cls)
        with torch._C.DisableTorchFunctionSubclass():
            return both.classed(torch.ops.aten.alias.default(tensor), cls)

    importlib.import_module("torch._dynamo")  # which notes this function when it is imported
    with changed(Tensor, "_make_subclass", making), attribute(FakeTensor, "as_subclass", as_subclass):
        yield


class _Both:
    """The classes that are a given one and fake tensors, too."""

    def __init__(self) -> None:
        self._made: dict[type, Any] = {}

    def classed(self, made: Any, cls: Any) -> Any:
        """Let a fake tensor that was just made be of a class, and return it."""
        if issubclass(cls, FakeTensor):
            self._made[cls] = cls
        elif cls not in self._made:
            names: dict[str, Any] = {"__module__": cls.__module__}
            if issubclass(cls, nn.Parameter):
                names["detach"] = _detach
            self._made[cls] = type(cls)(cls.__name__, (cls, FakeTensor), names)
            self._made[cls].__torch_function__ = _torch_function_of(cls)  # which torch switches off in a new class
        made.__class__ = self._made[cls]
        return made


def _torch_function_of(cls: type) -> Any:
    """Return how a class sees functions of torch; fake tensors do not, so that results would not be of the class."""
    name = "__torch_function__"
    return next(vars(each)[name] for each in cls.__mro__ if name in vars(each))


def _dispatches(cls: Any) -> bool:
    """Return whether a class sees torch's operators, as fake tensors do: it cannot be both."""
    return not issubclass(cls, FakeTensor) and cls.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _running_mode() -> FakeTensorMode | None:
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)


def _detach(self: Tensor) -> Tensor:
    """Return a detached tensor of the same class, with what the library knows of it; modules that move ask for it."""
    made: Any = FakeTensor.detach(self)
    made.__class__ = type(self)
    for name, value in vars(self).items():
        vars(made).setdefault(name, value)
    return made  # type: ignore[no-any-return]
