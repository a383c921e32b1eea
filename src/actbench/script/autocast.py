"""Autocast on a simulated card: tensors are the CPU's, so that the CPU's autocast computes for CUDA's."""

from __future__ import annotations

import threading

import torch

from actbench.script.patches import Patches


class _Autocast(threading.local):
    """The type that CUDA's autocast computes in. Whether it is on is the state of the CPU's, for both names."""

    dtype = torch.float16
    host_dtype = torch.bfloat16


def believe_in_autocast(patches: Patches) -> None:
    """Let questions and commands about autocast on CUDA meet the CPU's autocast."""
    c, state = torch._C, _Autocast()
    is_enabled, set_enabled, get_dtype, set_dtype = (
        c.is_autocast_enabled, c.set_autocast_enabled, c.get_autocast_dtype, c.set_autocast_dtype,
    )  # fmt: skip

    def switch(device_type: str, enabled: bool) -> None:
        if device_type != "cuda":
            return set_enabled(device_type, enabled)
        if enabled and not is_enabled("cpu"):
            state.host_dtype = get_dtype("cpu")
        set_enabled("cpu", enabled)
        return set_dtype("cpu", state.dtype if enabled else state.host_dtype)

    def choose(device_type: str, dtype: torch.dtype) -> None:
        if device_type != "cuda":
            return set_dtype(device_type, dtype)
        state.dtype = dtype
        return set_dtype("cpu", dtype) if is_enabled("cpu") else None

    def is_on(device_type: str = "cuda") -> bool:
        return is_enabled("cpu" if device_type == "cuda" else device_type)

    def chosen(device_type: str) -> torch.dtype:
        return state.dtype if device_type == "cuda" else get_dtype(device_type)

    def set_autocast_enabled(device_type: str | bool, enabled: bool | None = None) -> None:
        if isinstance(device_type, str) and enabled is not None:
            switch(device_type, enabled)
        else:  # torch's older form names no device and means CUDA
            switch("cuda", bool(device_type if enabled is None else enabled))

    for owner in (torch, c):
        patches.replace(
            owner,
            is_autocast_enabled=is_on,
            set_autocast_enabled=set_autocast_enabled,
            get_autocast_dtype=chosen,
            set_autocast_dtype=choose,
            get_autocast_gpu_dtype=lambda: chosen("cuda"),
            set_autocast_gpu_dtype=lambda dtype: choose("cuda", dtype),
        )
    patches.callback(set_enabled, "cpu", is_enabled("cpu"))
    patches.callback(set_dtype, "cpu", get_dtype("cpu"))
