"""Adam with one second moment for a block of numbers (Zhang et al., arXiv 2406.16793)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actbench.methods.optimizers.adam import Group, MatrixAdam, State, adam_ratio
from actbench.packing.replacement import is_conv1d

_QUERIES = ("query", "q_proj", "q_lin", "wq")
_KEYS = ("key", "k_proj", "k_lin", "wk")


@dataclass(frozen=True)
class Blocks:
    """How a parameter is cut: seen as a matrix of ``shape``, each column (``dim`` 0) or row (``dim`` 1) is a block."""

    shape: tuple[int, int]
    dim: int

    @property
    def count(self) -> int:
        """Number of blocks, and so of second moments."""
        return self.shape[1 - self.dim]


class AdamMini(MatrixAdam):
    """Keeps the first moment whole, and of the second one mean for each block (algorithm 1 of the paper).

    ``m = b1 m + (1 - b1) g`` and ``v = b2 v + (1 - b2) mean(g * g)`` over the block; the rest is as in Adam.

    Args:
        params: As in :class:`~actbench.methods.optimizers.adam.MatrixAdam`, as are the options.
        blocks: How each parameter is cut; the others are Adam's. :func:`blocks_of` gives those of a model.
        options: ``decoupled``, ``lr`` and so on.
    """

    def __init__(self, params: Any, blocks: Mapping[Tensor, Blocks], **options: Any) -> None:
        super().__init__(params, list(blocks), **options)
        self._blocks = dict(blocks)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Group, state: State) -> Tensor:
        beta1, beta2 = group["betas"]
        blocks = self._blocks[parameter]
        matrix = gradient.reshape(blocks.shape)
        means = matrix.square().mean(blocks.dim, keepdim=True)
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(means)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(means, 1 - beta2)
        first = state["exp_avg"].reshape(blocks.shape)
        return adam_ratio(first, state["exp_avg_sq"], group, state["step"]).view_as(parameter)


def blocks_of(model: nn.Module) -> dict[Tensor, Blocks]:
    """Return the blocks of all trained parameters, by the paper's partition for transformers.

    Queries and keys have a block for each head, if the model's ``config`` says how many there are and the projections
    are called as usual; other matrices, embeddings and kernels one for each output or row; vectors are one block.
    """
    found: dict[Tensor, Blocks] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter not in found:
                found[parameter] = _blocks(parameter, module, _heads(model, path))
    return found


def _blocks(parameter: Tensor, module: nn.Module, heads: int) -> Blocks:
    if parameter.dim() < 2:
        return Blocks((1, parameter.numel()), 1)
    if is_conv1d(type(module)):
        return Blocks((parameter.shape[0], parameter.shape[1]), 0)
    rows = heads if heads and parameter.shape[0] % heads == 0 else parameter.shape[0]
    return Blocks((rows, math.prod(parameter.shape) // max(rows, 1)), 1)


def _heads(model: nn.Module, path: str) -> int:
    """Return into how many heads a layer projects queries or keys; 0 for another layer, or if unknown.

    The last name counts alone: an adapter inside of a projection, ``q_proj.lora_A.default``, has no heads.
    """
    config: Any = getattr(model, "config", None)
    name = path.rpartition(".")[2]
    queries: int = getattr(config, "num_attention_heads", None) or 0
    if name in _KEYS:
        return getattr(config, "num_key_value_heads", None) or queries
    return queries if name in _QUERIES else 0
