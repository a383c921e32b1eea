"""Forwards that run a model under hooks that pack saved tensors or move them to host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actbench.errors import ConversionError, NothingToConvertError
from actbench.packing import Exclude, HostOffload, Identity, Packed, SavedTensors, SiteState, savedtensors
from actbench.packing.hooked.hooks import Hooks
from actbench.packing.hooked.ingraph import form_of, region
from actbench.packing.packer import ON_HOST, StaysHere, own_tensors
from actbench.packing.refusals import is_exporting, is_waited_for, refuse_compiled, refuse_compiling
from actbench.packing.wrapped import HookWrapper, Inner, WrappedForward, bind_entries, in_a_pass
from actbench.units import KIB

_PACKED = "a model whose saved tensors are packed by hooks"
HOOKS = (_PACKED, "torch.compile does not trace the hooks")
PROBED = (
    _PACKED,
    "the bits of its tensors follow from passes that probe it, and a compiled graph has the bits of its trace",
)
MOVED = ("a model whose saved tensors wait in host memory", "torch.compile does not trace the hooks that move them")
IN_BLOCKS = (
    "a block of a model whose saved tensors are packed by hooks",
    "the hooks around it would pack what its graph saves, whatever that is; compile the whole model",
)
RECOMPUTED = (
    "a model whose saved tensors are packed by hooks, and whose blocks run again in the backward pass",
    "in a graph the second run of a block would not find the tensors that the hooks have packed",
)
"""What cannot be compiled, and why."""


class Probing(Protocol):
    """Allocates bits to saved tensors before some forward passes.

    Attributes:
        passes: How many forward passes were counted, by the path of the module where they begin.
    """

    passes: Counter[str]

    def restarted(self) -> Probing:
        """Return a new object with these settings that has counted no pass."""

    def is_due(self, entry: str = "") -> bool:
        """Count a pass that begins at a module, and return whether an allocation is due before it."""

    def allocate(self, hooks: Hooks, module: nn.Module, loss_of: Callable[[], Tensor]) -> None:
        """Allocate bits by the loss that ``loss_of`` returns, a scalar with its graph."""

    def step(
        self, hooks: Hooks, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, entry: str = ""
    ) -> None:
        """Count a forward pass that ``run`` runs under the hooks, and allocate bits before it if this is due."""


class Packing(HookWrapper):
    """Packing hooks around the passes through a model, and the probing that allocates bits at intervals, or None."""

    hooked = True

    def __init__(self, hooks: Hooks, probing: Probing | None) -> None:
        self.hooks = hooks
        self.uncompilable = None if hooks.packer.codec.compiles else HOOKS
        if hooks.packer.placement is not None:
            self.uncompilable = MOVED
        self.probe_by(probing)
        self.form = form_of(hooks)

    def probe_by(self, probing: Probing | None) -> None:
        """Allocate bits by a probing from now on, or by none; a graph would not have those that were allocated."""
        self.probing = probing
        if probing is not None and self.uncompilable != MOVED:
            self.uncompilable = PROBED

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.form = form_of(self.hooks)  # in the process that unpickles it may not be known

    def is_in_graph(self) -> bool:
        """Return whether the modules are compiled now; raise a ConversionError if they cannot be."""
        inside = super().is_in_graph()
        if is_waited_for() and in_a_pass():
            refuse_compiling(*IN_BLOCKS)
        return inside

    def why_uncompiled(self) -> tuple[str, str] | None:
        """Return why the model cannot be compiled; None if it can be."""
        return self.uncompilable or (RECOMPUTED if self.recomputes else None)

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Run a pass with its saved tensors packed; allocate bits before it if this is due."""

        def packed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.running(), self.hooks.around(module, (args, kwargs), entry):
                return inner(module, *args, **kwargs)

        if self.probing is not None and module.training:
            self.probing.step(self.hooks, module, packed, args, kwargs, entry)
        return packed(module, *args, **kwargs)


class HookedForward(WrappedForward):
    """A forward under packing hooks; see :class:`Packing`."""

    wrapper: Packing

    def __init__(self, module: nn.Module, hooks: Hooks, probing: Probing | None = None) -> None:
        super().__init__(module)
        self.wrapper = Packing(hooks, probing)

    def in_graph(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the model as a region of the graph that is being compiled."""
        from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper  # the compiler has imported it

        return dynamo_bypassing_wrapper(partial(region, self.wrapper.form), self.inner, module, *args, **kwargs)

    @classmethod
    def bind_on(cls, scheme: str, module: nn.Module, hooks: Hooks, probing: Probing | None = None) -> None:
        """Bind a forward with these hooks on a model.

        Raises:
            NothingToConvertError: The model has nothing to train.
            ConversionError: It packs or offloads its saved tensors already, or is compiled.
        """
        kind = type(module).__name__
        parameters = list(module.parameters())
        # as parts, activations and frozen norms save what the layers before them need; frozen products do not
        has_matrix = any(parameter.dim() > 1 for parameter in parameters)
        idle = isinstance(module, nn.Identity) or getattr(module, "p", 1) == 0
        between = not (has_matrix or hooks.whole_model or idle)
        if not between and not any(parameter.requires_grad for parameter in parameters):
            raise NothingToConvertError(
                f"{scheme}: {kind} has no parameter to train, so nothing is kept for a backward pass"
            )
        if any(forward.of(module) is not None for forward in (HookedForward, OffloadedForward)):
            raise ConversionError(f"{scheme}: {kind} packs or moves its saved tensors already; convert the original")
        refuse_compiled(module, *HOOKS)
        cls(module, hooks, probing).bind()
        bind_entries(module)

    @property
    def hooks(self) -> Hooks:
        """The hooks that pack."""
        return self.wrapper.hooks

    @property
    def probing(self) -> Probing | None:
        """The probing that allocates bits at intervals, or None."""
        return self.wrapper.probing

    @probing.setter
    def probing(self, probing: Probing | None) -> None:
        self.wrapper.probe_by(probing)

    def adapted(self) -> Any:
        """Return the bits, and when they were allocated; see :class:`actbench.packing.forwardwrapper.Adapted`."""
        own = self._adapted("")
        parts = {entry: self._adapted(entry) for entry in self.hooks.entries if entry}
        return {**own, "parts": parts} if parts else own

    def _adapted(self, entry: str) -> dict[str, Any]:
        passes = None if self.probing is None else self.probing.passes[entry]
        return {"places": self.hooks.of_entry(entry).adapted(), "passes": passes}

    def adapt(self, state: Any) -> None:
        """Restore what :meth:`adapted` returned."""
        for entry, part in {"": state, **state.get("parts", {})}.items():
            self.hooks.of_entry(entry).adapt(part["places"])
            if self.probing is not None and part["passes"] is not None:
                self.probing.passes[entry] = part["passes"]


OFFLOAD = ("offload", "it works by saved-tensor hooks, which torch.compile does not trace")
"""What cannot be compiled, and why."""

_SMALLEST_BYTES = KIB  # below this a copy takes more time than its bytes are worth


class Offloading(HookWrapper):
    """Hooks around the passes through a model that move saved tensors to host memory (vDNN, arXiv 1602.08124).

    Parameters, buffers and tensors smaller than 1 KiB stay. A :class:`~actbench.packing.HostOffload` moves the rest
    beside the computation: a tensor that leaves is held until the next leaves, and the next tensor is fetched ahead.
    """

    uncompilable = OFFLOAD

    def __init__(self) -> None:
        exclude = Exclude(_SMALLEST_BYTES, subclasses=True)
        self.packer = SavedTensors(Identity(), exclude=exclude, placement=HostOffload())

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Run a pass under saved-tensor hooks."""
        self.packer.exclude.add(own_tensors(module))
        try:
            with self.running(), saved_tensors_hooks(self._pack, lambda saved: saved.unpack()):
                return inner(module, *args, **kwargs)
        finally:
            self.packer.settle()

    def _pack(self, tensor: Tensor) -> StaysHere | Packed:
        reason = self.packer.why_not(tensor)
        if reason is None:
            return self.packer.pack(tensor, SiteState("", 8 * tensor.element_size()))
        savedtensors.left(tensor, reason)
        if reason == ON_HOST:
            savedtensors.acted(self.packer)
        return StaysHere.of(tensor)


class OffloadedForward(WrappedForward):
    """A forward whose saved tensors go to host memory."""

    wrapper: Offloading

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.wrapper = Offloading()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as a pass; raise a ConversionError under ``torch.compile``, without gradients too."""
        if not is_exporting():
            self.wrapper.is_in_graph()
        return super().__call__(*args, **kwargs)
