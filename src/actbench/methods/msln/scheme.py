from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import nn

from actbench.errors import NothingToConvertError
from actbench.methods.msln.outputnorm import VALUES, from_output, is_norm, what_else, why_not
from actbench.model.gradient import Gradient
from actbench.model.records import Site, Unreached
from actbench.packing.refusals import refuse_compiled
from actbench.packing.replacement import census, overwritten, reasons, swap
from actbench.scheme.base import Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, LossyForward
from actbench.scheme.setup import Part, TrainingSetup


class MemorySharingNorms(Scheme):
    """Norms save their output, which the next linear layers save anyway, in place of their input.

    Paper: Yang et al., "Reducing Fine-Tuning Memory Overhead by Approximate and Memory-Sharing Backpropagation", arXiv
    2406.16282 (ICML 2024), its memory-sharing layer norm and RMS norm (MS-LN, MS-RMSNorm).
    Kept for backward: the output, and one number a row. If a linear layer saves the same tensor, the memory of the
    input is freed; if none does (a residual sum after the norm, a layer that packs, a cast by autocast), it is not.
    The forward pass is exact, and so are the gradients up to rounding: the normalised input is computed as (y - b) / w.
    This would fail for a norm with a weight below 2**-10 or below a 64th of its bias. Such a norm saves its input: in
    all passes if it is so at conversion, else in the passes in which training has made it so. Each pass reads the
    weights for this, and waits for the device.
    Converted are ``nn.LayerNorm``, ``nn.RMSNorm`` and layers of other classes, such as those of transformers and timm,
    if a test run shows that they compute the same.
    Not reproduced: the authors fold w and b into the next layer, which changes the keys and values of a state_dict.

    Attributes:
        cast: Whether norms under autocast return and save their output in autocast's type. Linear layers then save that
            tensor, and not a copy each. Other readers of the output, such as a residual sum after the norm, get it
            rounded to that type. Without autocast nothing changes.
    """

    name: ClassVar[str] = "msln"
    card: ClassVar[Card] = Card(
        summary="layer and RMS norms save their output, which linear layers save too, instead of their input",
        paper="Yang et al. 2024, arXiv 2406.16282",
    )
    gradient: ClassVar[Gradient] = "exact"

    cast: bool = False

    @property
    def facets(self) -> Iterable[Facet]:
        """Readers of a norm's output other than linear layers get the output rounded."""
        return (LossyForward(),) if self.cast else ()

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace norms.

        Raises:
            NothingToConvertError: No norm can be replaced.
            ConversionError: The model is compiled.
        """
        refuse_compiled(setup.module, *VALUES)
        written, sites, unreached = overwritten(setup.module), list[Site](), list[Unreached]()

        def rule(layer: nn.Module, path: str) -> nn.Module | None:
            kind = type(layer).__name__
            if not is_norm(layer):
                other = what_else(layer)
                if other is not None:
                    unreached.append(Unreached(path=path, kind=kind, reason=other))
                return None
            reason = why_not(layer) or (f"{written[layer]} writes over its output" if layer in written else None)
            if reason is not None:
                unreached.append(Unreached(path=path, kind=kind, reason=reason))
                return None
            sites.append(Site(path=path, was=kind, becomes="its output and 1 number a row"))
            return from_output(layer, casts=self.cast)

        model = swap(setup.module, rule)
        if not sites:
            held = reasons(unreached) or f"it holds {census(model)}"
            raise NothingToConvertError(f"{self.spec}: {type(model).__name__} has no norm to convert; {held}")
        return setup.changed(model, tuple(sites), tuple(unreached), by=Part(self.spec))
