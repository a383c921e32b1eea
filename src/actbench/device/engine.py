"""Give torch's autograd engine a device for a card that is not there.

The engine counts devices once, when the first backward pass of the process begins, and starts a thread with a queue
for each. Without CUDA it counts none, and a backward pass on fake ``cuda`` tensors has no queue. Here torch's own guard
without devices, which counts as one, takes the place of CUDA's, and an engine that has counted already starts its
threads again. As on a machine with a card, a process that is forked after that cannot run a backward pass.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.errors import MeasurementError

_CUDA = 1
"""``c10::DeviceType::CUDA``, the place of its guard in torch's registry."""


@functools.cache
def shared_library(name: str) -> ctypes.CDLL:
    """Return a shared library of torch, such as ``libc10``."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{name}{suffix}"))


def give_device() -> None:
    """Make a backward pass on fake ``cuda`` tensors possible; torch's CUDA hooks are replaced already.

    Raises:
        MeasurementError: A backward pass on the card fails all the same, as in a process forked from one with a card.
    """
    _set_guard()
    try:
        try:
            _run_backward()
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):  # for any other reason, an engine with threads waits for ever
                raise
            _start_threads()
            _run_backward()
    except RuntimeError as error:
        raise MeasurementError(
            "a card cannot be simulated here: torch's engine runs no backward pass on it; if the process was "
            f"forked after another simulation, spawn it instead (torch: {error})"
        ) from error


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


def _start_threads() -> None:
    """Let an engine that counted no devices count again (``Engine::start_device_threads``, which it calls once)."""
    library = shared_library("libtorch_cpu")
    engine = library["_ZN5torch8autograd6Engine18get_default_engineEv"]
    engine.restype = ctypes.c_void_p
    start = library["_ZN5torch8autograd6Engine20start_device_threadsEv"]
    start.restype, start.argtypes = None, (ctypes.c_void_p,)
    start(engine())


def _run_backward() -> None:
    with FakeTensorMode():
        torch.empty(1, device="cuda:0", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
