"""How far the gradient of a norm's input is off on average where the input was kept in few bits.

A norm over rows of M elements has, with g the gradient of what it normalises to and x~ the decoded, normalised input,

    dx[i] = (g[i] - mean(g) - x~[i] * mean(g * x~)) / deviation

In mean(g * x~) element i meets itself: E[x~[i]**2] is x[i]**2 + v[i], with v the variance of what is decoded. All other
products are of independent errors. So E[dx[i]] is the exact one less g[i] * v[i] / (M * deviation), and a gradient
loses the share v / M. Between two codes a step apart v is step**2 * f * (1 - f) at the place f, a sixth of step**2 on
average; a step is the range of a group over 2**bits - 1.

Prints the table of docs/actnn.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import actbench
from actbench.methods.actnn.ops.groupquant import reference as groups

ELEMENTS = 2**20
GROUP = 256
WIDTHS, BITS = (32, 64, 128, 256, 768, 4096), (1, 2, 4)


class Normed(nn.Module):
    """A norm of what is computed, since the batch itself is never packed.

    Attributes:
        read: What the norm was given last.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.shift, self.norm = nn.Parameter(torch.zeros(())), norm
        self.read = torch.empty(0)

    def forward(self, x: Tensor) -> Any:
        """Return the norm of x."""
        self.read = x + self.shift
        self.read.retain_grad()
        return self.norm(self.read)


class Loss(NamedTuple):
    """The share of the input's gradient that is lost on average.

    Attributes:
        expected: By the variance of every element.
        closed: By the range of a group alone.
        measured: Projected on the exact gradient, over all rows.
        error: Standard error of ``measured``.
    """

    expected: float
    closed: float
    measured: float
    error: float


def gradient(model: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of what a :class:`Normed`, converted or not, gives its norm."""
    model(x).backward(dy)
    found = next(part for part in model.modules() if isinstance(part, Normed)).read.grad
    assert found is not None
    return found


def loss(norm: nn.Module, shape: tuple[int, ...], scheme: str, width: int, seed: int = 0) -> Loss:
    """Measure how much of the input's gradient a norm loses.

    Args:
        norm: Layer, group or root-mean-square norm without weights, or with weights of 1.
        shape: Of the input, standard normal numbers; what is normalised together lies together.
        scheme: An ``actnn`` or ``gact`` whose bits are those of ``width``.
        width: Bits of a code.
        seed: Of the input, the gradient and rounding.
    """
    torch.manual_seed(seed)
    x, dy, model = torch.randn(shape), torch.randn(shape), Normed(norm)
    exact = gradient(model, x, dy).clone()
    coded = gradient(actbench.convert(model, scheme), x, dy)

    row = math.prod(shape[1:]) // getattr(norm, "num_groups", 1)
    rows, g, dx, error = (each.reshape(-1, row).double() for each in (x, dy, exact, coded - exact))
    deviation = (
        rows.square().mean(1, keepdim=True).sqrt() if isinstance(norm, nn.RMSNorm) else rows.std(1, False)[:, None]
    )
    variance, ends = decoded(rows.float(), width)
    losses, square = -(error * dx).sum(1), dx.square().sum()
    return Loss(
        float((g * variance / deviation**3 * dx).sum() / square) / row,
        float((ends / deviation).square().mean()) / (6 * (2**width - 1) ** 2 * row),
        float(losses.sum() / square),
        float(losses.std() * len(losses) ** 0.5 / square),
    )


def decoded(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the variance of each element as it is decoded, and the range of each group; both of rows (R, F)."""
    size = rows.shape[1] // math.ceil(rows.shape[1] / GROUP)
    low, high = groups.bounds_of(groups.words_of(rows, size))
    span = (high - low).double()
    place = ((rows.view(len(rows), -1, size) - low[..., None]) / span[..., None] * (2**width - 1)).frac()
    variance = (span[..., None] / (2**width - 1)).square() * place * (1 - place)
    return variance.view(rows.shape), span


def main() -> None:
    """Print the table, in per cent."""
    titles = [f"{title}, {bits} bit{'s' * (bits > 1)}" for bits in BITS for title in ("v / M", "measured")]
    print(f"| width M | {' | '.join(titles)} |")
    print(f"| ---: |{' ---: |' * len(titles)}")
    for width in WIDTHS:
        cells = []
        for bits in BITS:
            found = loss(nn.LayerNorm(width), (ELEMENTS // width, width), f"actnn:L2,bits={bits}", bits)
            expected, _, measured, error = (f"{100 * share:.4f}" for share in found)
            cells += [expected, f"{measured} ± {error}"]
        print(f"| {width} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
