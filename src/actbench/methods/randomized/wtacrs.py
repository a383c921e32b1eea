"""WTA-CRS: linear layers and products of activations save sampled rows (arXiv 2305.15265)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from actbench.methods.randomized.ops.sketch import Sketching
from actbench.methods.randomized.products import PRODUCTS, SamplingForward
from actbench.methods.randomized.scheme import with_sketches
from actbench.model.gradient import Gradient
from actbench.model.provenance import Published
from actbench.model.records import Site
from actbench.packing.refusals import refuse_compiled
from actbench.packing.wrapped import bind_entries
from actbench.scheme.base import LINEAR_LAYERS, SAVED_RESULTS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import TrainingSetup

_SOURCE = "README of github.com/zirui-ray-liu/WTACRS"


class WtaCrs(Scheme):
    """Linear layers and products of two activations save a share of the rows of their factors: winner-take-all.

    Paper: Liu et al., "Winner-Take-All Column Row Sampling for Memory Efficient Adaptation of Language Model", arXiv
    2305.15265 (NeurIPS 2023). Of the rows that a gradient sums over, the longest are kept with weight 1, and the rest
    of the budget is drawn with p_i in proportion to the length, and weighted, so that the mean is exact.
    Kept for backward: for each input of a linear layer k of its rows and their indices, 4 k bytes, as with
    ``randomized,sketch=wta``; for a product of (..., n, d) and (..., d, m), such as queries with keys and probabilities
    with values, k rows of each first matrix and k columns of each second one; a bit per element for ReLU and dropout,
    exact. Layers that read one input share its sample. Softmax saves its output. Norms are those of ``msln``:
    ``wtacrs:0.3+msln`` is the whole method of the paper.
    The forward pass is exact. Gradients are unbiased, those of queries, keys, probabilities and values too.
    Fused attention has no product to sample, and saves its tensors unchanged: use ``--attention eager``. Products by
    ``einsum`` or ``baddbmm`` stay as they are, and so do those whose factors are broadcast.
    Not reproduced: a row's weight by the gradient of an earlier step; here only its length counts.

    Attributes:
        ratio: Rows to keep per row, rounded down; at least 1.
    """

    name: ClassVar[str] = "wtacrs"
    positional: ClassVar[str | None] = "ratio"
    card: ClassVar[Card] = Card(
        summary="linear layers and attention's products save the longest rows and some drawn ones; masks in 1 bit",
        paper="Liu et al. 2023, arXiv 2305.15265",
        published=(
            Published(
                quantity="peak_saving",
                value=1 - 8.242 / 17.246,
                setting="T5-base, batch 100, 128 tokens, ratio 0.3, A100-80GB",
                source=_SOURCE,
            ),
        ),
        variants=(":0.5", ":0.3"),
        leading=(":0.3",),
    )
    claims: ClassVar[tuple[str, ...]] = (LINEAR_LAYERS, SAVED_RESULTS)
    gradient: ClassVar[Gradient] = "unbiased"

    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.3

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace linear layers, and bind a forward on the model that samples products.

        Raises:
            NothingToConvertError: The model has no linear layer.
            ConversionError: It is converted already, or compiled.
        """
        refuse_compiled(setup.module, *PRODUCTS)
        sketching = Sketching("wta", self.ratio)
        changed = with_sketches(self, setup, sketching, f"{self.ratio:.0%} of its rows")
        SamplingForward(changed.module, sketching).bind()
        bind_entries(changed.module)
        kind = type(changed.module).__name__
        site = Site(path="", was=kind, becomes=f"products of activations, {self.ratio:.0%} of rows; masks in 1 bit")
        return changed.changed(changed.module, (site,))
