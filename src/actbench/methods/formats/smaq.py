from __future__ import annotations

from typing import ClassVar

from actbench.methods.formats import encodings
from actbench.methods.formats.encodings import Encoding, SmaqParameters
from actbench.methods.formats.structures import EncodedStructures
from actbench.model.provenance import Published
from actbench.scheme.card import Card

_SETTING = "ResNet-34, CIFAR-10, all five structures, 6 and 8 bits, simulated by the authors; float32 gets 0.892"
_SOURCE = "README of github.com/jiashenC/smart-quantization"


class Smaq(SmaqParameters, EncodedStructures):
    """SmaQ, stored packed: few bits near the mean of a block, more for its outliers; for each structure separately.

    Paper: Shoghi et al., "SmaQ: Smart Quantization for DNN Training by Exploiting Value Clustering", IEEE CAL 20(2),
    2021, DOI 10.1109/LCA.2021.3108505.
    Kept for backward: with ``activations``, each saved floating-point tensor packed by hooks, and masks in 1 bit.
    With ``state`` the optimizer's moments are packed, with ``gradients`` the gradients that wait for the step.
    ``weights`` and gradient ``maps`` are simulated: rounded to the format, but not stored in it.
    Not reproduced: statistics of a whole tensor or of a sample, and batch norms scaled by their weights; take
    ``encode:smaq_simulated`` for the authors' quantizer. Outputs of blocks and containers are not quantized again.

    Attributes:
        on: Which data structures; those that save most memory are activations and optimizer state.
        forward: exact, or lossy as in the authors' code: modules compute on quantized outputs.
        main_bits: Bits of a number that is no outlier, 3 to 8.
        outlier_bits: Bits of an outlier, ``main_bits`` to 8.
        outliers: Share of outliers in a block, 0 to 1; ``outliers * block`` must be whole.
        block: Elements of a block, a multiple of 32 from 64 to 1024.
        rounding: Stochastic, without bias, or to the nearest; weights are always rounded stochastically.
    """

    name: ClassVar[str] = "smaq"
    card: ClassVar[Card] = Card(
        summary="saved tensors and optimizer state in SmaQ, packed; also gradients, maps and weights",
        paper="Shoghi et al. 2021, DOI 10.1109/LCA.2021.3108505",
        published=(Published(quantity="accuracy", value=0.8474, setting=_SETTING, source=_SOURCE),),
        rank=20,
        variants=(",on=activations", ",on=state", ""),
        leading=(),
    )

    @property
    def number_format(self) -> Encoding:
        """SmaQ with these parameters."""
        return encodings.Smaq(**self.model_dump(include=set(SmaqParameters.model_fields)))
