"""Autocast on a simulated card: tensors are the CPU's, so that the CPU's autocast computes for CUDA's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import torch

from actbench.device.patches import Patches


class _Autocast(threading.local):
    """Whether autocast is on is the state of the CPU's, for both devices; each has a type that it computes in.

    The CPU's type is that of CUDA while CUDA's autocast is on.
    """

    dtype = torch.float16
    host_dtype = torch.bfloat16

    def __init__(self, torchs: SimpleNamespace) -> None:  # runs again in each thread, where torch's are replaced
        self.is_host_enabled: Callable[[str], bool] = torchs.is_autocast_enabled
        self.host_dtype_of: Callable[[str], torch.dtype] = torchs.get_autocast_dtype
        self.enable_host, self.set_host_dtype = torchs.set_autocast_enabled, torchs.set_autocast_dtype

    def is_enabled(self, device_type: str = "cuda") -> bool:
        return self.is_host_enabled("cpu" if device_type == "cuda" else device_type)

    def dtype_of(self, device_type: str) -> torch.dtype:
        return self.dtype if device_type == "cuda" else self.host_dtype_of(device_type)

    def enable(self, device_type: str | bool, enabled: bool | None = None) -> None:
        """Switch autocast of a device on or off; torch's older form, of one boolean, is for CUDA."""
        if isinstance(device_type, bool):
            self.enable("cuda", device_type)
            return
        if device_type != "cuda":
            self.enable_host(device_type, bool(enabled))
            return
        if enabled and not self.is_host_enabled("cpu"):
            self.host_dtype = self.host_dtype_of("cpu")
        self.enable_host("cpu", bool(enabled))
        self.set_host_dtype("cpu", self.dtype if enabled else self.host_dtype)

    def set_dtype(self, device_type: str, dtype: torch.dtype) -> None:
        if device_type != "cuda":
            self.set_host_dtype(device_type, dtype)
            return
        self.dtype = dtype
        if self.is_host_enabled("cpu"):
            self.set_host_dtype("cpu", dtype)


def believe_in_autocast(patches: Patches) -> None:
    """Let torch's functions about autocast on CUDA read and set the CPU's autocast."""
    state = _Autocast(SimpleNamespace(**vars(torch._C)))
    patches.callback(state.enable_host, "cpu", state.is_host_enabled("cpu"))
    patches.callback(state.set_host_dtype, "cpu", state.host_dtype_of("cpu"))
    for owner in (torch, torch._C):
        patches.replace(
            owner,
            is_autocast_enabled=state.is_enabled,
            set_autocast_enabled=state.enable,
            get_autocast_dtype=state.dtype_of,
            set_autocast_dtype=state.set_dtype,
            get_autocast_gpu_dtype=lambda: state.dtype_of("cuda"),
            set_autocast_gpu_dtype=lambda dtype: state.set_dtype("cuda", dtype),
        )
