"""What stands around the forward of a model whose layers keep their inputs through one keeper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from actbench.nn.compressed.layer import Compressed
from actbench.nn.eager import refuse_compiling
from actbench.nn.hooked import running
from actbench.nn.hooked.hooks import OwnHooks
from actbench.nn.keeping import Keeper, Place
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
        hooked: Whether parts of the model have hooks of their own. Blocks around these are then recomputed in the form
            in which the hooks pack what the second run saves, and nothing is kept of the first.
    """

    def __init__(
        self,
        module: nn.Module,
        keeper: Keeper,
        allocation: Allocation | None = None,
        empty_cache_threshold: float | None = None,
        hooked: bool = False,
    ) -> None:
        super().__init__(module)
        self.hooked = hooked
        self.keeper, self.allocation, self.empty_cache_threshold = keeper, allocation, empty_cache_threshold

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            ConversionError: In training under ``torch.compile``, which knows no memory of tensors.
        """
        module = self.module
        if torch.is_grad_enabled():
            refuse_compiling("actnn", "it knows tensors by their memory, and a compiled graph has none")
            self.keeper.leave(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if self.allocation is not None and module.training:
                self.allocation.begin()
            if self.empty_cache_threshold is not None:
                _give_back(self.empty_cache_threshold)
        with self._around():
            return self.inner(module, *args, **kwargs)

    @contextmanager
    def _around(self) -> Iterator[None]:
        token = running.begin(OwnHooks(self.keeper)) if self.hooked and torch.is_grad_enabled() else None
        try:
            yield
        finally:
            if token is not None:
                running.end(token)
            self.keeper.transfer.settle()

    def adapted(self) -> Any:
        """Return what the places and the allocation know; see :class:`actbench.nn.adapted.Adapted`."""
        places = {path: place.adapted() for path, place in self._places().items()}
        return {"places": places, "allocation": self.allocation and self.allocation.adapted()}

    def adapt(self, state: Any) -> None:
        """Go on from what :meth:`adapted` returned.

        Raises:
            KeyError: Of another model.
        """
        places, device = self._places(), next(self.module.parameters()).device
        for path, place in places.items():
            place.adapt(tree_map_only(Tensor, lambda tensor: tensor.to(device), state["places"][path]), places)
        if self.allocation is not None:
            self.allocation.adapt(state["allocation"], places)

    def _places(self) -> dict[str, Place]:
        layers = [layer for layer in self.module.modules() if isinstance(layer, Compressed)]
        return {layer.place.path: layer.place for layer in layers}

    def _on(self, module: nn.Module) -> Self:
        twin = type(self)(module, self.keeper, self.allocation, self.empty_cache_threshold, self.hooked)
        twin._before = self._before._on(module) if isinstance(self._before, ReboundForward) else self._before
        return twin


def _give_back(threshold: float) -> None:
    if torch.cuda.memory_allocated() < threshold * torch.cuda.memory_reserved():  # both 0 without a device
        torch.cuda.empty_cache()
