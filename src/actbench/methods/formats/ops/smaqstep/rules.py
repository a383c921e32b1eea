"""One step of Adam and of SGD with momentum, in float32: the coefficients, and the reference in plain torch.

The operations are those of torch.optim on the CPU, each rounded by itself, but for the product with the bias
correction, a quotient there. p is the parameter and g its gradient; float16 and bfloat16 are widened to float32:

    Adam (Kingma, Ba 2014, arXiv 1412.6980, algorithm 1) and AdamW (Loshchilov, Hutter 2017, arXiv 1711.05101, eq. 12)
        w = p * kept
        g = g * sign + p * decay, or g * sign without decay
        m = m + (1 - beta1) * (g - m), or g - beta1 * (g - m) if beta1 <= 0.5
        v = v * beta2 + ((1 - beta2) * g) * g
        p = w + (-rate * m) / (root(v) * correction + eps)

    SGD (torch's form of momentum)
        g = g * sign + p * decay, or g * sign without decay
        b = b * momentum + added * g
        p = p - rate * (b, or g + momentum * b with Nesterov)

Adam's second moment v is passed and returned as its root s, since it is stored on a linear scale; v = s * s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor


class AdamRule(NamedTuple):
    """The coefficients of a step of Adam or AdamW; floats that are exact in float32.

    Attributes:
        sign: -1 to maximize, else 1.
        kept: The share of a parameter that decoupled weight decay leaves.
        decay: Weight decay that is added to the gradient.
        from_gradient: Whether the sum for the first moment starts from the gradient (``beta1 <= 0.5``).
        toward: ``-beta1`` with ``from_gradient``, else ``1 - beta1``.
        beta2: Decay of the second moment.
        rest2: ``1 - beta2``.
        correction: 1 divided by the root of the second moment's bias correction.
        eps: Added to the divisor.
        rate: The negative learning rate, divided by the first moment's bias correction.
    """

    sign: float
    kept: float
    decay: float
    from_gradient: float
    toward: float
    beta2: float
    rest2: float
    correction: float
    eps: float
    rate: float


class SgdRule(NamedTuple):
    """The coefficients of a step of SGD with momentum; floats that are exact in float32.

    Attributes:
        sign: -1 to maximize, else 1.
        decay: Weight decay that is added to the gradient.
        momentum: Momentum of the buffer.
        added: ``1 - dampening``; 1 at the first step, when the buffer is zero.
        nesterov: 1 for Nesterov's momentum, else 0.
        rate: The negative learning rate.
    """

    sign: float
    decay: float
    momentum: float
    added: float
    nesterov: float
    rate: float


def adam_rule(
    step: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> AdamRule:
    """Return the coefficients of step number ``step``, from 1; the other arguments are those of torch.optim."""
    beta1, beta2 = betas
    weight = np.float32(1 - beta1)
    # the two forms of torch's lerp, by which torch.optim updates the first moment (aten/src/ATen/native/Lerp.h)
    near = weight < 0.5
    return AdamRule(
        sign=-1.0 if maximize else 1.0,
        kept=_single(1 - lr * weight_decay) if decoupled else 1.0,
        decay=0.0 if decoupled else _single(weight_decay),
        from_gradient=0.0 if near else 1.0,
        toward=float(weight if near else weight - np.float32(1)),
        beta2=_single(beta2),
        rest2=_single(1 - beta2),
        correction=_single(1 / math.sqrt(1 - beta2**step)),
        eps=_single(eps),
        rate=_single(-(lr / (1 - beta1**step))),
    )


def sgd_rule(
    step: float, *, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool, maximize: bool
) -> SgdRule:
    """Return the coefficients of step number ``step``, from 1; the other arguments are those of torch.optim."""
    return SgdRule(
        sign=-1.0 if maximize else 1.0,
        decay=_single(weight_decay),
        momentum=_single(momentum),
        # torch.optim.SGD begins its buffer with the whole first gradient, whatever the dampening
        added=1.0 if step == 1 else _single(1 - dampening),
        nesterov=float(nesterov),
        rate=_single(-lr),
    )


def adam(p: Tensor, g: Tensor, m: Tensor, s: Tensor, rule: AdamRule) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, first moment and root of the second (not negative) after a step, float32 of any shape."""
    kept, g = p * rule.kept, _gradient(p, g, rule)
    m = (g if rule.from_gradient else m) + (g - m) * rule.toward
    # the float32 nearest to each root; torch's own root of float32 on the CPU is sometimes the one beside it
    s = (s * s * rule.beta2 + g * rule.rest2 * g).double().sqrt().float()
    return kept + m * rule.rate / (s * rule.correction + rule.eps), m, s


def sgd(p: Tensor, g: Tensor, b: Tensor, rule: SgdRule) -> tuple[Tensor, Tensor]:
    """Return parameter and momentum buffer (zeros before the first step) after a step, float32 of any shape."""
    g = _gradient(p, g, rule)
    b = b * rule.momentum + g * rule.added
    return p + (g + b * rule.momentum if rule.nesterov else b) * rule.rate, b


def _gradient(p: Tensor, g: Tensor, rule: AdamRule | SgdRule) -> Tensor:
    g = g * rule.sign
    return g + p * rule.decay if rule.decay else g  # as in torch: without decay, no look at the parameter


def _single(value: float) -> float:
    return float(np.float32(value))
