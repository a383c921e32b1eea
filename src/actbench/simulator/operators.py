"""The operators that torch runs on a CUDA device in place of the CPU's, for steps on fake CPU tensors.

torch composes some operators of others, and of different ones on different devices. The kernels here replace the CPU's
choice while a simulation is active, for every caller: functions, modules and C++.
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
from torch.utils._pytree import tree_map

from actbench.ops import hostmemory
from actbench.simulator import branches, ctc, oldsoftmax, recurrent
from actbench.simulator.profiles import DeviceProfile

aten = torch.ops.aten

Kernel = Literal["flash", "efficient", "math"]

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
    square = q.shape[2] == k.shape[2] or not is_causal
    if profile.has_tensor_float and half and mask is None and same_width and square and q.shape[-1] <= 256:
        return "flash"
    known_type = q.dtype in (torch.float32, torch.float16) or (q.dtype == torch.bfloat16 and profile.has_tensor_float)
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
    all_four = all(t.dim() == 4 and t.stride(-1) == 1 and t.numel() > 0 for t in (q, k, v))
    return all_four and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float) -> Tensor:
    """Run the flash kernel; pad a width that is no multiple of 8 with zeros, and cut the output."""
    width = q.shape[-1]
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
    return F.pad(mask, (0, _MASK_ALIGNMENT - columns % _MASK_ALIGNMENT))[..., :columns]


def _first(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0]


_IN_FLOAT32 = (
    *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1"),
    *("log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "softplus", "logsumexp"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "norm.Scalar", "frobenius_norm.dim"),
    *("nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "dist", "pdist", "renorm"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "nll_loss", "mse_loss"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
"""Operators that CUDA's autocast computes in float32, and the CPU's does not."""

_INTO_FLOAT32 = (
    *("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
"""Such operators that themselves take half types and return float32."""

_AS_THEY_ARE = (
    *("cross_entropy_loss", "adaptive_avg_pool3d", "avg_pool3d", "max_pool3d", "adaptive_max_pool3d"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d"),
    *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d"),
)
"""Operators that the CPU's autocast computes in float32, from a copy, and CUDA's does not know."""


@contextmanager
def device_operators(profile: DeviceProfile) -> Iterator[None]:
    """Let steps on fake tensors run the operators of a device, and distinguish its memory from the host's."""
    if profile.is_cuda:
        with cuda_operators(profile):
            yield
    else:
        with hostmemory.as_the_device(), _replaced({**_COMPOSITES, **_ON_CPU}):
            yield


def card_operators(profile: DeviceProfile) -> AbstractContextManager[None]:
    """Let fake CUDA tensors run what torch chooses by asking a driver, and what fake tensors have no form of."""
    composites = {
        **_OF_ALL,
        **_asked_of_driver(profile),
        **(_softmaxes(profile) if profile.keeps_softmax_inputs else {}),
    }
    of_keys: dict[str, dict[str, Any]] = {"AutogradCUDA": composites, "Meta": recurrent.fake_forms()}
    return _replaced({(name, key): kernel for key, kernels in of_keys.items() for name, kernel in kernels.items()})


def cuda_operators(profile: DeviceProfile) -> AbstractContextManager[None]:
    """Replace the CPU's composite operators by CUDA's in the whole process; run no real CPU steps meanwhile."""
    return _replaced(_kernels(profile))


@contextmanager
def _replaced(kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> Iterator[None]:
    """Inside the block, let operators of torch, by their names and dispatch keys, run these kernels."""
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
_COMPOSITES = {(name, "AutogradCPU"): kernel for name, kernel in _OF_ALL.items()}
"""Kernels of all devices."""

_ON_CPU = {(name, "AutogradCPU"): kernel for name, kernel in branches.branches_on_cpu().items()}

_composites: ContextVar[Mapping[Any, Callable[..., Any]]] = ContextVar("_composites", default=MappingProxyType({}))


def composite(func: Any) -> Callable[..., Any] | None:
    """Return what composes an operator now in place of torch, or None; inference mode calls it by no dispatch key."""
    return _composites.get().get(func)


def _kernels(profile: DeviceProfile) -> dict[tuple[str, str], Callable[..., Any]]:
    """Return the replacement of each operator, by its name and dispatch key."""
    composites = {"dropout": _dropout, **_softmaxes(profile), **_asked_of_driver(profile)}
    in_float32 = {name: _in_float32(_operator(name)) for name in _IN_FLOAT32 if _is_cast_on_cuda(name)}
    into_float32 = {name: _into_float32(_operator(name)) for name in _INTO_FLOAT32}
    cast = {name: _without_autocast(kernel) for name, kernel in (in_float32 | into_float32).items()}
    cast |= dict.fromkeys(_AS_THEY_ARE, torch.library.fallthrough_kernel)
    of_keys = {"AutogradCPU": composites, "AutocastCPU": cast, "Meta": recurrent.fake_forms()}
    replaced = {(name, key): kernel for key, kernels in of_keys.items() for name, kernel in kernels.items()}
    return {**_COMPOSITES, **replaced}


def _asked_of_driver(profile: DeviceProfile) -> dict[str, Callable[..., Any]]:
    """Return the operators whose kernel torch chooses by asking the driver."""
    return {"scaled_dot_product_attention": functools.partial(attend, profile), **recurrent.composites()}


def _softmaxes(profile: DeviceProfile) -> dict[str, Callable[..., Any]]:
    """Return softmax and log-softmax, which save their inputs too where the torch of a profile did."""
    softmax: Any = oldsoftmax.softmax if profile.keeps_softmax_inputs else aten._softmax.default
    log_softmax: Any = oldsoftmax.log_softmax if profile.keeps_softmax_inputs else aten._log_softmax.default
    return {
        "softmax.int": functools.partial(_softmax, softmax),
        "log_softmax.int": functools.partial(_softmax, log_softmax),
    }


def _is_cast_on_cuda(name: str) -> bool:
    """Return whether the autocast of CUDA in the installed torch has a kernel of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Save a mask of one byte per element; the CPU saves one in the dtype of the input."""
    if not train or p == 0 or x.numel() == 0:
        return x
    dropped: tuple[Tensor, Tensor] = aten.native_dropout.default(x, p, True)
    return dropped[0]


def _softmax(fused: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Read half types and write float32 in one kernel; the CPU first makes a float32 copy."""
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
