from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import nn

from actbench.errors import NothingToConvertError
from actbench.methods.formats.optim.optimizers import adam_groups, is_decoupled
from actbench.methods.optimizers.adam import MatrixAdam
from actbench.methods.optimizers.adammini import AdamMini as MiniOptimizer, blocks_of
from actbench.methods.optimizers.inplaceofadam import InPlaceOfAdam
from actbench.methods.optimizers.muon import Muon8bit as MuonOptimizer
from actbench.methods.optimizers.projected import (
    Apollo as ApolloOptimizer,
    Fira as FiraOptimizer,
    GaLore as GaLoreOptimizer,
)
from actbench.methods.optimizers.schedulefree import ScheduleFreeAdamW
from actbench.model.provenance import Published
from actbench.scheme.card import Card
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Facet
from actbench.workload.optimizers import hidden_matrices


class _LessState(InPlaceOfAdam):
    """An optimizer with less state, which it keeps of whole matrices."""

    @property
    def facets(self) -> Iterable[Facet]:
        """Its state is of whole parameters."""
        return (
            Limits(unsharded=f"{self.name}: it needs whole matrices, and a DTensor is a shard; take smaq,on=state"),
        )


class _Projected(_LessState):
    """Keeps moments of projected gradients."""

    rank: PositiveInt = 16
    gap: PositiveInt = 200
    scale: Annotated[float, Field(gt=0)] = 0.25

    @property
    def _becomes(self) -> str:
        return f"of gradients projected to {self.rank} dimensions"

    def _options(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"rank": self.rank, "gap": self.gap, "scale": self.scale, "decoupled": is_decoupled(optimizer)}

    def _check(self, module: nn.Module) -> None:
        if not self._matrices(module):
            raise NothingToConvertError(
                f"{self.spec}: {type(module).__name__} has no trained matrix between its first and last layer with "
                f"more than {self.rank} rows and columns"
            )

    def _matrices(self, module: nn.Module) -> list[nn.Parameter]:
        return [each for each in hidden_matrices(module) if min(each.shape) > self.rank]


class GaLore(_Projected):
    """Adam in the space of the first singular vectors of each gradient: fewer numbers of state, exact gradients.

    Paper: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", arXiv 2403.03507,
    algorithm 2 (:class:`actbench.optim.GaLore`).
    Kept from step to step for a hidden matrix of (m, n), m <= n: two moments, ``2 r n`` numbers, and the projection,
    ``r m``, in the type of the gradient. Embeddings, the head, norms, biases and matrices that are no larger than the
    rank have Adam's two moments. Every ``gap`` steps a singular value decomposition takes seconds on large matrices.
    Not reproduced: 8-bit moments; updates within the backward pass (add ``release``).

    Attributes:
        rank: r.
        gap: After how many steps the singular vectors are computed again.
        scale: A factor of the updates of projected matrices, the paper's alpha.
    """

    name: ClassVar[str] = "galore"
    positional: ClassVar[str | None] = "rank"
    card: ClassVar[Card] = Card(
        summary="Adam on gradients projected to their first singular vectors; gradients are exact",
        paper="Zhao et al. 2024, arXiv 2403.03507",
        published=(
            Published(
                quantity="peak_saving",
                value=0.633,
                setting="LLaMA 7B pre-training, rank 1024, 8-bit GaLore with per-layer updates against BF16 Adam",
                source="arXiv 2403.03507, abstract",
            ),
        ),
        rank=50,
        variants=(),  # other updates than Adam's
    )

    def _made(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> MatrixAdam:
        return GaLoreOptimizer(adam_groups(optimizer), self._matrices(module), **self._options(optimizer))


class Fira(_Projected):
    """GaLore whose updates also have what the projection leaves out, scaled as Adam scales the rest.

    Paper: Chen et al., "Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank Constraint?", arXiv 2410.01623,
    with its norm-growth limiter (:class:`actbench.optim.Fira`).
    Kept from step to step: what ``galore`` keeps, and a number for each hidden matrix. ``scale`` is a factor of both
    parts of the update.

    Attributes:
        rank: The dimensions that gradients are projected to.
        gap: After how many steps the singular vectors are computed again.
        scale: A factor of the updates of projected matrices.
    """

    name: ClassVar[str] = "fira"
    positional: ClassVar[str | None] = "rank"
    card: ClassVar[Card] = Card(
        summary="galore with full-rank updates: the rest of the gradient is scaled as its projected part is",
        paper="Chen et al. 2024, arXiv 2410.01623",
        rank=50,
        variants=(),  # other updates than Adam's
    )

    def _made(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> MatrixAdam:
        return FiraOptimizer(adam_groups(optimizer), self._matrices(module), **self._options(optimizer))


class Apollo(_Projected):
    """Gradients scaled, channel by channel, as Adam would scale a random projection of them.

    Paper: Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", arXiv 2412.05270, algorithm 1
    (:class:`actbench.optim.Apollo`).
    Kept from step to step for a hidden matrix of (m, n), m <= n: two moments, ``2 r n`` numbers, and a norm. The random
    projection is drawn again at each step, from a seed. All else is Adam's, as in ``galore``.
    APOLLO-Mini is ``apollo:1,scaling=tensor,scale=11.3``: one factor for each matrix.

    Attributes:
        rank: r.
        gap: After how many steps another projection is drawn.
        scale: A factor of the updates of projected matrices, the paper's alpha.
        scaling: Whether each channel of the longer side has a factor, or the whole tensor one.
    """

    name: ClassVar[str] = "apollo"
    positional: ClassVar[str | None] = "rank"
    card: ClassVar[Card] = Card(
        summary="gradients scaled as Adam would scale a random projection of them; state near SGD's",
        paper="Zhu et al. 2024, arXiv 2412.05270",
        rank=50,
        variants=(),  # other updates than Adam's
    )

    scale: Annotated[float, Field(gt=0)] = 1.0
    scaling: Literal["channel", "tensor"] = "channel"

    def _made(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> MatrixAdam:
        options = {**self._options(optimizer), "scaling": self.scaling}
        return ApolloOptimizer(adam_groups(optimizer), self._matrices(module), **options)


class AdamMini(_LessState):
    """Adam with one second moment for each block of a parameter: half of Adam's state.

    Paper: Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More", arXiv 2406.16793, algorithm 1
    and its partition for transformers
    (:class:`actbench.optim.AdamMini`).
    Kept from step to step: the first moment, a number for each parameter, and a second moment for each head of queries
    and keys, each output of other matrices, each row of embeddings, and each vector; in the type of the gradient.
    Not reproduced: heads of a fused projection, such as GPT-2's, which have a block for each output.
    """

    name: ClassVar[str] = "adam_mini"
    card: ClassVar[Card] = Card(
        summary="Adam with one second moment for each head, output or row; gradients are exact",
        paper="Zhang et al. 2024, arXiv 2406.16793",
        rank=50,
        variants=(),  # other updates than Adam's
    )

    @property
    def _becomes(self) -> str:
        return "a first moment, and a second one for each block"

    def _made(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> MatrixAdam:
        return MiniOptimizer(adam_groups(optimizer), blocks_of(module), decoupled=is_decoupled(optimizer))


class Muon8bit(_LessState):
    """Muon, with a momentum of 8 bits, for hidden matrices; Adam for the rest.

    Papers: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al., "Muon is Scalable
    for LLM Training", arXiv 2502.16982 (:class:`actbench.optim.Muon8bit`, over ``torch.optim.Muon``).
    Kept from step to step for a hidden matrix of n elements: ``n`` bytes of codes and 4 for each 256 of them. All else
    has Adam's two moments. ``--optimizer muon`` is torch's, with the momentum whole.
    """

    name: ClassVar[str] = "muon8bit"
    card: ClassVar[Card] = Card(
        summary="Muon with a momentum of 8 bits for hidden matrices, Adam for the rest; gradients are exact",
        paper="Liu et al. 2025, arXiv 2502.16982",
        rank=50,
        variants=(),  # other updates than Adam's
    )

    @property
    def _becomes(self) -> str:
        return "a momentum of 8 bits for hidden matrices"

    def _check(self, module: nn.Module) -> None:
        if not hidden_matrices(module):
            raise NothingToConvertError(
                f"muon8bit: {type(module).__name__} has no matrix to train between its first and last layer"
            )

    def _made(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> MatrixAdam:
        decoupled = is_decoupled(optimizer)
        return MuonOptimizer(adam_groups(optimizer), hidden_matrices(module), decoupled=decoupled)


class ScheduleFree(InPlaceOfAdam):
    """AdamW that averages its weights instead of using a schedule of the learning rate.

    Paper: Defazio et al., "The Road Less Scheduled", arXiv 2405.15682, algorithm 1
    (:class:`actbench.optim.ScheduleFreeAdamW`).
    Kept from step to step: the weights z, which each step updates, and the second moment, in the type of the weights,
    as many bytes as Adam's two moments. The averaged weights x take no memory: they follow from z and the weights of
    the model, y. ``actbench train`` evaluates x. The learning rate need not decay; the paper has a warmup
    (``warmup_steps``).
    """

    name: ClassVar[str] = "schedule_free"
    card: ClassVar[Card] = Card(
        summary="schedule-free AdamW: averaged weights in place of a schedule; gradients are exact",
        paper="Defazio et al. 2024, arXiv 2405.15682",
        rank=50,
        variants=(),  # other updates than Adam's
    )

    @property
    def _becomes(self) -> str:
        return "stepped weights, and a second moment"

    def _made(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFreeAdamW(adam_groups(optimizer), decoupled=is_decoupled(optimizer))
