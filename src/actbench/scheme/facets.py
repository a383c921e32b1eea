"""What only some schemes have: values that a scheme lists in ``facets``, and that others ask it for by their type.

``scheme.facet(Spread)`` is how a scheme spreads a model over processes, or None for one that does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, Self

from torch import nn

from actbench.model.measured import Diagnostic
from actbench.model.records import HalfType
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup


class Facet(Protocol):
    """The base of facets."""

    @classmethod
    def together(cls, facets: Sequence[Self]) -> Self | None:
        """Return the facet of a composition, from those of its parts that have one; None if they disagree."""
        first, *others = facets
        return first if all(other == first for other in others) else None


@dataclass(frozen=True)
class Spread(Facet):
    """Several processes train one model.

    Attributes:
        axes: Number of processes along each axis of the setup's mesh.
        of_layers: Whether each process has parts of layers, whose gradients are compared with those of parts alone.
        variants: What may stand behind the number of processes in the specification of a scheme, the plainest first.
    """

    axes: Mapping[str, int]
    of_layers: bool = False
    variants: tuple[str, ...] = ("",)

    @classmethod
    def together(cls, facets: Sequence[Self]) -> Self:
        """Return the axes of all."""
        axes = {axis: size for each in facets for axis, size in each.axes.items()}
        return cls(axes, any(each.of_layers for each in facets))


@dataclass(frozen=True)
class Periodic(Facet):
    """Equal blocks in a row are not changed in the same way; the pattern repeats after ``blocks`` blocks."""

    blocks: int

    @classmethod
    def together(cls, facets: Sequence[Self]) -> Self:
        """Return after how many blocks all patterns begin again."""
        return cls(math.lcm(*(each.blocks for each in facets)))


@dataclass(frozen=True)
class InParts(Facet):
    """A step cuts its batch into ``parts`` micro-batches."""

    parts: int


@dataclass(frozen=True)
class Adaptive(Facet):
    """The scheme changes while the model trains.

    Attributes:
        by_first_step: Whether a step changes what later steps save; gradients are then judged after a first step.
        by_gradients: Whether the bits of packed tensors follow from gradients that this process has seen.
        as_after_a_step: Returns a context in which the weights of a changed setup are as after a step.
        fixed: A specification with fixed bits, if ``by_gradients``.
    """

    by_first_step: bool = False
    by_gradients: bool = False
    as_after_a_step: Callable[[TrainingSetup], AbstractContextManager[None]] = lambda setup: nullcontext()
    fixed: str = ""

    @classmethod
    def together(cls, facets: Sequence[Self]) -> Self:
        """Return all changes."""

        @contextmanager
        def as_after_a_step(setup: TrainingSetup) -> Iterator[None]:
            with ExitStack() as stack:
                for each in facets:
                    stack.enter_context(each.as_after_a_step(setup))
                yield

        by_first_step, by_gradients = (
            any(each.by_first_step for each in facets),
            any(each.by_gradients for each in facets),
        )
        fixed = next((each.fixed for each in facets if each.fixed), "")
        return cls(by_first_step, by_gradients, as_after_a_step, fixed)


class Figures(Protocol):
    """Numbers about a gradient."""

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Return the numbers, each with the name and title of its column."""


@dataclass(frozen=True)
class Diagnosed(Facet):
    """Further numbers about the gradients of a changed setup.

    Attributes:
        by: Functions of the setup, with a loss; a batch on the model's device, on which a few passes may run; and the
            seed of the random numbers in these passes. They return None if there is nothing to tell.
    """

    by: tuple[Callable[[TrainingSetup, Batch, int], Figures | None], ...] = ()

    def of(self, setup: TrainingSetup, batch: Batch, seed: int) -> tuple[Diagnostic, ...]:
        """Return the numbers, one of each name."""
        figures = [read(setup, batch, seed) for read in self.by]
        found = [diagnostic for each in figures if each is not None for diagnostic in each.diagnostics()]
        return tuple({each.name: each for each in found}.values())

    @classmethod
    def together(cls, facets: Sequence[Self]) -> Self:
        """Return the numbers of all."""
        return cls(tuple(read for each in facets for read in each.by))


@dataclass(frozen=True)
class LowPrecision(Facet):
    """Something computes in a half type.

    Attributes:
        dtype: The type.
        of_weights: Whether the weights have this type; else operators cast what they read.
        scales_loss: Whether gradients vanish unless the loss is scaled.
    """

    dtype: HalfType
    of_weights: bool = False
    scales_loss: bool = False


@dataclass(frozen=True)
class LossyForward(Facet):
    """The forward pass differs in some bits from that of the exact model."""


@dataclass(frozen=True)
class Needs(Facet):
    """The scheme changes only models that hold certain modules.

    Attributes:
        check: Raises the ConversionError with which the scheme refuses a model, and changes nothing.
    """

    check: Callable[[nn.Module], object]


@dataclass(frozen=True)
class Packs(Facet):
    """Each packed element takes a fixed number of ``bits``."""

    bits: float


@dataclass(frozen=True)
class OwnOptimizer(Facet):
    """The optimizer of the step is another one, or is wrapped.

    Attributes:
        code: Python that makes it: a wrapper with ``{}`` for the optimizer, or a replacement with ``{kind}`` for Adam
            or AdamW and ``{rate}`` for the learning rate, of the parameters ``trained``.
        of_model: The specification of what the scheme changes beside the optimizer; empty for nothing.
        rounds_by_chance: Whether weights of bfloat16 are rounded up or down by chance, as the scheme's
            ``bf16_stochastic_round`` says; None if it has no such key.
    """

    code: str
    of_model: str = ""
    rounds_by_chance: bool | None = None


@dataclass(frozen=True)
class RunsFiles(Facet):
    """User's files run when the scheme is applied; ``paths`` are ``file.py:name``."""

    paths: tuple[str, ...]

    @classmethod
    def together(cls, facets: Sequence[Self]) -> Self:
        """Return the files of all."""
        return cls(tuple(path for each in facets for path in each.paths))
