"""Saved-tensor hooks that pack what autograd saves while a model's forward runs, and unpack it in backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from actbench import savedtensors
from actbench.nn.hooked.occurrences import Occurrences
from actbench.nn.hooked.statistics import keeping_statistics, statistic
from actbench.nn.intercepted import Intercepted, Rules
from actbench.nn.keeping import Keeper, Kept, Place
from actbench.nn.offloaded import StaysHere, own_tensors
from actbench.ops import groupquant
from actbench.ops.seeds import fresh_seed

PROBE_BITS = 2
"""Width at which a tensor is packed once more to see what its error does to the gradient."""

_active: ContextVar[Hooks | None] = ContextVar("_active", default=None)


@dataclass(frozen=True, eq=False)
class Held:
    """A saved tensor as the keeper keeps it."""

    kept: Kept
    place: Place


class Hooks:
    """What packs a model's saved tensors; one for each model.

    Args:
        keeper: Who keeps them.
        bits: Bits an element is given at first.
        rules: Functions of torch that are replaced while the model runs, by ones that keep less.
        whole_model: Whether the module is the model: what it is called with is then somebody else's, and is left.

    Attributes:
        places: The saved tensors that were seen, with the bits they are given.
        disturbed: Places whose tensors are packed a second time, coarsely, when they are unpacked.
        probing: Whether the pass that runs only finds out what to disturb; blocks are not recomputed in it.
    """

    def __init__(self, keeper: Keeper, bits: float, rules: Rules, *, whole_model: bool = True) -> None:
        self.keeper, self.rules, self._whole_model = keeper, rules, whole_model
        self.places = Occurrences(bits)
        self.disturbed: frozenset[Place] = frozenset()
        self.probing = False

    @contextmanager
    def around(self, module: nn.Module, inputs: Any) -> Iterator[None]:
        """Pack what is saved inside of the block.

        Args:
            module: Its parameters and buffers are left as they are.
            inputs: What the module is called with, in any nesting.
        """
        self.keeper.leave(own_tensors(module))
        if self._whole_model:
            self.keeper.leave(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        self.places.begin()
        token = _active.set(self)
        try:
            with self._packing():
                yield
        finally:
            _active.reset(token)
            self.keeper.transfer.settle()

    @contextmanager
    def block(self, path: str) -> Iterator[None]:
        """Pack what is saved in one run of a block of the model that is recomputed."""
        with self.places.block(path), self._packing():
            yield

    @contextmanager
    def _packing(self) -> Iterator[None]:
        pack = self.pack
        rules = {**self.rules, **keeping_statistics()}
        with Intercepted(rules, only_if=lambda: _innermost() is pack), saved_tensors_hooks(pack, self.unpack):
            yield

    def twin(self) -> Hooks:
        """Return hooks of their own for a replica of the model."""
        return copy.deepcopy(self)

    def pack(self, tensor: Tensor) -> Held | StaysHere:
        """Return what is kept of a tensor that autograd saves."""
        reason = statistic(tensor) or self.keeper.why_not(tensor)
        if reason is not None:
            savedtensors.left(tensor, reason)
            return StaysHere(tensor.detach(), tensor._version)
        place = self.places.place(tensor)
        return Held(self.keeper.keep(tensor, place), place)

    def unpack(self, held: Held | StaysHere) -> Tensor:
        """Return the tensor that was saved, or what it was made."""
        if isinstance(held, StaysHere):
            return held.unpack()
        tensor = held.kept.form.restore(held.kept.parts)
        return self._coarser(tensor) if held.place in self.disturbed else tensor

    def _coarser(self, tensor: Tensor) -> Tensor:
        flat = tensor.contiguous().view(-1)
        size = self.keeper.group_size
        codes, meta = groupquant.encode(flat, PROBE_BITS, size, fresh_seed(), True)
        return groupquant.decode(codes, meta, PROBE_BITS, size, 0, flat.numel(), tensor.dtype).view(tensor.shape)


def _innermost() -> Any:
    """Return the pack hook that a tensor saved now would go to: not ours inside of a checkpoint, say."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def active() -> Hooks | None:
    """Return the hooks of the innermost model that is running under some in this thread, or None."""
    return _active.get()
