"""What stands around the forward of a model whose layers keep their inputs through one keeper."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from actbench.nn.eager import refuse_compiling
from actbench.nn.keeping import Keeper
from actbench.nn.keeping.allocation import Allocation
from actbench.nn.rebound import ReboundForward


class CompressedForward(ReboundForward):
    """A forward that tells the keeper which tensors are somebody else's, and the allocation that a step begins.

    Args:
        module: The model.
        keeper: That of its layers.
        allocation: What shares the bits out among them; None leaves them as they are.
        empty_cache_threshold: Share of the memory that torch has reserved on a CUDA device below which what is not in
            use is given back before each pass; None for never.
    """

    def __init__(
        self,
        module: nn.Module,
        keeper: Keeper,
        allocation: Allocation | None = None,
        empty_cache_threshold: float | None = None,
    ) -> None:
        super().__init__(module)
        self.keeper, self.allocation, self.empty_cache_threshold = keeper, allocation, empty_cache_threshold

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            ConversionError: In training under ``torch.compile``, which does not know tensors by their memory.
        """
        module = self.module
        if torch.is_grad_enabled():
            refuse_compiling("actnn", "it knows the tensors that it has kept by their memory, of which a graph has none")
            self.keeper.leave(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if self.allocation is not None and module.training:
                self.allocation.begin()
            if self.empty_cache_threshold is not None:
                _give_back(self.empty_cache_threshold)
        try:
            return self.inner(module, *args, **kwargs)
        finally:
            self.keeper.transfer.settle()

    def _on(self, module: nn.Module) -> Self:
        twin = type(self)(module, self.keeper, self.allocation, self.empty_cache_threshold)
        twin._before = self._before._on(module) if isinstance(self._before, ReboundForward) else self._before
        return twin


def _give_back(threshold: float) -> None:
    if torch.cuda.memory_allocated() < threshold * torch.cuda.memory_reserved():  # both 0 without a device
        torch.cuda.empty_cache()
