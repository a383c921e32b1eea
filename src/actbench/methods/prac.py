"""PRAC: inputs projected to a principal and a random subspace (arXiv 2602.23111)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from actbench.methods.actnn.packedinputs import with_packed_inputs
from actbench.model.gradient import Gradient
from actbench.ops.noise import fresh_seed, random_words
from actbench.packing import OfRows, Parts, SiteState
from actbench.packing.layout import Layout
from actbench.packing.precision import no_autocast
from actbench.scheme.base import LINEAR_LAYERS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import TrainingSetup

_HALF = 1 << 32


@dataclass(frozen=True)
class Subspaces(OfRows):
    """Rows of d elements as coordinates in a principal subspace, and in a random one of what is orthogonal to it.

    A row x decodes to ``Q1 Q1^T x + (d - r1) / r2 * Q2 Q2^T x``. Q2 is uniform among the subspaces of the complement of
    Q1, so that the mean over draws is x whatever Q1 is. The parts are the coordinates, Q1, and the seed of Q2.

    Attributes:
        share: The coordinates of a row per element, r1 + r2 over d; at least one of each kind is kept.
        principal: The share of principal ones among them.
    """

    share: float
    principal: float

    def why_not(self, x: Tensor) -> str | None:
        """Return why the format cannot take a tensor, or None."""
        no = super().why_not(x)
        if no is None and x.dtype != torch.bool and self.packed_bytes(Layout.of(x)) >= x.nbytes:
            no = "it has too few rows, or too short rows, for subspaces to take less"
        return no

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return (rows, r1 + r2) and Q1, (d, r1), in the tensor's type, and a 0-d int64 seed."""
        first, second = self._dims(layout)
        rows, seed = flat.view(-1, layout.shape[-1]), fresh_seed(flat)
        with no_autocast(flat):
            main = _range_of(rows, _normal(seed, 0, (rows.shape[1], first)))
            both = torch.cat((main, self._complement(main, second, seed)), 1)
            return rows @ both, main, seed.clone()  # seeds of a pass lie together, and this one is kept

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the rows decoded from their coordinates."""
        coordinates, main, seed = parts
        first, second = self._dims(layout)
        scale = (layout.shape[-1] - first) / second
        with no_autocast(coordinates):
            both = torch.cat((main, self._complement(main, second, seed) * scale), 1)
            return layout.laid_out((coordinates @ both.t()).view(-1))

    def packed_bytes(self, layout: Layout) -> int:
        """Return ``s (rows (r1 + r2) + d r1) + 8`` for elements of s bytes."""
        width = layout.shape[-1]
        first, second = self._dims(layout)
        return layout.dtype.itemsize * (layout.elements // width * (first + second) + width * first) + 8

    def _dims(self, layout: Layout) -> tuple[int, int]:
        """Return r1 and r2."""
        width = layout.shape[-1]
        first = max(1, math.floor(self.share * self.principal * width))
        return first, max(1, math.floor(self.share * width) - first)

    def _complement(self, main: Tensor, count: int, seed: Tensor) -> Tensor:
        """Return Q2, (d, count): an orthonormal basis of a random subspace that is orthogonal to Q1."""
        wide = main.float()
        drawn = _normal(seed, main.numel(), (main.shape[0], count))
        for _ in range(2):  # the second time removes what rounding left
            drawn = drawn - wide @ (wide.t() @ drawn)
        basis: Tensor = torch.linalg.qr(drawn).Q
        return basis.to(main.dtype)


def _range_of(rows: Tensor, start: Tensor) -> Tensor:
    """Return the basis after one step of subspace iteration towards the principal directions, in the rows' type."""
    reached = rows.t() @ (rows @ start.to(rows.dtype))
    largest = reached.abs().amax().clamp(min=torch.finfo(reached.dtype).tiny)
    basis: Tensor = torch.linalg.qr((reached / largest).float()).Q
    return basis.to(rows.dtype)


def _normal(seed: Tensor, first: int, shape: tuple[int, int]) -> Tensor:
    """Return normal numbers in float32 from the words of a seed, one a word (Box and Muller 1958)."""
    words = random_words(seed, first, math.prod(shape))
    radius = ((words & (_HALF - 1)).float() + 0.5).div_(_HALF).log_().mul_(-2).sqrt_()
    angle = ((words >> 32) & (_HALF - 1)).float().mul_(2 * math.pi / _HALF)
    return radius.mul_(angle.cos_()).view(shape)


class Prac(Scheme):
    """Linear layers save their input in a principal subspace and in a random subspace orthogonal to it: unbiased.

    Paper: "PRAC: Principal-Random Subspace for LLM Activation Compression", arXiv 2602.23111.
    Kept for backward: for each input with rows of d elements, ``r1 + r2`` coordinates per row and the ``d r1`` numbers
    of the principal basis, in its type, and a seed of 8 bytes; for ReLU, dropout and pools, which may save the same
    tensor, an exact small code. An input whose subspaces would take as many bytes stays whole. The forward pass and the
    gradients of inputs and biases are exact; those of weights are unbiased: coordinates in the random subspace count
    ``(d - r1) / r2`` times.
    Not reproduced: a singular value decomposition every few steps. Here each input has a basis of its own, from one
    step of subspace iteration with a random start.

    Attributes:
        share: Coordinates of a row per element, r1 + r2 over d.
        principal: The share of principal coordinates among them.
    """

    name: ClassVar[str] = "prac"
    positional: ClassVar[str | None] = "share"
    card: ClassVar[Card] = Card(
        summary="linear layers save inputs in a principal and a random subspace; only the weight gradient is estimated",
        paper="arXiv 2602.23111",
        variants=(":0.5", ":0.25"),
        leading=(),
    )
    claims: ClassVar[tuple[str, ...]] = (LINEAR_LAYERS,)
    gradient: ClassVar[Gradient] = "unbiased"

    share: Annotated[float, Field(gt=0, le=0.9)] = 0.25
    principal: Annotated[float, Field(gt=0, lt=1)] = 0.5

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace layers by ones that pack, or save a small code; see :mod:`actbench.methods.actnn.packedinputs`."""
        codec, becomes = Subspaces(self.share, self.principal), f"input, {self.share:.0%} of its coordinates"
        return with_packed_inputs(
            self,
            setup,
            codec,
            lambda _, path: SiteState(path, 32 * self.share),
            becomes,
            norms=False,
            convolutions=False,
        )
