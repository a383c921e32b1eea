"""Saved-tensor hooks that pack what autograd saves while a model's forward runs, and unpack it in backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from actbench import savedtensors
from actbench.nn.hooked import running
from actbench.nn.hooked.attention import fused_attention
from actbench.nn.hooked.occurrences import Occurrences
from actbench.nn.hooked.statistics import keeping_statistics, statistic
from actbench.nn.intercepted import Intercepted, Rules
from actbench.nn.keeping import Form, Keeper, Kept, Parts, Place
from actbench.nn.offloaded import StaysHere, own_tensors
from actbench.ops import groupquant
from actbench.ops.seeds import fresh_seed

PROBE_BITS = 2
"""Width at which a tensor is packed once more to see what its error does to the gradient."""


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
        token = running.begin(self)
        try:
            with self._packing():
                yield
        finally:
            running.end(token)
            self.keeper.transfer.settle()

    @contextmanager
    def block(self, path: str) -> Iterator[None]:
        """Pack what is saved in one run of a block of the model that is recomputed."""
        with self.places.block(path), self._packing():
            yield

    @contextmanager
    def _packing(self) -> Iterator[None]:
        pack = self.pack
        rules = {**self.rules, **keeping_statistics(), **_attention()}
        with Intercepted(rules, only_if=lambda: _innermost() is pack), saved_tensors_hooks(pack, self.unpack):
            yield

    def twin(self) -> Hooks:
        """Return hooks of their own for a replica of the model."""
        return copy.deepcopy(self)

    def pack(self, tensor: Tensor) -> Held | StaysHere:
        """Return what is kept of a tensor that autograd saves."""
        reason = statistic(tensor) or _copy_of_parameter(tensor) or self.keeper.why_not(tensor)
        if reason is not None:
            savedtensors.left(tensor, reason)
            return StaysHere(tensor.detach(), tensor._version)
        return self.held(tensor)

    def held(self, tensor: Tensor) -> Held:
        """Return a tensor as the keeper keeps it; truth values take one bit and no share of the others'."""
        place = Place("truth values", 1) if tensor.dtype == torch.bool else self.places.place(tensor)
        kept = self.keeper.keep(tensor, place)
        return Held(kept, place.owner or place)

    def unpack(self, held: Held | StaysHere) -> Tensor:
        """Return the tensor that was saved, or what it was made."""
        if isinstance(held, StaysHere):
            return held.unpack()
        return self.restored(held.kept.form, held.kept.parts, held.place)

    def restored(self, form: Form, parts: Parts, place: Place) -> Tensor:
        """Return what was kept for a place, packed once more where that place is disturbed."""
        tensor = form.restore(parts)
        return self._coarser(tensor) if place in self.disturbed else tensor

    def _coarser(self, tensor: Tensor) -> Tensor:
        flat = tensor.contiguous().view(-1)
        size = self.keeper.group_size
        codes, meta = groupquant.encode(flat, PROBE_BITS, size, fresh_seed(), True)
        return groupquant.decode(codes, meta, PROBE_BITS, size, 0, flat.numel(), tensor.dtype).view(tensor.shape)


def _attention() -> Rules:
    attend: Any = F.scaled_dot_product_attention
    return {attend: fused_attention}


_CASTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")


def _copy_of_parameter(tensor: Tensor) -> str | None:
    """Return that a tensor is a parameter in another type, as autocast makes it, as a reason to leave it; or None.

    Packed, its error would be one of the weight that every gradient further back is multiplied with.
    """
    node = tensor.grad_fn
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    is_cast = node is not None and node is not tensor.grad_fn and node.name() == "torch::autograd::AccumulateGrad"
    return "a parameter in another type" if is_cast else None


def _innermost() -> Any:
    """Return the pack hook that a tensor saved now would go to: not ours inside of a checkpoint, say."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
