"""Let torch's autograd engine run backward passes for a card that is not there.

The engine counts devices once, when the first backward pass of a process begins, starts a thread with a queue for each,
and asks the guard of a device for its streams. Here it has counted none before the card is there; torch's own guard,
without devices, takes the place of CUDA's; and a backward pass stays in the thread that calls it, which needs no queue
of a device. So processes that are forked later can train, too, and code that looks at the Python stack in a backward
pass sees who called it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.device.patches import attribute
from actbench.errors import MeasurementError

_CUDA = 1
"""``c10::DeviceType::CUDA``, the place of its guard in torch's registry."""


@functools.cache
def shared_library(name: str) -> ctypes.CDLL:
    """Return a shared library of torch, such as ``libc10``."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{name}{suffix}"))


def count_devices() -> None:
    """Let the engine count the devices of this machine, if no backward pass has run yet."""
    torch.zeros((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]


@contextmanager
def backward_possible() -> Iterator[None]:
    """Inside the block, backward passes on fake ``cuda`` tensors run; torch's CUDA hooks are replaced already.

    Raises:
        MeasurementError: A backward pass on the card fails all the same.
    """
    _set_guard()
    with ExitStack() as stack:
        for module in (torch.autograd, torch.autograd.graph):  # the first imports the function by its name
            run = module._engine_run_backward
            stack.enter_context(attribute(module, "_engine_run_backward", _in_this_thread(run)))
        try:
            with FakeTensorMode():
                torch.empty(1, device="cuda:0", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise MeasurementError(
                f"a card cannot be simulated with torch {torch.__version__}, whose engine runs no backward pass on "
                f"it: install another version of torch (torch: {error})"
            ) from error
        yield


def _in_this_thread(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_here(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    return run_here


def _set_guard() -> None:
    """Set torch's guard without devices, as a fake tensor mode does when it is entered.

    A build without CUDA has no guard to replace. There, for the time of one call, torch finds an object whose virtual
    functions all return 0: a guard that counts no devices.
    """
    # an array of std::atomic<const DeviceGuardImplInterface*>
    guards = (ctypes.c_size_t * (_CUDA + 1)).in_dll(
        shared_library("libc10"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    if guards[_CUDA]:
        torch._C._ensureCUDADeviceGuardSet()
        return
    zero = ctypes.CFUNCTYPE(ctypes.c_size_t)(lambda: 0)
    functions = (ctypes.c_void_p * 64)(*[ctypes.cast(zero, ctypes.c_void_p)] * 64)
    guard = ctypes.c_void_p(ctypes.addressof(functions))
    guards[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if guards[_CUDA] == ctypes.addressof(guard):
        guards[_CUDA] = 0  # torch would call it when Python has freed it
        raise MeasurementError(
            f"a card cannot be simulated with torch {torch.__version__}, which sets no guard in a build without CUDA"
        )
