"""One step of an optimizer whose state is SmaQ blocks, in one pass: read, step and write a block, then the next.

After Shoghi et al. (2021), who quantize the state of an optimizer and store it as before; here what is stored are the
blocks of :mod:`actbench.ops.smaqformat`, replaced in place. In each, what is computed is in
:mod:`actbench.ops.steprules`, between decoding and encoding with noise as in :mod:`actbench.ops.smaqblocks`; the
parameter is stepped by the new moments before they are rounded. Adam's second moment is stored as its root; one that
is decoded to less than half a main step of its block is taken for that half step: it could as well have been rounded
up, and a first moment that is divided by next to nothing would throw its parameter far away.

The operators are ``actbench::smaqstep_adam_`` and ``smaqstep_sgd_``; the functions below are how to call them.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from actbench.ops import noise, smaqblocks, steprules
from actbench.ops.arguments import check_contiguous
from actbench.ops.cpu import smaqstep as cpu
from actbench.ops.cuda import smaqstep as cuda
from actbench.ops.library import define, direct
from actbench.ops.smaqformat import Format, check_format
from actbench.ops.steprules import AdamRule, SgdRule

MOST_BLOCK = 256
"""Elements of the largest block: state, parameter and gradient of one stay in a warp's registers."""

Seeds = tuple[int, int]


def _kernels(tensor: Tensor) -> ModuleType:
    return cuda if tensor.is_cuda else cpu


def _seeds(seed: int) -> Seeds:
    """Return the seeds of the noise of the first and of the second moment."""
    first = noise.mixed(seed)
    return noise.signed(first), noise.signed(first ^ 1)


def _adam(p: Tensor, g: Tensor, means: Tensor, roots: Tensor, seed: int, rule: list[float], *parts: int) -> None:
    _adam_fake(p, g, means, roots, seed, rule, *parts)
    _kernels(p).adam(p, g, means, roots, Format(*parts), _seeds(seed), AdamRule(*rule))


def _adam_fake(p: Tensor, g: Tensor, means: Tensor, roots: Tensor, seed: int, rule: list[float], *parts: int) -> None:
    _check(p, g, (means, roots), Format(*parts))
    _check_rule(rule, AdamRule._fields)


def _sgd(p: Tensor, g: Tensor, buffers: Tensor, seed: int, rule: list[float], *parts: int) -> None:
    _sgd_fake(p, g, buffers, seed, rule, *parts)
    _kernels(p).sgd(p, g, buffers, Format(*parts), _seeds(seed)[0], SgdRule(*rule))


def _sgd_fake(p: Tensor, g: Tensor, buffers: Tensor, seed: int, rule: list[float], *parts: int) -> None:
    _check(p, g, (buffers,), Format(*parts))
    _check_rule(rule, SgdRule._fields)


def _check(p: Tensor, g: Tensor, states: tuple[Tensor, ...], form: Format) -> None:
    check_format(form)
    if form.block > MOST_BLOCK:
        raise ValueError(f"blocks of a step have at most {MOST_BLOCK} elements, found {form.block}")
    check_contiguous(p)
    check_contiguous(g)
    if p.dtype == torch.float64:
        raise ValueError("a step computes in float32: the parameter must not be torch.float64")
    if g.dtype != p.dtype or g.shape != p.shape or g.device != p.device:
        found = f"{g.dtype} {tuple(g.shape)} on {g.device}"
        raise ValueError(f"the gradient must be {p.dtype} {tuple(p.shape)} on {p.device}, found {found}")
    size = form.packed_bytes(p.numel())
    for state in states:
        fits = state.dtype == torch.uint8 and state.dim() == 1 and state.is_contiguous() and state.numel() == size
        if not fits or state.device != p.device:
            found = f"{state.dtype} {tuple(state.shape)} on {state.device}"
            raise ValueError(
                f"the state must be a contiguous torch.uint8 vector of {size} bytes on {p.device}, found {found}"
            )


def _check_rule(rule: list[float], names: tuple[str, ...]) -> None:
    if len(rule) != len(names):
        raise ValueError(f"the rule must be {len(names)} numbers, {', '.join(names)}; found {len(rule)}")


_REST = "int seed, float[] rule, int main_bits, int outlier_bits, int outliers, int block"
define(
    f"smaqstep_adam_(Tensor(a!) param, Tensor grad, Tensor(b!) means, Tensor(c!) roots, {_REST}) -> ()",
    _adam,
    _adam_fake,
)
define(f"smaqstep_sgd_(Tensor(a!) param, Tensor grad, Tensor(b!) buffers, {_REST}) -> ()", _sgd, _sgd_fake)

_ops = torch.ops.actbench


def adam_(param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule, form: Format) -> None:
    """Step a parameter by Adam or AdamW, and its packed moments, in place.

    Args:
        param: float32, float16 or bfloat16, contiguous, of any shape, n elements; n may be 0.
        grad: As ``param``.
        means: uint8 ``(form.packed_bytes(n),)``: the first moment. Zero bytes before the first step.
        roots: The same, of the root of the second moment.
        seed: Of the noise, 64 bits: another one at each step and for each parameter.
        rule: The coefficients of the step.
        form: Which SmaQ; blocks of at most :data:`MOST_BLOCK`.

    Raises:
        ValueError: An argument is not as above.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    if direct(param):
        _adam(param, grad, means, roots, seed, list(rule), *form)
    else:
        _ops.smaqstep_adam_.default(param, grad, means, roots, seed, list(rule), *form)


def sgd_(param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule, form: Format) -> None:
    """Step a parameter by SGD with momentum, and its packed buffer, in place.

    Args:
        param: As in :func:`adam_`, and so all that follows.
        grad: As ``param``.
        buffers: uint8 ``(form.packed_bytes(n),)``. Zero bytes before the first step.
        seed: Of the noise.
        rule: The coefficients of the step.
        form: Which SmaQ.

    Raises:
        ValueError: An argument is not as above.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    if direct(param):
        _sgd(param, grad, buffers, seed, list(rule), *form)
    else:
        _ops.smaqstep_sgd_.default(param, grad, buffers, seed, list(rule), *form)


def reference_adam_(
    param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule, form: Format
) -> None:
    """Do what :func:`adam_` does, in plain torch: what every kernel is held to, bit for bit."""
    count, seeds = param.numel(), _seeds(seed)
    m = smaqblocks.decode(means, 0, count, form, torch.float32)
    s = smaqblocks.decode(roots, 0, count, form, torch.float32)
    least = smaqblocks.half_steps(roots, count, form)
    s = torch.where(s > least, s, least)
    p, m, s = steprules.adam(param.flatten().float(), grad.flatten().float(), m, s, rule)
    param.copy_(p.view(param.shape))
    means.copy_(smaqblocks.encode(m, 0, form, seeds[0], True))
    roots.copy_(smaqblocks.encode(s, 0, form, seeds[1], True))


def reference_sgd_(param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule, form: Format) -> None:
    """Do what :func:`sgd_` does, in plain torch."""
    b = smaqblocks.decode(buffers, 0, param.numel(), form, torch.float32)
    p, b = steprules.sgd(param.flatten().float(), grad.flatten().float(), b, rule)
    param.copy_(p.view(param.shape))
    buffers.copy_(smaqblocks.encode(b, 0, form, _seeds(seed)[0], True))
