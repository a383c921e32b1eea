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
from torch.utils._pytree import tree_leaves

from actbench import savedtensors
from actbench.nn.firstorder import refuse_second_order
from actbench.nn.hooked import running
from actbench.nn.hooked.attention import attention_rules
from actbench.nn.hooked.logarithms import Logarithms, logarithms
from actbench.nn.hooked.makers import is_cast_of_parameter, may_be_infinite
from actbench.nn.hooked.occurrences import Occurrences
from actbench.nn.hooked.operators import telling, told
from actbench.nn.hooked.statistics import statistic
from actbench.nn.intercepted import Intercepted, Rules
from actbench.nn.keeping import Form, Keeper, Kept, Parts, Place, history
from actbench.nn.keeping.forms import AsItIs
from actbench.nn.keeping.transfer import is_elsewhere
from actbench.nn.offloaded import StaysHere, own_tensors
from actbench.nn.wrapped import given_by_others

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
        entries: The saved tensors that were seen, with the bits they are given, by where the pass begins.
        places: Those of the pass that runs, or ran last.
        disturbed: Places whose tensors are packed a second time, coarsely, when they are unpacked.
        probing: Whether the pass that runs only finds out what to disturb; blocks are not recomputed in it.
    """

    def __init__(self, keeper: Keeper, bits: float, rules: Rules, *, whole_model: bool = True) -> None:
        self.keeper, self.rules, self._whole_model = keeper, rules, whole_model
        self.bits = bits
        self.entries: dict[str, Occurrences] = {}
        self.places = self.of_entry("")
        self.disturbed: frozenset[Place] = frozenset()
        self.probing = False

    def of_entry(self, entry: str) -> Occurrences:
        """Return the places of the passes that begin at a module, by its path."""
        if entry not in self.entries:
            self.entries[entry] = Occurrences(self.bits)
        return self.entries[entry]

    def all_places(self) -> Iterator[Place]:
        """Yield the places of all passes, wherever they begin."""
        for places in self.entries.values():
            yield from places

    def give_new_places(self, bits: float) -> None:
        """Give places that are made from now on so many bits."""
        self.bits = bits
        for places in self.entries.values():
            places.bits = bits

    def forget_seen(self) -> None:
        """Forget what was seen in the passes so far; bits stay."""
        for places in self.entries.values():
            places.forget_seen()

    def seen(self) -> list[list[Place]]:
        """Return the places that were seen since, of each kind in order of time."""
        return [kind for places in self.entries.values() for kind in places.seen().values()]

    @contextmanager
    def around(self, module: nn.Module, inputs: Any, entry: str = "") -> Iterator[None]:
        """Pack what is saved inside of the block.

        Args:
            module: Its parameters and buffers are left as they are.
            inputs: What the module is called with, in any nesting.
            entry: Path of the module in the model.
        """
        self.keeper.leave(own_tensors(module))
        if self._whole_model:
            self.keeper.leave(given_by_others(entry, inputs))
        self.places = self.of_entry(entry)
        self.places.begin(tuple(leaf.shape[1:]) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        try:
            with self._packing():
                yield
        finally:
            self.keeper.transfer.settle()

    @contextmanager
    def block(self, path: str, places: Occurrences) -> Iterator[None]:
        """Pack what is saved in one run of a block of the model that is recomputed.

        Args:
            path: Of the block.
            places: Those of the pass in which it ran first.
        """
        outer, self.places = self.places, places
        try:
            with places.block(path), self._packing():
                yield
        finally:
            self.places = outer

    @contextmanager
    def _packing(self) -> Iterator[None]:
        pack = self.pack
        rules = {**self.rules, **telling(), **attention_rules(self)}
        token = running.begin(self)
        try:
            with Intercepted(rules, only_if=lambda: _innermost() is pack), saved_tensors_hooks(pack, self.unpack):
                yield
        finally:
            running.end(token)

    def twin(self) -> Hooks:
        """Return hooks of their own for a replica of the model."""
        return copy.deepcopy(self)

    def pack(self, tensor: Tensor) -> Held | StaysHere:
        """Return what is kept of a tensor that autograd saves."""
        operator = told()
        is_logarithm = operator.is_logarithm(tensor)
        if not is_logarithm and operator.is_shape(tensor):
            savedtensors.left(tensor, "its shape alone is needed")
            return _stays(tensor.detach().new_zeros(()).expand(tensor.shape))
        reason = statistic(tensor) or is_cast_of_parameter(tensor) or self.keeper.why_not(tensor)
        if reason is not None:
            savedtensors.left(tensor, reason)
            if not self.keeper.compress:  # as was asked
                savedtensors.acted(self.keeper)
            return _stays(tensor)
        held = self._powers(tensor) if is_logarithm and self.keeper.compress else self.held(tensor)
        return _stays(tensor) if isinstance(held.kept.form, AsItIs) else held

    def held(self, tensor: Tensor) -> Held:
        """Return a tensor as the keeper keeps it; truth values take one bit and no share of the others'."""
        place = Place("truth values", 1) if tensor.dtype == torch.bool else self.places.place(tensor)
        place.row = told().row
        # On a device, to look at a tensor's values is to wait for them.
        place.guarded = not (place.was_finite and is_elsewhere(tensor)) or self.probing or may_be_infinite(tensor)
        kept = self.keeper.keep(tensor, place)
        return Held(kept, place.owner or place)

    def _powers(self, tensor: Tensor) -> Held:
        """Return logarithms as their powers are kept."""
        held = self.held(tensor.detach().exp())
        if isinstance(held.kept.form, AsItIs):
            return held
        return Held(held.kept._replace(form=Logarithms(held.kept.form)), held.place)

    def unpack(self, held: Held | StaysHere) -> Tensor:
        """Return the tensor that was saved, or what it was made.

        Raises:
            RuntimeError: It was packed, and the backward pass makes a graph of itself.
        """
        if isinstance(held, StaysHere):
            return held.unpack()
        refuse_second_order("a model whose saved tensors are packed")
        return self.restored(held.kept.form, held.kept.parts, held.place)

    def restored(self, form: Form, parts: Parts, place: Place) -> Tensor:
        """Return what was kept for a place, packed once more where that place is disturbed."""
        if isinstance(form, Logarithms):
            return logarithms(self.restored(form.inner, parts, place))
        tensor = form.restore(parts)
        return self.keeper.coarser(tensor, PROBE_BITS, place.row) if place in self.disturbed else tensor


class OwnHooks(Hooks):
    """Stands for the hooks of a model's parts where blocks around these are recomputed: they pack for themselves.

    It is made in each forward pass, and knows the samples of that.

    Args:
        keeper: That of the model.
    """

    def __init__(self, keeper: Keeper) -> None:
        super().__init__(keeper, 1, {})
        self._samples = history.current()

    @contextmanager
    def block(self, path: str, places: Occurrences) -> Iterator[None]:
        """Let the second run of a block be of the samples of the first."""
        with history.as_of(self._samples):
            yield


def _stays(tensor: Tensor) -> StaysHere:
    """Return a tensor as it stays where it is: a parameter itself, whose ``data`` may be given other memory."""
    return StaysHere(tensor if tensor.is_leaf else tensor.detach(), tensor._version)


def _innermost() -> Any:
    """Return the pack hook that a tensor saved now would go to: not ours inside of a checkpoint, say."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
