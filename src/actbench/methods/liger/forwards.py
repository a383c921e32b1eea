"""Forwards of norms, gated MLPs and attention that run :mod:`actbench.methods.liger.functions` in training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from actbench.methods.liger.functions import RmsNorm, Rotary, SiluMul
from actbench.methods.msln.outputnorm import epsilon, is_norm
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.refusals import refuse_compiling

UNCOMPILABLE = ("a model with Liger's functions", "they write into tensors that they got")
"""What cannot be compiled, and why."""

_ROTARY = "apply_rotary_pos_emb"


class FusedNorm(ReboundForward):
    """The forward of an RMS norm that saves its input and one number a row."""

    uncompilable = UNCOMPILABLE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the exact norm returns."""
        module, (x, *_) = self.module, (*args, *kwargs.values())
        weight: Any = module.weight
        if not (torch.is_grad_enabled() and x.numel() and (x.requires_grad or weight.requires_grad)):
            return self.inner(module, *args, **kwargs)
        refuse_compiling(*self.uncompilable)
        return RmsNorm.apply(x, weight, epsilon(module, x.dtype), functools.partial(self.inner, module))


class FusedMlp(ReboundForward):
    """The forward of a gated MLP that saves what the activation gets, and not what it returns."""

    uncompilable = UNCOMPILABLE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the exact MLP returns."""
        module: Any = self.module
        (x,) = (*args, *kwargs.values())
        gate, up = module.gate_proj(x), module.up_proj(x)
        if torch.is_grad_enabled() and gate.requires_grad and up.requires_grad:
            refuse_compiling(*self.uncompilable)
            return module.down_proj(SiluMul.apply(gate, up))
        return module.down_proj(module.act_fn(gate) * up)


class FusedRotary(ReboundForward):
    """The forward of attention whose rotary embedding turns queries and keys in place."""

    uncompilable = UNCOMPILABLE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the exact attention returns."""
        module = self.module
        refuse_compiling(*self.uncompilable)
        return _with_rotary(type(module).forward)(module, *args, **kwargs)


@functools.cache
def _with_rotary(forward: Any) -> Callable[..., Any]:
    """Return a forward with the names of its module, but for the rotary embedding."""
    names = {**forward.__globals__, _ROTARY: functools.partial(_rotary, forward.__globals__[_ROTARY])}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _rotary(exact: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    trained = torch.is_grad_enabled() and q.requires_grad and k.requires_grad
    if trained and unsqueeze_dim == 1 and q.dtype == k.dtype == cos.dtype == sin.dtype:
        return Rotary.apply(q, k, cos, sin)
    return exact(q, k, cos, sin, unsqueeze_dim)


def fused(module: nn.Module) -> ReboundForward | None:
    """Return the forward for a module that computes what one of the functions does, or None."""
    if "forward" in vars(module):
        return None
    forward: Any = type(module).forward
    if isinstance(getattr(module, "weight", None), nn.Parameter) and not isinstance(module, nn.LayerNorm):
        return FusedNorm(module) if is_norm(module) else None
    if _does(forward, _gated) and _is_silu(vars(module)["_modules"].get("act_fn", getattr(module, "act_fn", None))):
        return FusedMlp(module)
    turned = getattr(forward, "__globals__", {}).get(_ROTARY) if _ROTARY in _names(forward) else None
    return FusedRotary(module) if turned is not None and _does(turned, apply_rotary_pos_emb) else None


def _is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLUActivation", "SiLU") or activation is nn.functional.silu


def _names(function: Any) -> tuple[str, ...]:
    code: CodeType | None = getattr(function, "__code__", None)
    return () if code is None else code.co_names


def _does(function: Any, other: Callable[..., Any]) -> bool:
    """Return whether two functions have the same instructions and names, whatever their docstrings say."""
    codes = [getattr(each, "__code__", None) for each in (function, other)]
    return None not in codes and len({(code.co_code, code.co_names) for code in codes if code is not None}) == 1


# What transformers' models of the Llama family compute, to compare with.


def _gated(self: Any, x: Tensor) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504 - the instructions are compared


def rotate_half(x: Tensor) -> Tensor:
    """Return the second half of the last dimension, with its sign changed, and the first."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Return queries and keys turned by their positions."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
