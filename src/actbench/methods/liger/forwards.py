"""Forwards of norms, gated MLPs and attention that run :mod:`actbench.methods.liger.functions` in training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from actbench.methods.liger.functions import RmsNorm, Rotary, SiluMul, turned
from actbench.methods.msln.outputnorm import epsilon, is_norm
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.refusals import refuse_compiling
from actbench.packing.replacement import is_linear

UNCOMPILABLE = ("a model with Liger's functions", "the functions write into their arguments")
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
        if not torch.is_grad_enabled():
            return self.inner(module, *args, **kwargs)
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
    equal = q.dtype == k.dtype == cos.dtype == sin.dtype and q.shape[-1] == k.shape[-1] == cos.shape[-1]
    if trained and equal and unsqueeze_dim == 1 and cos.dim() == 3:
        return Rotary.apply(q, k, cos, sin)
    return exact(q, k, cos, sin, unsqueeze_dim)


@functools.cache
def _turns(rotary: Callable[..., Any]) -> bool:
    """Return whether a function gives the bits that :class:`Rotary` gives, in float32 and bfloat16."""
    if [*inspect.signature(rotary).parameters] != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    noise = torch.Generator().manual_seed(0)
    with unset_fake_temporarily(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            # 2 sequences, 4 heads and 2, 3 positions; the halves of cosines and sines differ
            shapes = (2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 8), (2, 3, 8)
            q, k, cos, sin = (torch.randn(shape, generator=noise, device="cpu").to(dtype) for shape in shapes)
            try:
                found = rotary(q.clone(), k.clone(), cos, sin)
                equal = [torch.equal(y, turned(x, cos, sin)) for y, x in zip(found, (q, k), strict=True)]
            except Exception:  # the function is not ours: if it fails, it turns otherwise
                return False
            if not all(equal):
                return False
    return True


def fused(module: nn.Module) -> ReboundForward | None:
    """Return the forward for a module that computes what one of the functions does, or None."""
    if "forward" in vars(module):
        return None
    forward: Any = type(module).forward
    weight = dict(module.named_parameters(recurse=False)).get("weight")  # the attribute of a packed layer unpacks it
    if weight is not None and not isinstance(module, nn.LayerNorm):
        return FusedNorm(module) if is_norm(module) and weight.dim() == 1 else None
    if _does(forward, _gated) and _is_silu(getattr(module, "act_fn", None)):
        # gate and up are written over, so that what makes them must not need them again
        return FusedMlp(module) if _is_product(module.gate_proj) and _is_product(module.up_proj) else None
    code: CodeType | None = getattr(forward, "__code__", None)
    rotary = getattr(forward, "__globals__", {}).get(_ROTARY) if code is not None and _ROTARY in code.co_names else None
    return FusedRotary(module) if rotary is not None and _turns(rotary) else None


def _is_silu(activation: Any) -> bool:
    kind = type(activation)
    is_known = (kind.__module__, kind.__name__) == ("transformers.activations", "SiLUActivation")
    return kind is nn.SiLU or is_known or activation is nn.functional.silu


def _is_product(layer: Any) -> bool:
    """Return whether a layer is linear, or adapts one."""
    return is_linear(layer) or hasattr(layer, "base_layer")  # as peft names what it adapts, frozen formats too


def _does(function: Any, other: Callable[..., Any]) -> bool:
    """Return whether two functions have the same instructions and names, whatever their docstrings say."""
    codes = [getattr(each, "__code__", None) for each in (function, other)]
    return None not in codes and len({(code.co_code, code.co_names) for code in codes if code is not None}) == 1


# What MLPs of transformers' Llama family compute, to compare with.
def _gated(self: Any, x: Tensor) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504 - the instructions are compared
