"""Operators of libraries whose memory is unknown or estimated: the reasons why a peak is an estimate."""

from __future__ import annotations

from typing import Any

import torch

from actbench.simulator import recurrent, temporaries
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

_UNKNOWN = frozenset(
    (
        *(aten.linalg_matrix_exp, aten._linalg_det, aten._linalg_slogdet, aten.linalg_householder_product),
        *(aten._fft_c2r, aten.masked_scatter_backward, aten.nonzero_static, aten._unsafe_masked_index),
        *(aten._unsafe_masked_index_put_accumulate, aten._embedding_bag_per_sample_weights_backward),
    )
)
"""Operators whose buffers on a CPU depend on values, or are not modelled; transforms over several dimensions."""

_MODELLED = ("AVX512", "AVX2")
"""The processors' instructions that ``onednn.py`` knows the layouts of, by torch's names."""


class Unmodelled:
    """The temporaries of a device's operators, with a note of those whose memory a library alone knows."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._of_cuda = temporaries.cuda(profile) if profile.is_cuda else None
        self._found: dict[str, None] = {}
        self._unknown: dict[str, None] = {}
        self._has_recurrence = False

    def temporaries(self, func: Any, args: tuple[Any, ...], result: Any) -> int:
        """Return what :mod:`temporaries` tells of the device, and note the operator if that may be too little."""
        packet = getattr(func, "overloadpacket", None)
        if self._of_cuda is not None:
            self._has_recurrence |= packet is recurrent.FORWARD
            return self._of_cuda(func, args, result)
        if packet in _UNKNOWN and (packet is not aten._fft_c2r or len(args[1]) > 1):
            self._unknown[packet.__name__] = None
        elif packet in _CONVOLUTIONS:
            self._note_convolution(args[1].dtype)
        elif packet in _PRODUCTS and args[1].dtype in _SUPPORTED and _SUPPORTED[args[1].dtype]():
            self._found[f"products in {_name(args[1].dtype)}"] = None
        return temporaries.cpu(func, args, result)

    def reasons(self) -> tuple[str, ...]:
        """Return why the peak is an estimate, by what was noted; nothing if nothing was."""
        if self._has_recurrence:
            return (_RECURRENT,)
        named = {"oneDNN's buffers": self._found, "the buffers": self._unknown}
        return tuple(
            f"{whose} for {' and '.join(names)} are not known: on a CPU the peak may be higher than simulated"
            for whose, names in named.items()
            if names
        )

    def _note_convolution(self, dtype: torch.dtype) -> None:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[no-untyped-call]
            return
        if dtype in _SUPPORTED:
            self._found[f"convolutions in {_name(dtype)}"] = None
        elif dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() not in _MODELLED:
            self._found["convolutions on a processor without AVX2"] = None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
