"""How ``torch.compile`` sees a layer that packs: as one node of its graph, inside of which the layer's forward runs.

Dynamo reads the Python of a model, and would have to know codecs, sites and layouts. It need not: it puts a call of a
function into its graph that is marked as one to be left alone. AOTAutograd, which traces operators, runs this function
on its own tensors, and sees what the forward and the backward pass of the layer do, for whatever is packed.

A node holds plain values and tensors. So the layer is named by its form, from which a copy without tensors is found,
and its parameters and buffers are passed. Equal layers have equal forms: blocks that are compiled one by one share a
graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from actbench.packing import SavedTensors, SiteState

_layers: dict[str, nn.Module] = {}  # by their forms, without tensors: only settings


class InGraph(nn.Module):
    """A base class, put before a layer's own class, whose forward is one node of a graph.

    Attributes:
        form: What the layer computes, apart from its tensors; None for a copy that runs inside of a node.
    """

    form: str | None

    def in_graph(self, x: Tensor, *others: Any) -> Tensor:
        """Return what the forward returns, as one node of the graph that is being compiled.

        Where a layer overwrites an input of a graph, torch 2.11 to 2.15 computes wrong gradients. So it overwrites a
        copy, and the result is copied back; inductor makes neither copy.
        """
        tensors = [*self._parameters.values(), *self._buffers.values()]
        overwrites = getattr(self, "inplace", False)
        found: Tensor = _run(self.form, self.training, x.clone() if overwrites else x, others, *tensors)
        return x.copy_(found) if overwrites else found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        give_form(self)  # in the process that unpickles, the layer of this form may not be known


def give_form(layer: Any) -> None:
    """Let compiled graphs find a layer by its form."""
    values = vars(layer)
    settings = {name: value for name, value in values.items() if not name.startswith("_") and name not in _OF_ONE}
    packs = "packer" in values
    if packs:
        site = values["site"]
        # what is alone in a graph packs alone, and the sites of equal layers are one
        settings["packer"] = SavedTensors(layer.packer.codec, dedup=False)
        settings["site"] = SiteState("", site.bits, chunk=site.chunk, pipeline_threshold=site.pipeline_threshold)
    shown = {name: repr(value) for name, value in settings.items() if name != "packer"}
    codec = repr(layer.packer.codec) if packs else ""
    layer.form = f"{type(layer).__module__}.{type(layer).__qualname__} {sorted(shown.items())} {codec}"
    if layer.form not in _layers:
        # not where it is defined: this imports the compiler, which takes seconds
        torch.compiler.allow_in_graph(_run)  # type: ignore[no-untyped-call]
        bare: Any = object.__new__(type(layer))
        vars(bare).update(vars(nn.Module()), **settings, form=None)
        reversed_padding = "_reversed_padding_repeated_twice"  # of a convolution, from its padding
        if reversed_padding in values:
            vars(bare)[reversed_padding] = values[reversed_padding]
        for kind in ("_parameters", "_buffers"):
            vars(bare)[kind] = dict.fromkeys(values[kind])
        _layers[layer.form] = bare


_OF_ONE = ("packer", "site", "form", "training", "forward")
"""Attributes that are no setting of a layer, or are made anew for its copy."""


def _run(form: str | None, training: bool, x: Tensor, others: tuple[Any, ...], *tensors: Tensor | None) -> Any:
    assert form is not None
    known = _layers[form]
    layer: Any = object.__new__(type(known))
    vars(layer).update(vars(known), training=training)
    names = [*known._parameters, *known._buffers]
    given = dict(zip(names, tensors, strict=True))
    vars(layer)["_parameters"] = {name: given[name] for name in known._parameters}
    vars(layer)["_buffers"] = {name: given[name] for name in known._buffers}
    return layer.forward(x, *others)
