from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Self

from pydantic import Field, PositiveInt, model_validator
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from actbench.errors import ConversionError, NothingToConvertError
from actbench.methods.randomized.ops.sketch import Kind, Sketching
from actbench.methods.randomized.sketched import Sketch, Sketched, sketched
from actbench.model.declared.schemes import Shorthand
from actbench.model.gradient import Gradient
from actbench.model.provenance import Published
from actbench.model.records import Site, Unreached
from actbench.packing.replacement import census, parametrized, swap
from actbench.packing.savedtensors import SharingTable
from actbench.scheme.base import LINEAR_LAYERS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Diagnosed, Facet, Figures
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import Part, TrainingSetup

_IDLE = (
    "a sketch of so many rows is no smaller than the input, or the weights are frozen; take a larger batch, or a "
    "smaller ratio, dim or min"
)


def _sketch_variance(setup: TrainingSetup, batch: Batch, seed: int) -> Figures | None:
    from actbench.methods.randomized.variance import sketch_variance  # a conversion needs no variance

    return sketch_variance(setup, batch, seed)


class Randomized(Scheme):
    """Linear layers save a random sketch of their input.

    Paper: Bershatsky et al., "Memory-Efficient Backpropagation through Large Linear Layers", arXiv 2201.13195.
    Kept for backward: S X, (k, d_in) in place of the (rows, d_in) input, and the seed of S, 8 bytes, or for ``norm``
    and ``wta`` the numbers of the k drawn rows, 4 k bytes; layers that read one input share one sketch. Forward, input
    and bias gradients are exact; the weight gradient is unbiased. Sketches beyond the paper: sampled rows, the
    subsampled randomized Hadamard transform (arXiv 1011.1595) and WTA-CRS (arXiv 2305.15265).
    Not reproduced: WTA-CRS also weighs a row by the gradient of an earlier step; here only the row's length counts.

    Attributes:
        ratio: Rows of the sketch per row of the input (all leading dimensions count as rows), rounded down.
        sketch: Kind of S: independent entries, rows of a transform, or sampled rows.
        dim: Rows of the sketch, in place of a ratio.
        min: The fewest rows that a ratio may give.
        max: The most rows.
    """

    name: ClassVar[str] = "randomized"
    positional: ClassVar[str | None] = "ratio"
    card: ClassVar[Card] = Card(
        summary="linear layers save a random sketch of their input; only the weight gradient is estimated",
        paper="Bershatsky et al. 2022, arXiv 2201.13195",
        published=(
            Published(
                quantity="peak_saving",
                value=0.186,
                setting="randomized:0.2, RoBERTa-base, MRPC, batch 128, GPU not named",
                source="README of github.com/skolai/fewbit",
            ),
        ),
        variants=(":0.5", ":0.2"),
        leading=(),
        compiles=True,
        shorthands=(Shorthand("--linear", "{}", "SPEC", "Scheme for linear layers, such as randomized:0.2."),),
    )
    claims: ClassVar[tuple[str, ...]] = (LINEAR_LAYERS,)
    gradient: ClassVar[Gradient] = "unbiased"

    ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.2
    sketch: Kind = "rademacher"
    dim: PositiveInt | None = None
    min: PositiveInt | None = None
    max: PositiveInt | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min={self.min} is more than max={self.max}")
        return self

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace every ``nn.Linear`` and every ``Conv1D`` of transformers; see :func:`with_sketches`."""
        sketching = Sketching(self.sketch, self.ratio, self.dim, self.min, self.max)
        becomes = f"{self.sketch} sketch, {f'ratio {self.ratio:g}' if self.dim is None else f'{self.dim} rows'}"
        return with_sketches(self, setup, sketching, becomes)

    @property
    def facets(self) -> Iterable[Facet]:
        """The variance of the sketched weights' gradient."""
        return (Diagnosed((_sketch_variance,)),)


def with_sketches(scheme: Scheme, setup: TrainingSetup, sketching: Sketching, becomes: str) -> TrainingSetup:
    """Return a setup whose linear layers, and ``Conv1D`` of transformers, save a sketch of their input.

    Raises:
        NothingToConvertError: The model has no such layer.
        ConversionError: It is converted already.
    """
    if any(isinstance(module, Sketched) for module in setup.module.modules()):
        raise ConversionError(f"{scheme.name}: the model holds sketched layers already; convert the original model")
    sharing: SharingTable[Sketch] = SharingTable()
    sites: list[Site] = []
    unreached: list[Unreached] = []

    def rule(module: nn.Module, path: str) -> nn.Module | None:
        reason = _why_not(module)
        if reason is not None:
            unreached.append(Unreached(path=path, kind=type(module).__name__, reason=reason))
            return None
        new = sketched(module, sketching, sharing)
        if new is not None:
            was = "nn.Linear" if type(module) is nn.Linear else type(module).__name__
            sites.append(Site(path=path, was=was, becomes=becomes))
        return new

    model = swap(setup.module, rule)
    if not sites:
        raise NothingToConvertError(
            f"{scheme.name}: {type(model).__name__} has no nn.Linear and no Conv1D of transformers to convert; it "
            f"holds {census(model)}"
        )
    return setup.changed(model, tuple(sites), tuple(unreached), by=Part(scheme.spec, idle=_IDLE))


def _why_not(module: nn.Module) -> str | None:
    """Return why a layer that looks linear is left alone, or None."""
    if type(module) is NonDynamicallyQuantizableLinear:
        return "MultiheadAttention reads its weight without calling it"
    if isinstance(module, nn.MultiheadAttention):
        return "its input projection is a parameter and no layer"
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        return parametrized(module) or "a subclass of nn.Linear, whose forward may be another"
    if type(module) is nn.Linear and "forward" in vars(module):
        return "another forward is bound on this layer"
    return None
