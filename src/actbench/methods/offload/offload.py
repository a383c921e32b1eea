from __future__ import annotations

from typing import ClassVar

from actbench.errors import ConversionError, NothingToConvertError
from actbench.model.gradient import Gradient
from actbench.model.records import Site
from actbench.packing.hooked import HookedForward
from actbench.packing.hooked.forward import OFFLOAD, OffloadedForward
from actbench.packing.refusals import refuse_compiled
from actbench.packing.wrapped import bind_entries
from actbench.scheme.base import SAVED_TENSORS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import Part, TrainingSetup

_IDLE = "no module of the model saves a tensor of 1 KiB or more; offload is for larger batches"


class Offload(Scheme):
    """Saved tensors wait in host memory for the backward pass.

    Paper: Rhu et al., "vDNN", arXiv 1602.08124.
    Kept for backward on the device: parameters, buffers, tensors below 1 KiB, and what the loss outside of the model
    saves. Gradients are exact. The tensors of a model on the CPU stay where they are.
    On CUDA copies run on a second stream, beside the computation: a tensor that leaves is held until the next leaves,
    and the backward pass fetches the next tensor ahead.
    Not reproduced: leaving the tensors of some layers on the device where copies would be slower.
    """

    name: ClassVar[str] = "offload"
    card: ClassVar[Card] = Card(
        summary="saved tensors wait in host memory for the backward pass; gradients are exact",
        paper="Rhu et al. 2016, arXiv 1602.08124",
        rank=40,
    )
    claims: ClassVar[tuple[str, ...]] = (SAVED_TENSORS,)
    gradient: ClassVar[Gradient] = "exact"

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind an offloading forward on the model.

        Raises:
            ConversionError: The model offloads or packs its saved tensors already, has nothing to train, or is
                compiled.
        """
        if not any(True for _ in setup.module.parameters()):
            kind = type(setup.module).__name__
            raise NothingToConvertError(f"offload: {kind} has no parameters, so it keeps nothing for a backward pass")
        if OffloadedForward.of(setup.module) is not None:
            raise ConversionError("offload: the model offloads its saved tensors already; convert the original model")
        if HookedForward.of(setup.module) is not None:
            raise ConversionError(
                "offload: the model packs its saved tensors by hooks, of which only the innermost run, so that offload "
                "would move none of them; gact:L3 moves what it has packed"
            )
        refuse_compiled(setup.module, *OFFLOAD)
        bound = OffloadedForward(setup.module)
        bound.bind()
        bind_entries(setup.module)
        site = Site(path="", was=type(setup.module).__name__, becomes="saved tensors in host memory")
        return setup.changed(setup.module, (site,), by=Part(self.spec, acts=bound.wrapper.packer, idle=_IDLE))
