"""How ``torch.compile`` sees a model whose saved tensors are packed by hooks: as one region of its graph.

Dynamo reads the model as ever, with all its guards, and puts its operators into a region. AOTAutograd, which traces the
region's forward and backward pass, runs it operator by operator, here under packing hooks of its own: so a tensor is
treated by the operator that saves it, as without a compiler, and the graph has the codes. Where Dynamo cannot read a
model as one region, the model runs uncompiled.

What is different in a graph: values are not read, so what may hold infinities stays whole; and attention with
dropout stays whole, as its second run would draw other numbers.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from actbench.ops.library import traced
from actbench.packing import Codec, Packed, SavedTensors, SiteState
from actbench.packing.codecs import unpacked
from actbench.packing.hooked.hooks import Hooks, PackedAtSite
from actbench.packing.hooked.oprules import IN_A_GRAPH, current_rule, maker_of, may_be_infinite
from actbench.packing.wrapped import Rules

_internals: Any = torch._C._autograd
_torch: Any = torch


class Settings(NamedTuple):
    """How the hooks of a model pack, without what they know of its tensors."""

    codec: Codec
    bits: float
    rules: Rules
    whole_model: bool


_forms: dict[str, Settings] = {}  # a node of a graph holds plain values


def form_of(hooks: Hooks) -> str:
    """Return the name by which graphs find the settings of hooks; hooks that pack equally have the same."""
    settings = Settings(hooks.packer.codec, hooks.bits, hooks.rules, hooks.whole_model)
    rules = zlib.crc32(" ".join(sorted(map(str, settings.rules))).encode())
    form = f"{settings.codec!r} {settings.bits} {rules} {settings.whole_model}"
    _forms.setdefault(form, settings)
    return form


class RegionHooks(Hooks):
    """The hooks of one trace of a region; they know no tensors of other traces."""

    def __init__(self, settings: Settings) -> None:
        rules = {function: _out_of_place(rule) for function, rule in settings.rules.items()}
        packer = SavedTensors(settings.codec, dedup=False)
        super().__init__(packer, settings.bits, rules, whole_model=settings.whole_model)
        self._known: dict[Any, tuple[Tensor, PackedAtSite]] = {}

    @contextmanager
    def tracing(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Pack what is saved inside the context, in which a region with these arguments is traced."""
        given = [each for each in args if isinstance(each, Tensor)]
        # what has a graph comes from another part of the model, and only saved tensors hold it
        self.packer.exclude.add(each for each in given if self.whole_model or _is_leaf(each))
        deferred = _internals._saved_tensors_hooks_set_tracing(False)
        try:
            with self._packing():
                yield
        finally:
            _internals._saved_tensors_hooks_set_tracing(deferred)
            self._known.clear()

    def pack_at_site(self, tensor: Tensor, maker: str | None = None) -> PackedAtSite:
        """Pack a tensor, once for all operators that save it."""
        site = SiteState("", 1 if tensor.dtype == torch.bool else self.bits)
        if may_be_infinite(maker_of(tensor) if maker is None else maker):
            return PackedAtSite(unpacked(tensor), site)
        operator = current_rule()
        site.row, site.product = operator.row, operator.is_product
        key, value = _identity(tensor)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = value, PackedAtSite(self.packer.pack(tensor, site), site)
        packed, site = known[1]
        return PackedAtSite(Packed(packed.codec, packed.layout, packed.parts), site)


def _identity(tensor: Tensor) -> tuple[Any, Tensor]:
    """Return by what a tensor of a trace is known, and the value that must live as long; a trace changes no value."""
    value = tensor
    if isinstance(tensor, FunctionalTensor):
        _torch._sync(tensor)
        value = _torch._from_functional_tensor(tensor.elem)
    place = [*value.shape, *value.stride(), value.storage_offset()]
    return (value.untyped_storage()._cdata, value.dtype, *map(str, place)), value


def _is_leaf(tensor: Tensor) -> bool:
    return not tensor.requires_grad or tensor.grad_fn is None or tensor.grad_fn.name() == IN_A_GRAPH


def _out_of_place(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that overwrites its first argument by a copy only.

    Where an autograd function overwrites its input, torch 2.11 to 2.15 computes wrong gradients in a graph; inductor
    makes neither copy.
    """
    signature = inspect.signature(rule)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if not bound.arguments.get("inplace"):
            return rule(*args, **kwargs)
        x, *others = args
        return x.copy_(rule(x.clone(), *others, **kwargs))

    return call if "inplace" in signature.parameters else rule


def region(form: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs the forward of a region, which a tracer gives as a graph; for ``dynamo_bypassing_wrapper``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(inner, torch.fx.GraphModule):  # Dynamo left the region to Python
            module, *others = args
            return getattr(inner, "__self__").wrapper.run("", module, inner, others, kwargs)  # noqa: B009
        functional = any(isinstance(each, FunctionalTensor) for each in args)
        if functional and not traced():  # AOTAutograd looks at types and shapes first
            return inner(*args, **kwargs)
        with RegionHooks(_forms[form]).tracing(args):
            return inner(*args, **kwargs)

    return run
