from __future__ import annotations

from typing import ClassVar

from actbench.errors import NothingToConvertError
from actbench.methods.liger.forwards import UNCOMPILABLE, FusedMlp, FusedNorm, FusedRotary, fused
from actbench.methods.liger.functions import kernels
from actbench.model.gradient import Gradient
from actbench.model.records import Site
from actbench.ops.simulation import runs_triton
from actbench.packing.refusals import refuse_compiled
from actbench.packing.replacement import census
from actbench.scheme.base import Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import Part, TrainingSetup

_BECOMES = {
    FusedNorm: "its input and 1 number a row",
    FusedMlp: "gate and up alone",
    FusedRotary: "rotary embedding in place",
}


class Liger(Scheme):
    """RMS norms, gated MLPs and rotary embeddings save and write what Liger's kernels do.

    Paper: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv 2410.10989, section 3.2.
    Kept for backward: of an RMS norm its input, in its own type, and one float32 number a row; of silu(gate) up the
    tensors gate and up; of the rotary embedding its cosines and sines. Gradients are written in place of what is no
    longer needed: that of a norm's input over that of its output, those of gate and up over these, and queries and keys
    are turned in place. So hooks that keep the results of these layers see them overwritten.
    On CUDA Liger's kernels run: ``pip install "actbench[liger]"``. A CPU and a simulation compute the same with torch,
    in the buffers that Liger allocates, without the package: bytes are Liger's, and times are estimates. On a CPU the
    forward pass is exact to the bit, on CUDA to rounding; gradients equal the plain ones to rounding. A norm returns
    the type of its input, as the kernel does, also where the weight has a wider one, as under autocast.
    Found are RMS norms and rotary embeddings by what they compute, and MLPs of the Llama family by their code.
    The loss is ``chunked_loss:liger``.
    Not reproduced: layer norm, GeGLU, and a gradient of a norm's output that is overwritten though others read it.
    """

    name: ClassVar[str] = "liger"
    card: ClassVar[Card] = Card(
        summary="RMS norms, SwiGLU and rotary embeddings that save what Liger's kernels save; exact to rounding",
        paper="Hsu et al. 2024, arXiv 2410.10989",
        variants=(),  # torch computes in a simulation, and is slower than the kernels
        rank=8,
        extras={"liger": "kernels of Liger on a GPU"},
    )
    gradient: ClassVar[Gradient] = "exact"

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind forwards.

        Raises:
            NothingToConvertError: The model has nothing that the kernels compute.
            ConversionError: The model is compiled.
            MeasurementError: The model is on CUDA, and Liger is not installed.
        """
        module = setup.module
        refuse_compiled(module, *UNCOMPILABLE)
        if any(map(runs_triton, module.parameters())):
            kernels("rms_norm")
        found = {path: bound for path, part in module.named_modules() if (bound := fused(part)) is not None}
        if not found:
            raise NothingToConvertError(
                f"{self.spec}: {type(module).__name__} has no RMS norm, and no gated MLP or rotary embedding of "
                f"transformers' Llama family; it holds {census(module)}"
            )
        for bound in found.values():
            bound.bind()
        sites = tuple(
            Site(path=path, was=type(bound.module).__name__, becomes=_BECOMES[type(bound)])
            for path, bound in found.items()
        )
        return setup.changed(module, sites, by=Part(self.spec))
