"""What stands around the forward of a model whose layers keep their inputs through one keeper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from actbench.nn.compressed.layer import Compressed
from actbench.nn.hooked import running
from actbench.nn.hooked.hooks import OwnHooks
from actbench.nn.keeping import Keeper, Place
from actbench.nn.keeping.allocation import Allocation
from actbench.nn.wrapped import Inner, WrappedForward, Wrapper, given_by_others

COMPRESSED = ("actnn", "it knows tensors by their memory, and a compiled graph has none")
"""What cannot be compiled, and why."""


class Keeping(Wrapper):
    """What the passes through a model whose layers keep their inputs need around them.

    Args:
        keeper: That of the layers.
        allocation: What shares the bits out among them; None leaves them as they are.
        empty_cache_threshold: Share of the memory that torch has reserved on a CUDA device below which what is not in
            use is given back before each pass; None for never.
        hooked: Whether parts of the model have hooks of their own. Blocks around these are then recomputed in the form
            in which the hooks pack what the second run saves, and nothing is kept of the first.
    """

    uncompilable = COMPRESSED

    def __init__(
        self, keeper: Keeper, allocation: Allocation | None, empty_cache_threshold: float | None, hooked: bool
    ) -> None:
        self.keeper, self.allocation, self.empty_cache_threshold = keeper, allocation, empty_cache_threshold
        self.hooked = hooked
        self._first_entry: str | None = None

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Tell the keeper which tensors are somebody else's, and the allocation that a step begins; run a pass."""
        self.keeper.leave(given_by_others(entry, (args, kwargs)))
        if self.allocation is not None and module.training and self._begins_step(entry):
            self.allocation.begin()
        if self.empty_cache_threshold is not None:
            _give_back(self.empty_cache_threshold)
        with self._around():
            return inner(module, *args, **kwargs)

    def _begins_step(self, entry: str) -> bool:
        """Return whether a pass is the first of its step: of several parts of a model that one of them is."""
        if self._first_entry is None and entry:
            self._first_entry = entry
        return entry in ("", self._first_entry)

    @contextmanager
    def _around(self) -> Iterator[None]:
        token = running.begin(OwnHooks(self.keeper)) if self.hooked else None
        try:
            with self.running():
                yield
        finally:
            if token is not None:
                running.end(token)
            self.keeper.transfer.settle()


class CompressedForward(WrappedForward):
    """The forward of a model whose layers keep their inputs through one keeper.

    Args:
        module: The model.
        keeper: See :class:`Keeping` for this and the others.
        allocation: What shares the bits out, or None.
        empty_cache_threshold: When memory is given back, or None.
        hooked: Whether parts of the model have hooks of their own.
    """

    wrapper: Keeping

    def __init__(
        self,
        module: nn.Module,
        keeper: Keeper,
        allocation: Allocation | None = None,
        empty_cache_threshold: float | None = None,
        hooked: bool = False,
    ) -> None:
        super().__init__(module)
        self.wrapper = Keeping(keeper, allocation, empty_cache_threshold, hooked)

    @property
    def keeper(self) -> Keeper:
        """That of the layers."""
        return self.wrapper.keeper

    @property
    def allocation(self) -> Allocation | None:
        """What shares the bits out among the layers."""
        return self.wrapper.allocation

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

    def _twin(self, module: nn.Module) -> Self:
        own = self.wrapper
        return type(self)(module, own.keeper, own.allocation, own.empty_cache_threshold, own.hooked)


def _give_back(threshold: float) -> None:
    if torch.cuda.memory_allocated() < threshold * torch.cuda.memory_reserved():  # both 0 without a device
        torch.cuda.empty_cache()
