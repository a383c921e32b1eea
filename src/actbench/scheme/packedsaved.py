from __future__ import annotations

from actbench.model.records import Site
from actbench.packing import SavedTensors
from actbench.packing.hooked import HookedForward, Hooks
from actbench.packing.hooked.forward import Probing
from actbench.packing.wrapped import Rules
from actbench.scheme.base import NOTHING_PACKED, Scheme
from actbench.scheme.setup import Part, TrainingSetup


def with_packed_saved_tensors(
    scheme: Scheme,
    setup: TrainingSetup,
    packer: SavedTensors,
    becomes: str,
    *,
    bits: float = 8,
    rules: Rules | None = None,
    probing: Probing | None = None,
) -> TrainingSetup:
    """Return a setup whose model packs whatever it saves for backward by a packer, with saved-tensor hooks.

    Args:
        scheme: The scheme that changes the model.
        setup: The setup of the model.
        packer: Packs each tensor that autograd saves.
        becomes: What the model's site reports.
        bits: Bits of an element at first, for a codec that reads them from the site.
        rules: Functions of torch that are replaced while the model runs, by ones that save less; None for nothing.
        probing: Allocates bits to the sites, or None.

    Raises:
        NothingToConvertError: The model has nothing to train.
        ConversionError: It packs or offloads its saved tensors already, or is compiled.
    """
    hooks = Hooks(packer, bits, rules or {}, whole_model=not setup.path)
    HookedForward.bind_on(scheme.name, setup.module, hooks, probing)
    site = Site(path="", was=type(setup.module).__name__, becomes=becomes)
    return setup.changed(setup.module, (site,), by=Part(scheme.spec, acts=packer, idle=NOTHING_PACKED))
