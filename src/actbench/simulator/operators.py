"""Operators whose kernel torch chooses by asking a driver, or of which fake tensors have no form, or a wrong one.

The kernels here replace torch's while a simulation is active, for every caller: functions, modules and C++.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.simulator import branches, ctc, quantiles, recurrent
from actbench.simulator.profiles import DeviceProfile

aten = torch.ops.aten

Kernel = Literal["flash", "efficient", "math"]

# the mem_eff_alignment of preprocess_mask in aten/src/ATen/native/transformers/attention.cpp
_MASK_ALIGNMENT = 8


def choose(profile: DeviceProfile, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Kernel:
    """Return the kernel that torch picks on a CUDA device, by its own conditions and in its own order.

    Args:
        profile: The device.
        q: Queries, (batch, heads, rows, width).
        k: Keys, (batch, heads or fewer, columns, width).
        v: Values, shaped as the keys; their width may differ.
        mask: Mask to add to the scores, or None.
        is_causal: Whether each row sees only the columns up to its own.
    """
    if not _is_fusable(q, k, v):
        return "math"
    half = q.dtype in (torch.float16, torch.bfloat16)
    same_width = q.shape[-1] == v.shape[-1]
    # flash attention of torch takes no causal mask of other than square scores (sdp_utils.cpp)
    square = q.shape[2] == k.shape[2] or not is_causal
    if profile.has_tensor_float and half and mask is None and same_width and square and q.shape[-1] <= 256:
        return "flash"
    known_type = q.dtype in (torch.float32, torch.float16) or (q.dtype == torch.bfloat16 and profile.has_tensor_float)
    # minimum_gemm_alignment of sdp_utils.cpp: 16 bytes for tensor cores, one element without them
    alignment = 8 if half else 4 if profile.has_tensor_float else 1
    aligned = q.shape[-1] % alignment == 0 and v.shape[-1] % alignment == 0
    return "efficient" if known_type and aligned and q.shape[1] == k.shape[1] else "math"


def attend(
    profile: DeviceProfile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention output by the kernel of :func:`choose`; arguments as in ``F.scaled_dot_product_attention``.

    Only the flash kernel takes shared key and value heads (``enable_gqa``); for other kernels they are repeated.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: attn_mask should not be set when is_causal=True")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(attn_mask, q.dtype)
    kernel = choose(profile, q, k, v, attn_mask, is_causal)
    if kernel == "flash":
        return _flash(q, k, v, dropout_p, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
    if kernel == "efficient":
        bias = None if attn_mask is None else _aligned(attn_mask).expand(*q.shape[:3], k.shape[2])
        graph = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        fused = aten._scaled_dot_product_efficient_attention.default
        return _first(fused(q, k, v, bias, graph, dropout_p, is_causal, scale=scale))
    if is_causal:  # torch's own mask would be made on a CPU, where a card's tensors only seem to be
        attn_mask = _additive(q.new_ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(), q.dtype)
    math = aten._scaled_dot_product_attention_math.default
    return _first(math(q, k, v, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa))


def _is_fusable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    # check_tensor_shapes, check_last_dim_stride_equals_1_dense and others of sdp_utils_cpp.h
    all_four = all(t.dim() == 4 and t.stride(-1) == 1 and t.numel() > 0 for t in (q, k, v))
    return all_four and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float) -> Tensor:
    """Run the flash kernel; pad a width that is not a multiple of 8 with zeros, and cut the output."""
    width = q.shape[-1]
    # torch pads the last dimension to multiples of 8 before it calls the kernel (attention.cpp, pad_last_dim)
    if width % 8:
        q, k, v = (F.pad(t, (0, -width % 8)) for t in (q, k, v))
    fused = aten._scaled_dot_product_flash_attention.default
    output = _first(fused(q, k, v, dropout_p, is_causal, False, scale=scale))
    return output[..., :width] if width % 8 else output


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    zero, minus_infinity = (torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (0.0, -math.inf))
    return torch.where(mask, zero, minus_infinity)


def _aligned(mask: Tensor) -> Tensor:
    if mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    # pad_bias of torch adds a whole 8 to columns that are a multiple of 8, where only other strides are unaligned
    return F.pad(mask, (0, _MASK_ALIGNMENT - columns % _MASK_ALIGNMENT))[..., :columns]


def _first(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0]


def cpu_operators() -> AbstractContextManager[None]:
    """Let fake CPU tensors run the operators of a CPU, of which fake tensors have no form, or a wrong one."""
    composites: dict[str, Callable[..., Any]] = {**_OF_ALL, **branches.branches_on_cpu(), **quantiles.branches()}
    return _replaced({(name, "AutogradCPU"): kernel for name, kernel in composites.items()})


def card_operators(profile: DeviceProfile) -> AbstractContextManager[None]:
    """Let fake CUDA tensors run what torch chooses by asking a driver, and what fake tensors have no form of."""
    composites: dict[str, Callable[..., Any]] = {
        **_OF_ALL,
        "scaled_dot_product_attention": functools.partial(attend, profile),
        **recurrent.composites(),
        **(_OLD_SOFTMAXES if profile.keeps_softmax_inputs else {}),
    }
    of_keys: dict[str, dict[str, Any]] = {"AutogradCUDA": composites, "Meta": recurrent.fake_forms()}
    return _replaced({(name, key): kernel for key, kernels in of_keys.items() for name, kernel in kernels.items()})


@contextmanager
def _replaced(kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> Iterator[None]:
    """Inside the block, let operators of torch, by their names and dispatch keys, run these kernels."""
    # a library, and no mode: it holds in every thread and in code of C++, until it is destroyed
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    composed = {name: kernel for (name, key), kernel in kernels.items() if key in ("AutogradCPU", "AutogradCUDA")}
    token = _composites.set(
        {_operator(name): kernel for name, kernel in composed.items() if not isinstance(kernel, branches.Branch)}
    )
    try:
        with warnings.catch_warnings():  # torch 2.11 warns of kernels that replace others
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for (name, key), kernel in kernels.items():
                takes_keys = isinstance(kernel, branches.Branch)
                # torch registers some of its own shape functions from Python (2.11: that of ``_cudnn_rnn``)
                library.impl(name, kernel, key, with_keyset=takes_keys, allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        _composites.reset(token)
        library._destroy()  # type: ignore[no-untyped-call]
        for name, _ in kernels:  # a compiler that traced inside would go on to take its backward pass for missing
            _operator(name)._dispatch_cache.clear()


_OF_ALL: Mapping[str, Callable[..., Any]] = {**ctc.composites(), **branches.composites(), **branches.branches()}
_composites: ContextVar[Mapping[Any, Callable[..., Any]]] = ContextVar("_composites", default=MappingProxyType({}))


def composite(func: Any) -> Callable[..., Any] | None:
    """Return what composes an operator now in place of torch, or None; inference mode calls it by no dispatch key."""
    return _composites.get().get(func)


def _softmax(fused: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Read half types and write float32 in one kernel."""
    widen = dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)
    result: Tensor = fused(x if widen or dtype is None else x.to(dtype), dim, widen)
    return result


class _BothSaved(torch.autograd.Function):
    """Run a fused kernel, and save its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dim: int, widen: bool) -> Tensor:
        y: Tensor = getattr(aten, f"_{name}").default(x, dim, widen)
        ctx.save_for_backward(x, y)
        ctx.name, ctx.dim = name, dim
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        # the saved input lends only its dtype, but it is memory all the same
        return getattr(aten, f"_{ctx.name}_backward_data").default(grads[0], y, ctx.dim, x.dtype), None, None, None


def old_softmax(name: str, x: Tensor, dim: int, widen: bool) -> Tensor:
    """Return ``softmax`` or ``log_softmax`` of ``x`` along ``dim``, as float32 with ``widen``, as torch before 1.11.

    Autograd saves the input beside the output; the backward pass needs no more of it than its dtype (pytorch issue
    64000, pull request 65242).
    """
    y: Tensor = _BothSaved.apply(x, name, dim, widen)
    return y


_OLD_SOFTMAXES: Mapping[str, Callable[..., Any]] = {
    f"{name}.int": functools.partial(_softmax, functools.partial(old_softmax, name))
    for name in ("softmax", "log_softmax")
}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")
