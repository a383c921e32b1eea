"""bitsandbytes on tensors without values: its packed parameters, and memory that the driver pages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from actbench.tools.script.arrivals import Change, changed, rebound

_PAGED_ELEMENTS = 100_000
"""Elements from which bitsandbytes lets the driver page a state."""

Note = Callable[[str], None]


@contextmanager
def subclasses_made() -> Iterator[None]:
    """Inside the block, let classes of tensors, such as bitsandbytes' parameters, take fake tensors.

    torch makes no object of a class from a tensor that is an object of another class already. So the new object gets a
    class that is both: its methods are those of the library, its operators those of fake tensors.
    """
    both: dict[type, type] = {}

    def making(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(cls: Any, data: Tensor, requires_grad: bool = False, **options: Any) -> Tensor:
            mode = _running_mode() if cls.__module__.startswith("bitsandbytes.") else None
            if mode is not None and not isinstance(data, FakeTensor):
                data = mode.from_tensor(data)  # a small one, which is real, and is in host memory
            if not isinstance(data, FakeTensor):
                return own(cls, data, requires_grad, **options)
            made: Any = FakeTensor.detach(data)
            if issubclass(cls, FakeTensor):
                both[cls] = cls
            elif cls not in both:
                both[cls] = type(cls)(
                    cls.__name__, (cls, FakeTensor), {"__module__": cls.__module__, "detach": _detach}
                )
            made.__class__ = both[cls]
            if issubclass(cls, torch.nn.Parameter):
                made._is_param = True
            found: Tensor = made.requires_grad_(requires_grad)
            return found

        return make

    importlib.import_module("torch._dynamo")  # which notes this function when it is imported
    with changed(Tensor, "_make_subclass", making):
        yield


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


def changes(note: Note) -> dict[str, Change]:
    """Return the changes of bitsandbytes, by the names of its modules."""

    def paged(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def get_state_buffer(self: Any, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
            if not self.is_paged or p.numel() < _PAGED_ELEMENTS or p.device.type == "cpu":
                return own(self, p, dtype)
            note("bitsandbytes: states of paged optimizers are in memory that torch's allocator does not count.")
            state: Any = torch.zeros(p.shape, dtype=dtype, device="cpu")
            state.is_paged = True
            return state  # type: ignore[no-any-return]

        return get_state_buffer

    def without_outliers(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def matmul(
            a: Tensor, b: Tensor, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None
        ) -> Any:
            if isinstance(a, FakeTensor) and state is not None and state.threshold:
                note("bitsandbytes: no column of activations counts as an outlier; in 8 bits some columns stay in 16.")
                state.threshold = 0.0
            return own(a, b, out=out, state=state, threshold=0.0, bias=bias)

        return matmul

    return {
        "bitsandbytes.nn.modules": lambda module: subclasses_made(),
        "bitsandbytes.functional": lambda module: rebound(module, "prefetch_tensor", lambda own: lambda *tensors: None),
        "bitsandbytes.optim.optimizer": lambda module: changed(module.Optimizer8bit, "get_state_buffer", paged),
        "bitsandbytes.autograd._functions": lambda module: rebound(module, "matmul", without_outliers),
    }
