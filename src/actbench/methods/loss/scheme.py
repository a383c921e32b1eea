from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import model_validator
from torch import nn

from actbench.errors import ConversionError, IdleError, NothingToConvertError
from actbench.methods.loss.chunkedloss import UNCOMPILABLE, DeferredHead
from actbench.methods.loss.keptlogits import KeptLogits
from actbench.methods.loss.ligerloss import LigerCrossEntropy, kernels
from actbench.methods.loss.params import Pieces
from actbench.model.records import Site
from actbench.ops.simulation import runs_triton
from actbench.packing.refusals import refuse_compiled
from actbench.packing.replacement import census
from actbench.scheme.base import Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import Part, TrainingSetup

_IDLE = (
    "no cross entropy is computed of the head's output alone; name another layer by head=, or leave chunked_loss out"
)


class ChunkedLoss(Scheme):
    """The cross entropy of a language model, for one piece of the tokens at a time: whole logits never exist.

    Paper: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv 2410.10989, section 3.2.
    Kept for backward: the input of the head, (tokens, width), in place of the logits, their float32 copy and their
    softmax, (tokens, classes) each. A piece has ``ceil(tokens / pieces)`` rows; the backward pass computes its logits
    again, one matrix product more than the three of the plain head. Loss and gradients equal those of the plain head to
    rounding, with ignored labels, label smoothing, soft caps and tied heads too. Outside of training the head is
    unchanged; in training the model's ``logits`` are computed only if something other than cross entropy reads them.
    Not reproduced: fused kernels, and gradients in the forward pass, which save that product but hold the gradient of
    the head's weight, in its type, through the whole backward pass. ``chunked_loss:liger`` has both.
    With ``keep_logits``, as in torchtune's ``CEWithChunkedOutputLoss``, the logits are kept too, in the type in which
    the head makes them: no product runs twice, and what is saved is their float32 copy and the softmax.

    Attributes:
        pieces: How many pieces the tokens of a batch are cut into; or liger for what the authors' kernels do, which
            choose the number, and take no soft caps. CUDA runs the kernels (``pip install "actbench[liger]"``); a CPU
            and a simulation compute the same with torch, in the buffers that Liger allocates.
        head: Path of the linear layer that makes the logits, if the model does not name it.
        keep_logits: Whether the logits are kept for the backward pass in place of being computed again.
    """

    name: ClassVar[str] = "chunked_loss"
    positional: ClassVar[str | None] = "pieces"
    card: ClassVar[Card] = Card(
        summary="cross entropy for one piece of the tokens at a time; the loss is the same to rounding",
        paper="Hsu et al. 2024, arXiv 2410.10989",
        rank=5,
        variants=(":8", ":32"),
        leading=(":8",),
        extras={"liger": "kernels of Liger on a GPU, for chunked_loss:liger"},
    )
    changes: ClassVar[tuple[Change, ...]] = ("loss",)

    pieces: Pieces = 8
    head: str = ""
    keep_logits: bool = False

    @model_validator(mode="after")
    def _own_pieces(self) -> Self:
        if self.keep_logits and self.pieces == "liger":
            raise ValueError("keep_logits=true goes with a number of pieces: Liger's kernels keep gradients")
        return self

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a forward on the layer that makes the logits.

        Raises:
            NothingToConvertError: The model does not name the layer, or the layer is no ``nn.Linear``.
            ConversionError: The model is compiled, or its loss is computed in pieces already.
            MeasurementError: The model is on CUDA, and Liger's kernels are not installed.
        """
        refuse_compiled(setup.module, *UNCOMPILABLE)
        path, layer = self._layer(setup.module)
        if DeferredHead.of(layer) is not None:
            raise ConversionError(
                f"chunked_loss: {path} makes its logits in pieces already; convert the original model"
            )
        if self.pieces == "liger":
            if runs_triton(next(layer.parameters())):
                kernels()
            bound, how = DeferredHead(layer, kind=LigerCrossEntropy), "as by Liger's kernels"
        elif self.keep_logits:
            bound, how = DeferredHead(layer, self.pieces, KeptLogits), f"in {self.pieces} pieces of kept logits"
        else:
            bound, how = DeferredHead(layer, self.pieces), f"in {self.pieces} pieces"
        bound.bind()
        site = Site(path=path, was=f"nn.{type(layer).__name__}", becomes=f"cross entropy {how}")
        part = Part(self.spec, acts=bound, idle=_IDLE, after=lambda: self._seen(bound))
        return setup.changed(setup.module, (site,), by=part)

    def _seen(self, bound: DeferredHead) -> tuple[str, ...]:
        """Return no warnings for a step that has run; raise an IdleError if it computed no loss in pieces."""
        if not bound.losses:
            raise IdleError(f"{self.spec} does nothing in a training step: {_IDLE}")
        return ()

    def _layer(self, module: nn.Module) -> tuple[str, nn.Module]:
        found: Any = None
        if self.head:
            found = dict(module.named_modules()).get(self.head)
        elif callable(own := getattr(module, "get_output_embeddings", None)):
            found = own()
        # exactly this class: a subclass, or a bound forward, may compute something else
        if type(found) is not nn.Linear or "forward" in vars(found):
            what = "no layer" if found is None else f"a {type(found).__name__}"
            which = f"head={self.head}" if self.head else "its output embeddings"
            raise NothingToConvertError(
                f"chunked_loss: {type(module).__name__} has {what} as {which}; name the nn.Linear that makes the "
                f"logits, such as chunked_loss,head=lm_head; it holds {census(module)}"
            )
        return next(path for path, each in module.named_modules() if each is found), found
