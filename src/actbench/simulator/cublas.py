"""The workspaces that torch allocates for products of matrices on a CUDA device, by torch's version and its variables.

cuBLAS computes most products, and cuBLASLt those that add a bias of one dimension. Until 2.14 torch kept a workspace
for each thread that multiplied: one for the forward pass, one for the backward pass. Since 2.15 a product has its own,
which is freed when it has been launched. Before 2.0 cuBLAS allocated its workspaces itself, where torch does not count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from actbench.simulator.products import OF_MATRICES
from actbench.simulator.profiles import DeviceProfile, TorchVersion, get
from actbench.units import KIB, MIB

# as :4096:8 and :4096:2:16:8 would ask for: defaults of aten/src/ATen/cuda/CublasHandlePool.cpp
_LARGE, _SMALL = 32 * MIB, 8320 * KIB
# the default of CUBLASLT_WORKSPACE_SIZE, 1024 KiB
_OF_LT: Final = MIB
_PASSES: Final = ("forward", "backward")
"""Each runs in a thread with a handle of cuBLAS, and of cuBLASLt, of its own."""

CACHE, CONFIG = "TORCH_CUBLAS_WORKSPACE_CACHE", "CUBLAS_WORKSPACE_CONFIG"
LT_SIZE, UNIFIED = "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"

_aten = torch.ops.aten
_SWITCH = {"0": False, "1": True}
# cuBLAS documents the variable as pairs :SIZE:COUNT, sizes in KiB
_POOL = re.compile(r":([0-9]+):([0-9]+)")
# torch reads the variable with std::stoi, which stops at the first letter
_LEADING_NUMBER = re.compile(r"\s*([0-9]+)")
_BIASED = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


@dataclass(frozen=True)
class Rule:
    """What torch does until a version.

    Attributes:
        until: The last version that was read to do so.
        large: Major numbers of the compute capabilities whose workspaces have 32 MiB; others have 8.125 MiB.
        keeps: Whether a workspace stays, unless the environment says otherwise.
        shares: Whether cuBLASLt works in a workspace of cuBLAS that stays, unless the environment says otherwise.
    """

    until: TorchVersion
    large: frozenset[int]
    keeps: bool = True
    shares: bool = True


RULES = (
    Rule((2, 11), frozenset((9,)), shares=False),
    Rule((2, 13), frozenset((9, 10, 12))),
    Rule((2, 14), frozenset((9, 10, 11, 12))),
    Rule((2, 15), frozenset((9, 10, 11, 12)), keeps=False),
)
"""Read from the CUDA builds of 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0; later versions are taken for 2.15."""


def rule(version: TorchVersion) -> Rule:
    """Return what a version of torch does."""
    return next((each for each in RULES if version <= each.until), RULES[-1])


@dataclass(frozen=True)
class _Sizes:
    of_cublas: int
    of_lt: int
    are_kept: bool
    are_shared: bool


class Workspaces:
    """The workspaces of a device.

    The environment is read when a size is first asked for, as torch does at its first product: a script may set it.
    """

    def __init__(self, profile: DeviceProfile, environment: Mapping[str, str] = os.environ) -> None:
        self._profile, self._environment = profile, environment
        self.are_counted = profile.is_cuda and profile.workspaces and profile.torch >= (2, 0)

    @cached_property
    def _sizes(self) -> _Sizes:
        does, told = rule(self._profile.torch), self._environment
        major, _ = self._profile.compute_capability or (0, 0)
        usual, pools = _LARGE if major in does.large else _SMALL, _POOL.findall(told.get(CONFIG, ""))
        of_cublas = sum(int(size) * int(count) for size, count in pools) * KIB if pools else usual
        found = _LEADING_NUMBER.match(told.get(LT_SIZE, ""))
        of_lt = _OF_LT if found is None else int(found[1]) * KIB
        # a switch that is neither 0 nor 1 is taken for one that is not set
        keeps = does.keeps or _SWITCH.get(told.get(CACHE, ""), False)
        return _Sizes(of_cublas, of_lt, keeps, keeps and _SWITCH.get(told.get(UNIFIED, ""), does.shares))

    @property
    def kept(self) -> Mapping[str, int]:
        """Sizes of what cuBLAS keeps once both passes have multiplied, by the passes: each has a thread."""
        are_kept = self.are_counted and self._sizes.are_kept and self._sizes.of_cublas
        return dict.fromkeys(_PASSES, self._sizes.of_cublas) if are_kept else {}

    def kept_by(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, in_backward: bool
    ) -> Mapping[str, int]:
        """Return the size of the workspace that a product keeps, by the library and the pass that it is of."""
        if not self.are_counted or not self._sizes.are_kept:
            return {}
        of_pass = _PASSES[in_backward]
        if not self._sizes.are_shared and _runs_by_lt(func.overloadpacket, args, kwargs, result):
            return {f"cuBLASLt, {of_pass}": self._sizes.of_lt}
        return {of_pass: self._sizes.of_cublas} if self._sizes.of_cublas else {}

    def product_bytes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
        """Return the bytes that an operator allocates for the libraries and frees before it returns."""
        # a workspace that stays is counted once, as kept, not with each product
        if func not in OF_MATRICES or not self.are_counted or self._sizes.are_kept:
            return 0
        return self._sizes.of_lt if _runs_by_lt(func.overloadpacket, args, kwargs, result) else self._sizes.of_cublas


NONE = Workspaces(get("cpu"))
"""Those of a device without cuBLAS."""


def _runs_by_lt(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> bool:
    """Return whether cuBLASLt computes it, by torch's conditions: it adds one vector to each row, or is scaled."""
    if packet is not _aten.addmm:
        return packet is _aten._scaled_mm
    # the conditions are those of addmm_out_cuda_impl in aten/src/ATen/native/cuda/Blas.cpp
    bias, *matrices = args[:3]
    is_vector = bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == result.shape[1]
    plain = is_vector and kwargs.get("beta", 1) == 1 and result.is_contiguous() and result.dtype in _BIASED
    return plain and min(size for each in matrices for size in each.shape) > 1
