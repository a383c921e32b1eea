"""One step of an optimizer whose state is SmaQ blocks, in one pass: read, step and write block after block.

Shoghi et al. (2021) quantize the state of an optimizer but store it as before; here the state is stored as blocks of
:mod:`actbench.methods.formats.ops.smaq.format`, replaced in place. Each block is decoded, stepped by
:mod:`actbench.methods.formats.ops.smaqstep.rules` and encoded with noise as in
:mod:`actbench.methods.formats.ops.smaq.reference`. The new moments step the parameter before they are rounded. Adam's
second moment is stored as its root. A root that decodes to less than half a main step of its block counts as that half
step: it could have been rounded up as well, and a first moment divided by next to nothing would throw its parameter far
    away.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.methods.formats.ops import smaq
from actbench.methods.formats.ops.smaq import reference
from actbench.methods.formats.ops.smaq.format import Format, check_format
from actbench.methods.formats.ops.smaqstep import cpu, rules
from actbench.methods.formats.ops.smaqstep.rules import AdamRule, SgdRule
from actbench.ops import noise, rawkernel
from actbench.ops.library import Implementation, Kernels, check_contiguous, define

MOST_BLOCK = 256
"""Elements of the largest block: its state, parameter and gradient stay in the registers of 8 lanes."""

_REST = "int seed, int first, float[] rule, int main_bits, int outlier_bits, int outliers, int block"


def _seeds(seed: int, first: int = 0) -> tuple[int, int]:
    """Return the seeds of the noise of the first and of the second moment, for elements from ``first`` on."""
    word, sequence = noise.mixed(seed), first // noise.NUMBERS
    return noise.from_sequence(word, sequence), noise.from_sequence(word ^ 1, sequence)


def launch_adam(
    param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, form: Format, seeds: tuple[int, int], rule: AdamRule
) -> None:
    """Launch ``smaqstep_adam`` of ``kernels/smaqstep.cu``."""
    states = (noise.state_of(seed) for seed in seeds)
    coefficients = _coefficients(rule, "from_gradient")
    _launch("adam", param, form, param, grad, means, roots, *_sizes(param, form), *states, *coefficients)


def launch_sgd(param: Tensor, grad: Tensor, buffers: Tensor, form: Format, seed: int, rule: SgdRule) -> None:
    """Launch ``smaqstep_sgd`` of ``kernels/smaqstep.cu``."""
    state = noise.state_of(seed)
    _launch("sgd", param, form, param, grad, buffers, *_sizes(param, form), state, *_coefficients(rule, "nesterov"))


def _sizes(param: Tensor, form: Format) -> tuple[np.generic, ...]:
    return np.int64(param.numel()), *smaq.sizes_of(form)


def _coefficients(rule: AdamRule | SgdRule, flag: str) -> list[np.generic]:
    return [np.uint32(value) if name == flag else np.float32(value) for name, value in rule._asdict().items()]


def _launch(kernel: str, param: Tensor, form: Format, *arguments: Tensor | np.generic) -> None:
    threads = smaq.lanes_of(form) * -(-param.numel() // form.block)
    rawkernel.launch("smaqstep", f"smaqstep_{kernel}", smaq.macros_of(param.dtype, form), threads, *arguments)


def _adam_by(step: Implementation) -> Implementation:
    return lambda p, g, means, roots, seed, first, rule, *parts: step(
        p, g, means, roots, Format(*parts), _seeds(seed, first), AdamRule(*rule)
    )


def _sgd_by(step: Implementation) -> Implementation:
    return lambda p, g, buffers, seed, first, rule, *parts: step(
        p, g, buffers, Format(*parts), _seeds(seed, first)[0], SgdRule(*rule)
    )


@define(
    f"smaqstep_adam_(Tensor(a!) param, Tensor grad, Tensor(b!) means, Tensor(c!) roots, {_REST}) -> ()",
    Kernels(_adam_by(cpu.adam), _adam_by(launch_adam)),
)
def _adam(
    p: Tensor, g: Tensor, means: Tensor, roots: Tensor, seed: int, first: int, rule: list[float], *parts: int
) -> None:
    _check(p, g, (means, roots), first, Format(*parts))
    _check_rule(rule, AdamRule._fields)


@define(
    f"smaqstep_sgd_(Tensor(a!) param, Tensor grad, Tensor(b!) buffers, {_REST}) -> ()",
    Kernels(_sgd_by(cpu.sgd), _sgd_by(launch_sgd)),
)
def _sgd(p: Tensor, g: Tensor, buffers: Tensor, seed: int, first: int, rule: list[float], *parts: int) -> None:
    _check(p, g, (buffers,), first, Format(*parts))
    _check_rule(rule, SgdRule._fields)


def _check(p: Tensor, g: Tensor, states: tuple[Tensor, ...], first: int, form: Format) -> None:
    check_format(form)
    if first < 0:
        raise ValueError(f"the index of the first element must not be negative, found {first}")
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


def adam_(
    param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule, form: Format, first: int = 0
) -> None:
    """Step a parameter by Adam or AdamW, and its packed moments, in place.

    Args:
        param: float32, float16 or bfloat16, contiguous, of any shape, n elements; n may be 0.
        grad: As ``param``.
        means: uint8 ``(form.packed_bytes(n),)``: the first moment. Zero bytes before the first step.
        roots: The same for the root of the second moment.
        seed: Seed of the noise, 64 bits, different at each step and for each parameter.
        rule: The coefficients of the step.
        form: The format of SmaQ, with blocks of at most :data:`MOST_BLOCK`.
        first: Index of the first element in the whole tensor of which ``param`` is a part: a part whose first index is
            a multiple of ``form.block`` is stepped as it is in the whole, bit for bit. 32 elements share a sequence
            of noise, so that another index counts as the multiple of 32 below it.

    Raises:
        ValueError: An argument is not as above.
        KernelError: The kernel for CUDA cannot be compiled or launched.
    """
    _adam(param, grad, means, roots, seed, first, list(rule), *form)


def sgd_(param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule, form: Format, first: int = 0) -> None:
    """Step a parameter by SGD with momentum, and its packed buffer, in place; else as :func:`adam_`."""
    _sgd(param, grad, buffers, seed, first, list(rule), *form)


def reference_adam_(
    param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule, form: Format, first: int = 0
) -> None:
    """Do what :func:`adam_` does, in plain torch; every kernel must agree bit for bit."""
    count, seeds = param.numel(), _seeds(seed, first)
    m = reference.decode(means, 0, count, torch.float32, *form)
    s = reference.decode(roots, 0, count, torch.float32, *form)
    least = reference.half_steps(roots, count, form)
    s = torch.where(s > least, s, least)
    p, m, s = rules.adam(param.flatten().float(), grad.flatten().float(), m, s, rule)
    param.copy_(p.view(param.shape))
    means.copy_(reference.encode(m, seeds[0], True, *form))
    roots.copy_(reference.encode(s, seeds[1], True, *form))


def reference_sgd_(
    param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule, form: Format, first: int = 0
) -> None:
    """Do what :func:`sgd_` does, in plain torch."""
    b = reference.decode(buffers, 0, param.numel(), torch.float32, *form)
    p, b = rules.sgd(param.flatten().float(), grad.flatten().float(), b, rule)
    param.copy_(p.view(param.shape))
    buffers.copy_(reference.encode(b, _seeds(seed, first)[0], True, *form))
