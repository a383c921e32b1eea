"""A step of an optimizer whose state is SmaQ blocks, on CUDA: the launches of ``kernels/smaqstep.cu``."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from actbench.ops import rawkernel
from actbench.ops.noise import state_of
from actbench.ops.smaq.format import Format
from actbench.ops.smaqstep.rules import AdamRule, SgdRule


def adam(
    param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, form: Format, seeds: tuple[int, int], rule: AdamRule
) -> None:
    """Step a parameter and its moments, in place."""
    states = (state_of(seed) for seed in seeds)
    coefficients = _coefficients(rule, "from_gradient")
    _launch("adam", param, form, param, grad, means, roots, *_sizes(param, form), *states, *coefficients)


def sgd(param: Tensor, grad: Tensor, buffers: Tensor, form: Format, seed: int, rule: SgdRule) -> None:
    """Step a parameter and its buffer, in place."""
    state = state_of(seed)
    _launch("sgd", param, form, param, grad, buffers, *_sizes(param, form), state, *_coefficients(rule, "nesterov"))


def _sizes(param: Tensor, form: Format) -> tuple[np.generic, ...]:
    return np.int64(param.numel()), *(np.int32(part) for part in form)


def _coefficients(rule: AdamRule | SgdRule, flag: str) -> list[np.generic]:
    return [np.uint32(value) if name == flag else np.float32(value) for name, value in rule._asdict().items()]


def _launch(kernel: str, param: Tensor, form: Format, *arguments: Tensor | np.generic) -> None:
    macros: rawkernel.Macros = {"SCALAR": rawkernel.SCALARS[param.dtype], "TILES": 1}
    blocks = -(-param.numel() // form.block)
    rawkernel.launch("smaqstep", f"smaqstep_{kernel}", macros, 32 * blocks, *arguments)
