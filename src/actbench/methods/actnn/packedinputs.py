from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.conv import _ConvNd

from actbench.methods.actnn.layers.layers import compressed, is_convolution, is_norm, parametrized_layers
from actbench.methods.actnn.layers.modelforward import CompressedForward
from actbench.methods.actnn.layers.savedinput import Compressed
from actbench.model.records import Site, Unreached
from actbench.packing import Codec, SavedTensors, SiteState
from actbench.scheme.base import NOTHING_PACKED, Scheme
from actbench.scheme.setup import Part, TrainingSetup

_NO_ROWS = "a convolution: the rows of its input are no tokens, and it keeps its input whole"


def with_packed_inputs(
    scheme: Scheme,
    setup: TrainingSetup,
    codec: Codec,
    state_of: Callable[[nn.Module, str], SiteState],
    becomes: str,
    *,
    norms: bool = True,
    convolutions: bool = True,
) -> TrainingSetup:
    """Return a setup whose layers pack their input by a codec, or save an exact small code.

    Args:
        scheme: The scheme that changes the model.
        setup: The setup of the model.
        codec: Packs inputs.
        state_of: Makes the state of a layer's site, from the layer and its path.
        becomes: What a site reports of a packed input.
        norms: Whether norms pack their inputs too.
        convolutions: Whether convolutions pack their inputs too; else they are listed as not converted.

    Raises:
        ConversionError: No layer is replaced, or the model packs its saved tensors already or is compiled.
    """
    packer, sites = SavedTensors(codec), list[Site]()
    left = parametrized_layers(
        setup.module, lambda cls: (norms or not is_norm(cls)) and (convolutions or not is_convolution(cls))
    )
    if not convolutions:
        left += tuple(
            Unreached(path=path, kind=type(layer).__name__, reason=_NO_ROWS)
            for path, layer in setup.module.named_modules()
            if isinstance(layer, _ConvNd)
        )

    def rule(layer: nn.Module, path: str) -> nn.Module | None:
        if not convolutions and isinstance(layer, _ConvNd):
            return None
        new = compressed(layer, packer, state_of(layer, path), norms=norms)
        if new is not None:
            what = becomes if isinstance(new, Compressed) else "an exact small code"
            sites.append(Site(path=path, was=f"nn.{type(layer).__name__}", becomes=what))
        return new

    model = CompressedForward.bind_on(scheme.name, setup.module, rule, packer, left, whole_model=not setup.path)
    return setup.changed(model, tuple(sites), left, by=Part(scheme.spec, acts=packer, idle=NOTHING_PACKED))
