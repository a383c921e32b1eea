"""Saved-tensor hooks that pack what autograd saves while a model's forward runs, and unpack it in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from actbench.ops.hostmemory import is_elsewhere
from actbench.packing import Packed, SavedTensors, SiteState, samplegradients, savedtensors
from actbench.packing.codecs import Logarithms, Unpacked, logarithms
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.hooked.attention import attention_rules
from actbench.packing.hooked.occurrences import Occurrences
from actbench.packing.hooked.oprules import (
    current_rule,
    divisor_rules,
    is_cast_of_parameter,
    maker_of,
    may_be_infinite,
    op_rules,
    statistic,
)
from actbench.packing.packer import StaysHere, own_tensors
from actbench.packing.refusals import refuse_second_order
from actbench.packing.wrapped import Intercepted, Rules, given_by_others

PROBE_BITS = 2
"""Bits at which a tensor is packed once more, to see what its error does to the gradient."""

_bits_of_layer: ContextVar[int | None] = ContextVar("_bits_of_layer", default=None)
"""Bits of what the running layer saves, or None where no layer has bits of its own."""


class PackedAtSite(NamedTuple):
    """A packed saved tensor and its site."""

    packed: Packed
    site: SiteState


class Hooks:
    """Packs a model's saved tensors; one for each model.

    Args:
        packer: The packer of the model.
        bits: Bits of an element at first.
        rules: Functions of torch to replace while the model runs, by ones that save less.
        whole_model: Whether the module is the whole model, so that its inputs are the batch.
        leaves_inputs: Whether the batch, which others hold, is not packed.

    Attributes:
        entries: The sites that were seen, with their bits, by the path of the module where the pass begins.
        sites: The sites of the pass that runs, or ran last.
        disturbed: Sites whose tensors are packed a second time, coarsely, when they are unpacked.
        probing: Whether the pass only probes sensitivity; blocks are not recomputed in it.
    """

    def __init__(
        self, packer: SavedTensors, bits: float, rules: Rules, *, whole_model: bool = True, leaves_inputs: bool = True
    ) -> None:
        self.packer, self.rules = packer, rules
        self.whole_model, self._leaves_inputs = whole_model, leaves_inputs
        self.bits = bits
        self.entries: dict[str, Occurrences] = {}
        self.sites = self.of_entry("")
        self.disturbed: frozenset[SiteState] = frozenset()
        self.probing = False

    def of_entry(self, entry: str) -> Occurrences:
        """Return the sites of the passes that begin at a module, by its path."""
        if entry not in self.entries:
            self.entries[entry] = Occurrences(self.bits)
        return self.entries[entry]

    def all_sites(self) -> Iterator[SiteState]:
        """Yield the sites of all passes, wherever they begin."""
        for sites in self.entries.values():
            yield from sites

    def give_new_sites(self, bits: float) -> None:
        """Set the bits of sites that are made from now on."""
        self.bits = bits
        for sites in self.entries.values():
            sites.bits = bits

    def forget_seen(self) -> None:
        """Forget what was seen in the passes so far; bits stay."""
        for sites in self.entries.values():
            sites.forget_seen()

    def seen(self) -> list[list[SiteState]]:
        """Return the sites that were seen since :meth:`forget_seen`, of each kind in order of time."""
        return [kind for sites in self.entries.values() for kind in sites.seen().values()]

    @contextmanager
    def around(self, module: nn.Module, inputs: Any, entry: str = "") -> Iterator[None]:
        """Pack what is saved inside the context: in a pass of a module at this path with these inputs."""
        self.packer.exclude.add(own_tensors(module))
        if self._leaves_inputs:
            self.packer.exclude.add(given_by_others(inputs, graphless=bool(entry) or not self.whole_model))
        self.sites = self.of_entry(entry)
        self.sites.begin(tuple(leaf.shape[1:]) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        try:
            with self._packing():
                yield
        finally:
            self.packer.settle()

    @contextmanager
    def block(self, path: str, sites: Occurrences) -> Iterator[None]:
        """Pack what is saved in one run of a recomputed block, for the sites of the pass in which it ran first."""
        outer, self.sites = self.sites, sites
        try:
            with sites.block(path), self._packing():
                yield
        finally:
            self.sites = outer

    @contextmanager
    def _packing(self) -> Iterator[None]:
        pack = self.pack
        divisors = divisor_rules() if self.packer.codec.drops else {}
        rules = {**self.rules, **op_rules(), **divisors, **attention_rules(self)}
        # inside a checkpoint, whose hooks are the innermost, ours pack nothing
        intercepted = Intercepted(rules, only_if=lambda: _innermost() is pack)
        with activated(self), intercepted, saved_tensors_hooks(pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> PackedAtSite | StaysHere:
        """Pack a tensor that autograd saves."""
        base = tensor if tensor._base is None else tensor._base
        if type(base) is nn.Parameter and not savedtensors.observers:  # the reason is not asked for
            return StaysHere.of(tensor)
        operator = current_rule()
        is_logarithm = operator.is_logarithm(tensor)
        if not is_logarithm and operator.is_shape(tensor):
            savedtensors.left(tensor, "its shape alone is needed")
            # one number, expanded: it has the shape and next to no memory
            return StaysHere.of(tensor.detach().new_zeros(()).expand(tensor.shape))
        maker = maker_of(tensor)
        reason = statistic(tensor, operator) or is_cast_of_parameter(tensor, maker) or self.packer.why_not(tensor)
        if reason is not None:
            self.packer.leave(tensor, reason)
            return StaysHere.of(tensor)
        if is_logarithm and not self.packer.codec.exact:
            # the probability is packed, whose error does not become a factor; see Logarithms
            packed, site = self.pack_at_site(tensor.detach().exp(), "")
            packed = packed._replace(codec=Logarithms(packed.codec))
        else:
            packed, site = self.pack_at_site(tensor, maker)
        whole = packed.codec.inner if isinstance(packed.codec, Logarithms) else packed.codec
        return StaysHere.of(tensor) if isinstance(whole, Unpacked) else PackedAtSite(packed, site)

    def pack_at_site(self, tensor: Tensor, maker: str | None = None) -> PackedAtSite:
        """Pack a tensor for its site; booleans take 1 bit, outside of the allocation.

        ``maker`` is what :func:`maker_of` says of it, where that is known.
        """
        if tensor.dtype == torch.bool:
            site = SiteState("truth values", 1)
        else:
            site, bits = self.sites.site(tensor), _bits_of_layer.get()
            if bits is not None:
                site.bits = bits
        operator = current_rule()
        site.row, site.product = operator.row, operator.is_product
        # On a device, a look at a tensor's values waits for them.
        site.guarded = (
            not (site.was_finite and is_elsewhere(tensor))
            or self.probing
            or may_be_infinite(maker_of(tensor) if maker is None else maker)
        )
        packed = self.packer.pack(tensor, site)
        # a tensor that another site has packed is disturbed with that site
        return PackedAtSite(packed, site.owner or site)

    def unpack(self, saved: PackedAtSite | StaysHere) -> Tensor:
        """Return the saved tensor, decoded; if it was packed, raise a RuntimeError where backward builds a graph."""
        if isinstance(saved, StaysHere):
            return saved.unpack()
        if torch.is_grad_enabled():
            refuse_second_order("a model whose saved tensors are packed")
        return self.restored(saved.packed, saved.site)

    def restored(self, packed: Packed, site: SiteState) -> Tensor:
        """Return the decoded tensor of a site, packed once more if the site is disturbed."""
        if isinstance(packed.codec, Logarithms):
            return logarithms(self.restored(packed._replace(codec=packed.codec.inner), site))
        tensor = packed.unpack()
        return self.packer.codec.coarser(tensor, PROBE_BITS, site.row) if site in self.disturbed else tensor


class OwnHooks(Hooks):
    """Represents the hooks of a model's parts when blocks around these are recomputed: the parts pack by themselves.

    One is made in each forward pass, and knows its samples.
    """

    def __init__(self, packer: SavedTensors) -> None:
        super().__init__(packer, 1, {})
        self._samples = samplegradients.current()

    @contextmanager
    def block(self, path: str, sites: Occurrences) -> Iterator[None]:
        """Give the second run of a block the samples of the first."""
        with samplegradients.as_of(self._samples):
            yield


def _innermost() -> Any:
    """Return the pack hook that a tensor saved now would go to; inside a checkpoint it is not ours."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # True: also while a graph is traced
    return None if hooks is None else hooks[0]


_active: ContextVar[Hooks | None] = ContextVar("_active", default=None)


def active() -> Hooks | None:
    """Return the hooks of the innermost model that runs under hooks in this thread, or None, as in compiled code."""
    return None if torch.compiler.is_compiling() else _active.get()


@contextmanager
def activated(hooks: Hooks) -> Iterator[None]:
    """Make hooks active inside the with-block."""
    token = _active.set(hooks)
    try:
        yield
    finally:
        _active.reset(token)


class WidthForward(ReboundForward):
    """A forward whose saved tensors have bits of their own; layers inside with bits of theirs come first."""

    def __init__(self, module: nn.Module, bits: int) -> None:
        super().__init__(module)
        self.bits = bits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        token = _bits_of_layer.set(self.bits)
        try:
            return self.inner(self.module, *args, **kwargs)
        finally:
            _bits_of_layer.reset(token)
