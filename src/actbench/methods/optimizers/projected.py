"""Optimizers with moments of projected gradients, of few dimensions: GaLore, Fira and APOLLO."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor

from actbench.methods.optimizers.adam import Group, MatrixAdam, State, direction
from actbench.ops.simulation import untimed

GROWTH = 1.01
"""By how much the norm of a scaled gradient may grow from step to step (Fira's limiter)."""


class ProjectedAdam(MatrixAdam):
    """Keeps the moments of R, a projected gradient, in place of those of G, (m, n).

    The shorter side is projected: R = P^T G, (r, n), where m <= n, and R = G P, (m, r), elsewhere.

    Args:
        params: As in :class:`~actbench.methods.optimizers.adam.MatrixAdam`.
        matrices: Both sides are longer than the rank.
        rank: r.
        gap: After how many steps another projection is taken.
        scale: A factor of the update.
        options: As in :class:`~actbench.methods.optimizers.adam.MatrixAdam`, ``decoupled`` too.
    """

    def __init__(
        self,
        params: Any,
        matrices: Collection[Tensor],
        *,
        rank: int,
        gap: int = 200,
        scale: float = 0.25,
        **options: Any,
    ) -> None:
        super().__init__(params, matrices, **options)
        self.rank, self.gap, self.scale = rank, gap, scale


class GaLore(ProjectedAdam):
    """Steps in the space of the gradient's first singular vectors (Zhao et al., arXiv 2403.03507, algorithm 2).

    The update is ``scale * P N`` with N, Adam's direction for R. P is kept: ``r min(m, n)`` numbers beside the
    ``2 r max(m, n)`` of the moments.
    """

    def __init__(self, params: Any, matrices: Collection[Tensor], **options: Any) -> None:
        super().__init__(params, matrices, **options)
        self._due: set[Tensor] = set()

    def renew(self) -> None:
        """Let the next step of each matrix take another projection."""
        self._due = set(self.matrices)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Group, state: State) -> Tensor:
        low = self._projected(parameter, gradient, state)
        return _back(direction(low, group, state), state["projection"], gradient).mul_(self.scale)

    def _projected(self, parameter: Tensor, gradient: Tensor, state: State) -> Tensor:
        if (state["step"] - 1) % self.gap == 0 or parameter in self._due:
            self._due.discard(parameter)
            with untimed():
                state["projection"] = _singular_vectors(gradient, self.rank)
        return _low(gradient, state["projection"])


class Fira(GaLore):
    """GaLore, and the rest of the gradient scaled as Adam scales its low part (Chen et al., arXiv 2410.01623).

    The update is ``scale * (P N + L(phi (G - P R)))``, with phi = |N| / |R| for each of the longer side, and L, which
    holds down the norm where it grows by more than a hundredth from one step to the next. It keeps that norm, a number,
    beside what GaLore keeps.
    """

    def _update(self, parameter: Tensor, gradient: Tensor, group: Group, state: State) -> Tensor:
        low = self._projected(parameter, gradient, state)
        found = direction(low, group, state)
        rest = gradient - _back(low, state["projection"], gradient)
        rest *= _ratio(found, low, 0 if _is_wide(gradient) else 1)
        return _back(found, state["projection"], gradient).add_(_limited(rest, state)).mul_(self.scale)


class Apollo(ProjectedAdam):
    """Scales the gradient itself as Adam would scale a random projection of it (Zhu et al., arXiv 2412.05270, alg. 1).

    The update is ``scale * L(s G)`` with s = |N| / |R| for each of the longer side, or one s of all (APOLLO-Mini, of
    rank 1), and L as in Fira. P has normal numbers of variance 1/r, which a seed makes again at each step; so
    ``2 r max(m, n)`` numbers of moments and a norm are all that is kept.

    Args:
        params: As in :class:`ProjectedAdam`, as are the other arguments.
        scaling: ``channel`` or ``tensor``.
    """

    def __init__(
        self,
        params: Any,
        matrices: Collection[Tensor],
        *,
        scale: float = 1.0,
        scaling: Literal["channel", "tensor"] = "channel",
        **options: Any,
    ) -> None:
        super().__init__(params, matrices, scale=scale, **options)
        self.scaling = scaling

    def _update(self, parameter: Tensor, gradient: Tensor, group: Group, state: State) -> Tensor:
        seed = self.matrices[parameter] * 1_000_003 + (state["step"] - 1) // self.gap
        low = _low(gradient, _normal(gradient, self.rank, seed))
        found = direction(low, group, state)
        dim = None if self.scaling == "tensor" else 0 if _is_wide(gradient) else 1
        return _limited(gradient * _ratio(found, low, dim), state).mul_(self.scale)


def _is_wide(gradient: Tensor) -> bool:
    return gradient.shape[0] <= gradient.shape[1]


def _low(gradient: Tensor, projection: Tensor) -> Tensor:
    return projection.t() @ gradient if _is_wide(gradient) else gradient @ projection


def _back(low: Tensor, projection: Tensor, gradient: Tensor) -> Tensor:
    return projection @ low if _is_wide(gradient) else low @ projection.t()


def _singular_vectors(gradient: Tensor, rank: int) -> Tensor:
    """Return the first singular vectors of the shorter side, (min(m, n), rank), in the gradient's type."""
    left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
    found: Tensor = left[:, :rank] if _is_wide(gradient) else right[:rank].t()
    return found.to(gradient.dtype, memory_format=torch.contiguous_format, copy=True)


def _normal(gradient: Tensor, rank: int, seed: int) -> Tensor:
    generator = torch.Generator(gradient.device).manual_seed(seed)
    shape = (min(gradient.shape), rank)
    drawn = torch.randn(shape, generator=generator, dtype=gradient.dtype, device=gradient.device)
    drawn *= 1 / math.sqrt(rank)
    return drawn


def _ratio(found: Tensor, low: Tensor, dim: int | None) -> Tensor:
    """Return |found| / |low| along a dimension that stays; 0 where there is no gradient."""
    over: Tensor = torch.linalg.vector_norm(found, dim=dim, keepdim=True)
    under: Tensor = torch.linalg.vector_norm(low, dim=dim, keepdim=True)
    ratio = torch.where(under > 0, over / under, 0)
    return ratio.clamp_(max=torch.finfo(ratio.dtype).max)


def _limited(scaled: Tensor, state: State) -> Tensor:
    """Scale a tensor down, in place, where its norm has grown by more than :data:`GROWTH`; keep the norm.

    A norm of 0 is no limit, and is not kept in place of another.
    """
    norm = torch.linalg.vector_norm(scaled)
    if "norm" in state:
        before = state["norm"]
        limited = torch.where(before > 0, torch.minimum(norm, before * GROWTH), norm)
        scaled *= torch.where(norm > limited, limited / norm, 1)
        norm = torch.where(norm > 0, limited, before)
    state["norm"] = norm
    return scaled
