from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt, field_validator
from torch import nn

from actbench.methods.formats import encodings
from actbench.methods.lora import lowrank
from actbench.methods.lora.frozenlinear import FrozenLinear
from actbench.methods.lora.lowrank import Targets
from actbench.model.provenance import Published
from actbench.model.records import Site, Unreached
from actbench.packing.replacement import swap
from actbench.scheme.base import Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, LossyForward
from actbench.scheme.setup import TrainingSetup

_READ = "its parent reads its weight and does not call it outside of training; it stays frozen"


class Lora(Scheme):
    """The model is frozen; only low-rank matrices beside the weights of its linear layers are trained.

    Paper: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685; by peft, an optional
    package: ``pip install "actbench[peft]"``.
    A layer computes ``W x + b + (alpha / r) B A x`` with A, (r, d_in), drawn as peft does, and B, (d_out, r), of zeros:
    the first forward pass equals that of the plain model. Trained are A and B, ``r (d_in + d_out)`` numbers a layer,
    and a whole classifier (peft's ``modules_to_save``, which keeps a frozen copy beside it); all else is frozen, also
    embeddings, norms, biases and the head of a language model. Only trained parameters have gradients and optimizer
    state. About as much is saved for backward as without the scheme: inputs of layers are saved for A in place of W.
    Adapters of bfloat16 and float16 models are float32, as ``peft.get_peft_model`` makes them, and save their inputs in
    that type: add ``checkpoint`` or a scheme for saved tensors.
    Not reproduced: merged weights for inference, which peft makes of a saved adapter.

    Attributes:
        r: The rank.
        alpha: The factor of B A x, times r; twice the rank by default.
        dropout: The share of the inputs of A that is dropped.
        target: Names of the linear layers that get adapters, such as ``q_proj/v_proj``; by default all but the head.
    """

    name: ClassVar[str] = "lora"
    positional: ClassVar[str | None] = "r"
    card: ClassVar[Card] = Card(
        summary="low-rank matrices next to frozen weights (peft): few parameters are trained",
        paper="Hu et al. 2021, arXiv 2106.09685",
        published=(
            Published(
                quantity="peak_saving",
                value=1 - 350 / 1200,
                setting="GPT-3 175B, r = 4 on query and value, Adam, 1.2 TB",
                source="arXiv 2106.09685, section 4.2",
            ),
        ),
        rank=3,
        variants=(":16",),  # the usual rank
        libraries=("peft", "actbench.methods.lora.adaptercaches"),
    )
    claims: ClassVar[tuple[str, ...]] = ("freeze a model and put adapters on it",)
    changes: ClassVar[tuple[Change, ...]] = ("parameters",)

    r: PositiveInt = 16
    alpha: Annotated[float, Field(gt=0)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target: tuple[str, ...] = ()

    @field_validator("target")
    @classmethod
    def _names(cls, target: tuple[str, ...]) -> tuple[str, ...]:
        if "" in target:
            raise ValueError("names of linear layers stand between the /, such as target=q_proj/v_proj")
        return target

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Freeze the model, and put adapters on its linear layers.

        Raises:
            NothingToConvertError: No such layer is found.
            ConversionError: The model is compiled, or holds adapters already.
            MeasurementError: peft is not installed.
        """
        targets = lowrank.find(setup.module, self.target, self.name, whole_model=not setup.path)
        alpha = 2 * self.r if self.alpha is None else self.alpha
        model = lowrank.adapt(setup.module, targets, self.name, r=self.r, alpha=alpha, dropout=self.dropout)
        model = self._settled(model, targets)
        left = [Unreached(path=path, kind="linear layer", reason=_READ) for path in targets.passed_by]
        left += [self._left(path, part) for path, part in targets.stacks.items()]
        return setup.changed(model, tuple(self._sites(targets)), tuple(left))

    def _settled(self, model: nn.Module, targets: Targets) -> nn.Module:
        """Return the model with adapters in the form that is trained."""
        return model

    def _left(self, path: str, module: nn.Module) -> Unreached:
        """Return why a module with stacks of matrices has no adapters."""
        names = " and ".join(name for name, _ in lowrank.stacked(module))
        reason = f"its {names}: matrices in a stack, not in linear layers; frozen without an adapter"
        return Unreached(path=path, kind=type(module).__name__, reason=reason)

    def _sites(self, targets: Targets) -> list[Site]:
        found = [
            Site(path=path, was=type(targets.layers[path]).__name__, becomes=f"frozen, adapters of rank {self.r}")
            for path in targets.adapted
        ]
        if targets.head:
            found.append(Site(path=targets.head, was="classifier", becomes="trained whole; a frozen copy is kept"))
        return found


class QLora(Lora):
    """``lora`` over weights of 4 bits: NormalFloat codes, with a scale of 8 bits for each 64 of them.

    Paper: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314.
    The weights of all linear layers but the head, with adapters or without, are stored as
    :class:`~actbench.methods.formats.encodings.nf4.Nf4`, ``n / 2 + n / 64 + n / 4096`` bytes: 0.516 a parameter. Each
    forward and backward pass unpacks a weight to the type it computes in and frees it again; the unpacked weight is not
    saved. The forward pass uses the rounded weights. The rest is as in ``lora``: embeddings, norms, biases and the head
    keep their type. So do experts that transformers holds as stacks of matrices, three-dimensional parameters (Mixtral,
    Qwen3 MoE): they are most of such a model, and are listed as not converted.
    Not reproduced: optimizer state that is paged to the host, and bitsandbytes' kernels: weights are unpacked by
    torch's operators, 8 million at a time.

    Attributes:
        r: The rank.
        alpha: The factor of B A x, times r; twice the rank by default.
        dropout: The share of the inputs of A that is dropped.
        target: Names of the linear layers that get adapters; by default all but the head.
    """

    name: ClassVar[str] = "qlora"
    card: ClassVar[Card] = Card(
        summary="lora over frozen weights of 4 bits (NF4, double quantization)",
        paper="Dettmers et al. 2023, arXiv 2305.14314",
        published=(
            Published(
                quantity="peak_saving",
                value=1 - 48 / 780,
                setting="LLaMA 65B, paged Adam, more than 780 GB in 16 bits and less than 48 GB",
                source="arXiv 2305.14314, abstract",
            ),
        ),
        rank=3,
        variants=(":16",),  # the usual rank
        libraries=("peft", "actbench.methods.lora.adaptercaches"),
    )

    @property
    def facets(self) -> Iterable[Facet]:
        """Weights are rounded."""
        return (LossyForward(),)

    def _settled(self, model: nn.Module, targets: Targets) -> nn.Module:
        layers, encoding = set(targets.layers.values()), encodings.build("nf4")
        for part in lowrank.adapters(model):
            vars(part)["merge"] = lowrank.refuse_merging
        return swap(model, lambda layer, _: FrozenLinear(layer, encoding) if layer in layers else None)

    def _left(self, path: str, module: nn.Module) -> Unreached:
        values = [value for _, value in lowrank.stacked(module)]
        left, types = super()._left(path, module), sorted({str(value.dtype).removeprefix("torch.") for value in values})
        reason = f"{left.reason}, and not in 4 bits but in {' and '.join(types)}"
        return left.model_copy(update={"reason": reason, "weights_bytes": sum(value.nbytes for value in values)})

    def _sites(self, targets: Targets) -> list[Site]:
        plain = [path for path in targets.layers if path not in targets.adapted]
        found = [site.model_copy(update={"becomes": f"4 bits, {site.becomes}"}) for site in super()._sites(targets)]
        return found + [
            Site(path=path, was=type(targets.layers[path]).__name__, becomes="4 bits, frozen") for path in plain
        ]
