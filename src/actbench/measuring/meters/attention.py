"""Scaled dot product attention as a CUDA device would run it, on fake CPU tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.measuring.meters.profiles import DeviceProfile

aten = torch.ops.aten

Kernel = Literal["flash", "efficient", "math"]

_MASK_ALIGNMENT = 8


def choose(profile: DeviceProfile, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Kernel:
    """Return the kernel that torch picks on a CUDA device, by its own conditions and in its own order.

    Args:
        profile: The device.
        q: Queries, (batch, heads, rows, width).
        k: Keys, (batch, heads or fewer, columns, width).
        v: Values, as the keys; their width may differ.
        mask: What is added to the scores, or None.
        is_causal: Whether rows see only the columns up to theirs.
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

    Shared key and value heads (``enable_gqa``) are known to the flash kernel alone; elsewhere they are repeated.
    """
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
    math = aten._scaled_dot_product_attention_math.default
    return _first(math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa))


def _is_fusable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    all_four = all(t.dim() == 4 and t.stride(-1) == 1 and t.numel() > 0 for t in (q, k, v))
    return all_four and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float) -> Tensor:
    """Run the flash kernel, which takes widths in steps of 8: others are padded with zeros, and the output cut."""
    width = q.shape[-1]
    if width % 8:
        q, k, v = (F.pad(t, (0, -width % 8)) for t in (q, k, v))
    fused = aten._scaled_dot_product_flash_attention.default
    output = _first(fused(q, k, v, dropout_p, is_causal, False, scale=scale))
    return output[..., :width] if width % 8 else output


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    zero, minus_infinity = (torch.scalar_tensor(value, dtype=dtype) for value in (0.0, float("-inf")))
    return torch.where(mask, zero, minus_infinity)


def _aligned(mask: Tensor) -> Tensor:
    if mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return F.pad(mask, (0, _MASK_ALIGNMENT - columns % _MASK_ALIGNMENT))[..., :columns]


def _first(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0]
