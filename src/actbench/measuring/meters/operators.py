"""The operators that torch runs on a CUDA device in place of the CPU's, for steps on fake CPU tensors.

Some operators are made of others, and torch makes them of different ones on different devices. The kernels here
replace the CPU's choice while a simulation is active, below every caller: functions, modules and C++ alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from actbench.measuring.meters.attention import attend
from actbench.measuring.meters.profiles import DeviceProfile
from actbench.ops import hostmemory

aten = torch.ops.aten

_IN_FLOAT32 = ("layer_norm", "group_norm", "nll_loss", "mse_loss", "norm.Scalar", "pow.Tensor_Scalar", "rsqrt", "exp")
"""What CUDA's autocast computes in float32 and the CPU's does not."""

_INTO_FLOAT32 = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum")
"""The same, where the operator itself takes halves and returns float32."""


def device_operators(profile: DeviceProfile) -> AbstractContextManager[None]:
    """Let steps on fake tensors run the operators of a device, and know its memory from the host's."""
    return cuda_operators(profile) if profile.is_cuda else hostmemory.as_the_device()


@contextmanager
def cuda_operators(profile: DeviceProfile) -> Iterator[None]:
    """Replace the CPU's composite operators by CUDA's; for the whole process, so run no real CPU steps meanwhile."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for (name, key), kernel in _kernels(profile).items():
            library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _kernels(profile: DeviceProfile) -> dict[tuple[str, str], Callable[..., Any]]:
    """Return what to run in place of each operator, by its name and the dispatch key it is reached through."""
    composites: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": functools.partial(attend, profile),
        "dropout": _dropout,
        "softmax.int": functools.partial(_softmax, aten._softmax.default),
        "log_softmax.int": functools.partial(_softmax, aten._log_softmax.default),
    }
    in_float32 = {name: _in_float32(_operator(name)) for name in _IN_FLOAT32}
    into_float32 = {name: _into_float32(_operator(name)) for name in _INTO_FLOAT32}
    return {(name, "AutogradCPU"): kernel for name, kernel in composites.items()} | {
        (name, "AutocastCPU"): _without_autocast(kernel) for name, kernel in (in_float32 | into_float32).items()
    }


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Keep a mask of one byte per element, where the CPU keeps one in the type of the input."""
    if not train or p == 0 or x.numel() == 0:
        return x
    dropped: tuple[Tensor, Tensor] = aten.native_dropout.default(x, p, True)
    return dropped[0]


def _softmax(fused: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Read halves and write float32 in one go, where the CPU first makes a float32 copy."""
    widen = dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)
    result: Tensor = fused(x if widen or dtype is None else x.to(dtype), dim, widen)
    return result


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return kernel(*args, **kwargs)

    return run


def _in_float32(operator: Any) -> Callable[..., Any]:
    def widened(value: Any) -> Any:
        is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if is_half else value

    return lambda *args, **kwargs: operator(*tree_map(widened, args), **tree_map(widened, kwargs))


def _into_float32(operator: Any) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        given = [value for value in args if not isinstance(value, torch.dtype)]
        asked = dtype or next((value for value in args if isinstance(value, torch.dtype)), None)
        return operator(x, *given, dtype=asked or (torch.float32 if x.is_floating_point() else None), **kwargs)

    return run
