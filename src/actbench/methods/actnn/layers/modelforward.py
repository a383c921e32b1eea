"""The forward of a model whose layers pack their input."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from actbench.errors import ConversionError, NothingToConvertError
from actbench.methods.actnn.bitallocation import BitAllocation
from actbench.methods.actnn.layers.savedinput import Compressed
from actbench.model.records import Unreached
from actbench.packing import SavedTensors, SiteState
from actbench.packing.hooked.forward import HookedForward
from actbench.packing.hooked.hooks import OwnHooks, activated
from actbench.packing.refusals import refuse_compiled
from actbench.packing.replacement import Rule, census, reasons, swap
from actbench.packing.wrapped import Inner, WrappedForward, Wrapper, bind_entries, given_by_others

COMPRESSED = (
    "a model whose layers pack their inputs",
    "their number format was not tried in a graph",
)
"""What cannot be compiled, and why."""

ALLOCATED = (
    "a model whose layers or samples have bits of their own",
    "bits follow from what the layers note in a step, and a compiled graph notes nothing",
)
SWAPPED = (
    "a model whose codes wait in host memory",
    "their copies run beside the computation, which a compiled graph does not order",
)


@dataclass(eq=False)
class PackingInputs(Wrapper):
    """Wraps the passes through a model whose layers pack their inputs.

    Attributes:
        packer: The packer of the layers.
        allocation: Allocates bits to the layers; None leaves their bits unchanged.
        empty_cache_threshold: If less than this share of the memory that torch reserves on a CUDA device is in use, the
            rest is freed before each pass; None for never.
        hooked: Whether parts of the model have hooks of their own. Recomputed blocks around these then pack what the
            second run saves, and nothing of the first.
        whole_model: Whether the module is the whole model: its inputs then belong to the caller, and are not packed.
        uncompilable: What of it cannot be compiled, and why; None if all can.
    """

    packer: SavedTensors
    allocation: BitAllocation | None = None
    empty_cache_threshold: float | None = None
    hooked: bool = False
    whole_model: bool = True
    uncompilable: tuple[str, str] | None = COMPRESSED
    _first_entry: str | None = field(default=None, init=False)

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Exclude tensors that others hold, begin a step of the bit allocation, and run the pass."""
        self.packer.exclude.add(given_by_others((args, kwargs), graphless=bool(entry) or not self.whole_model))
        if self.allocation is not None and module.training and self._begins_step(entry):
            self.allocation.begin()
        share = self.empty_cache_threshold
        # both are 0 without a device
        if share is not None and torch.cuda.memory_allocated() < share * torch.cuda.memory_reserved():
            torch.cuda.empty_cache()
        try:
            with self.running(), activated(OwnHooks(self.packer)) if self.hooked else nullcontext():
                return inner(module, *args, **kwargs)
        finally:
            self.packer.settle()

    def _begins_step(self, entry: str) -> bool:
        """Return whether a pass is the first of its step; if a step calls several parts of a model, only one counts."""
        if self._first_entry is None and entry:
            self._first_entry = entry
        return entry in ("", self._first_entry)


class CompressedForward(WrappedForward):
    """The forward of a model whose layers pack their input; see :class:`PackingInputs` for the arguments."""

    wrapper: PackingInputs

    def __init__(
        self,
        module: nn.Module,
        packer: SavedTensors,
        allocation: BitAllocation | None = None,
        empty_cache_threshold: float | None = None,
        hooked: bool = False,
        whole_model: bool = True,
        uncompilable: tuple[str, str] | None = COMPRESSED,
    ) -> None:
        super().__init__(module)
        self.wrapper = PackingInputs(packer, allocation, empty_cache_threshold, hooked, whole_model, uncompilable)

    @classmethod
    def bind_on(
        cls,
        scheme: str,
        module: nn.Module,
        rule: Rule,
        packer: SavedTensors,
        left: tuple[Unreached, ...],
        *,
        whole_model: bool,
    ) -> nn.Module:
        """Replace layers of a model by ones that pack their inputs, bind a forward on it, and return it.

        ``left`` are layers that stay, for messages.

        Raises:
            ConversionError: No layer is replaced, or :meth:`refuse` raises.
        """
        cls.refuse(scheme, module)
        model = swap(module, rule)
        if not any(isinstance(part, Compressed) for part in model.modules()):
            held = reasons(left) or f"it holds {census(model)}"
            raise NothingToConvertError(f"{scheme}: {type(model).__name__} has no layer to convert; {held}")
        cls(model, packer, whole_model=whole_model).bind()
        bind_entries(model)
        return model

    @classmethod
    def refuse(cls, scheme: str, module: nn.Module) -> None:
        """Raise a ConversionError if a model is compiled, or packs its saved tensors already."""
        refuse_compiled(module, scheme, COMPRESSED[1])
        if cls.of(module) is not None or HookedForward.of(module) is not None:
            raise ConversionError(f"{scheme}: the model packs its saved tensors already; convert the original model")

    @property
    def packer(self) -> SavedTensors:
        """The packer of the layers."""
        return self.wrapper.packer

    @property
    def allocation(self) -> BitAllocation | None:
        """The bit allocation of the layers."""
        return self.wrapper.allocation

    def adapted(self) -> Any:
        """Return the state of the sites and of the allocation; see :class:`actbench.packing.forwardwrapper.Adapted`."""
        sites = {path: site.adapted() for path, site in self._sites().items()}
        return {"places": sites, "allocation": self.allocation and self.allocation.adapted()}

    def adapt(self, state: Any) -> None:
        """Restore what :meth:`adapted` returned; raise a KeyError for the state of another model."""
        sites, device = self._sites(), next(self.module.parameters()).device
        for path, site in sites.items():
            site.adapt(tree_map_only(Tensor, lambda tensor: tensor.to(device), state["places"][path]), sites)
        if self.allocation is not None:
            self.allocation.adapt(state["allocation"], sites)

    def _sites(self) -> dict[str, SiteState]:
        layers = [layer for layer in self.module.modules() if isinstance(layer, Compressed)]
        return {layer.site.path: layer.site for layer in layers}
