"""Operators of libraries whose memory is unknown or estimated: the reasons why a peak is an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actbench.simulator import recurrent, temporaries
from actbench.simulator.cachingmode import tensors_of
from actbench.simulator.profiles import DeviceProfile

aten = torch.ops.aten

_CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
_PRODUCTS = (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_)
_SUPPORTED = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}
"""Of the types whose layouts and workspaces are unknown, whether oneDNN multiplies matrices of them on this machine."""

_RECURRENT = (
    "what cuDNN keeps of recurrent layers, and its workspace, are counted by a formula that fits figures published in "
    "2017 (docs/simulation.md)"
)

_FACTORIZATIONS = tuple(
    getattr(aten, name)
    for name in (
        *("_linalg_eigh", "_linalg_solve_ex", "_linalg_svd", "geqrf", "linalg_cholesky_ex", "linalg_eig"),
        *("linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_lstsq", "linalg_lu_factor_ex"),
        *("linalg_qr", "ormqr"),
    )
)

_ON_CPU = "{} for {} are not known: on a CPU the peak may be higher than simulated"

_OF_CUSOLVER = (
    "the workspaces of cuSOLVER, which factorizes matrices ({}), are not known: on a card the peak may be higher than "
    "simulated"
)

_IN_DOUBLE = (
    "operators of schemes compute float64 by torch's operators, whose temporaries are not counted: the peak may be "
    "higher than simulated"
)

_UNKNOWN = frozenset(
    (
        *(aten.linalg_matrix_exp, aten._linalg_det, aten._linalg_slogdet, aten.linalg_householder_product),
        *(aten.masked_scatter_backward, aten.nonzero_static, aten._unsafe_masked_index),
        *(aten._unsafe_masked_index_put_accumulate, aten._embedding_bag_per_sample_weights_backward),
    )
)
"""Operators whose buffers on a CPU depend on values, or are not modelled."""

_LOSSES = (aten.mse_loss, aten.smooth_l1_loss)


def _is_unknown(packet: Any, args: tuple[Any, ...]) -> bool:
    """Return whether arguments make the buffers of an operator on a CPU unknown, or others than are simulated."""
    if packet in _LOSSES:  # copies operands of two layouts
        return bool(args[0].shape == args[1].shape and args[0].stride() != args[1].stride())
    if packet is aten.binary_cross_entropy or packet is aten.masked_fill:  # a gradient of what seldom needs one
        other = args[1] if packet is aten.binary_cross_entropy else args[2]
        return isinstance(other, Tensor) and other.requires_grad
    if packet is aten.linalg_lu_solve:  # copies matrices of one element each
        return bool(args[0].shape[-1] == 1)
    return packet in _UNKNOWN


_MODELLED = ("AVX512", "AVX2")
"""The processors' instructions that ``onednn.py`` knows the layouts of, by torch's names."""


class Unmodelled:
    """The temporaries of a device's operators, with a note of those whose memory a library alone knows."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._of_cuda = temporaries.cuda(profile) if profile.is_cuda else None
        self._found: dict[str, None] = {}
        self._unknown: dict[str, None] = {}
        self._has_recurrence = self._in_double = False

    def temporaries(self, func: Any, args: tuple[Any, ...], result: Any) -> int:
        """Return what :mod:`temporaries` tells of the device, and note the operator if that may be too little."""
        packet = getattr(func, "overloadpacket", None)
        self._in_double |= func.namespace == "actbench" and any(
            each.dtype == torch.float64 for each in tensors_of(args)
        )
        if self._of_cuda is not None:
            self._has_recurrence |= packet is recurrent.FORWARD
            if packet in _FACTORIZATIONS:
                self._found[func._schema.name.removeprefix("aten::").removeprefix("_")] = None
            return self._of_cuda(func, args, result)
        if _is_unknown(packet, args) or (isinstance(result, Tensor) and result.dtype == torch.complex32):
            self._unknown[str(packet).removeprefix("aten.")] = None
        elif packet in _CONVOLUTIONS:
            self._note_convolution(args[1].dtype)
            if packet is aten.convolution and _is_low(args[0].shape[2:], args[1].shape[2:], args[4]):
                self._found["convolutions of low images with wide padding"] = None
        elif packet in _PRODUCTS and args[1].dtype in _SUPPORTED and _SUPPORTED[args[1].dtype]():
            self._found[f"products in {_name(args[1].dtype)}"] = None
        return temporaries.cpu(func, args, result)

    def reasons(self) -> tuple[str, ...]:
        """Return why the peak is an estimate, by what was noted; nothing if nothing was."""
        found = [_RECURRENT] if self._has_recurrence else []
        if self._of_cuda is not None:
            found += [_OF_CUSOLVER.format(" and ".join(self._found))] if self._found else []
        else:
            found += [_ON_CPU.format("oneDNN's buffers", " and ".join(self._found))] if self._found else []
            found += [_ON_CPU.format("the buffers", " and ".join(self._unknown))] if self._unknown else []
        return (*found, *([_IN_DOUBLE] if self._in_double else ()))

    def _note_convolution(self, dtype: torch.dtype) -> None:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[no-untyped-call]
            return
        if dtype in _SUPPORTED:
            self._found[f"convolutions in {_name(dtype)}"] = None
        elif dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() not in _MODELLED:
            self._found["convolutions on a processor without AVX2"] = None


def _is_low(sizes: Sequence[int], kernel: Sequence[int], padding: Sequence[int]) -> bool:
    """Return whether oneDNN may choose a layout of images that ``onednn.py`` does not know."""
    pads = list(padding) * len(sizes) if len(padding) == 1 else padding  # one number stands for all dimensions
    is_low = any(size == 1 or size <= 2 * pad for size, pad in zip(sizes, pads, strict=True))
    return is_low and len(sizes) > 1 and max(kernel) > 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
