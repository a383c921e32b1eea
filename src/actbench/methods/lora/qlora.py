"""QLoRA: adapters over frozen weights in few bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from actbench.errors import ConversionError
from actbench.methods.lora import lowrank
from actbench.methods.lora.frozenformats import FLAT_PARTS, FROZEN_FORMATS
from actbench.methods.lora.frozenlinear import FrozenLinear
from actbench.methods.lora.lowrank import Targets
from actbench.methods.lora.scheme import Lora
from actbench.model.provenance import Published
from actbench.model.records import Site, Unreached
from actbench.packing.replacement import swap
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, LossyForward
from actbench.scheme.setup import TrainingSetup


class QLora(Lora):
    """``lora`` over weights of 4 bits: NormalFloat codes, with a scale of 8 bits for each 64 of them.

    Paper: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314.
    The weights of all linear layers but the head, with adapters or without, are stored as
    :class:`~actbench.methods.formats.encodings.nf4.Nf4`, ``n / 2 + n / 64 + n / 4096`` bytes: 0.516 a parameter. Each
    forward and backward pass unpacks a weight to the type it computes in and frees it again; the unpacked weight is not
    saved. The forward pass uses the rounded weights. The rest is as in ``lora``: embeddings, norms, biases and the head
    keep their type. So do experts that transformers holds as stacks of matrices, three-dimensional parameters (Mixtral,
    Qwen3 MoE): they are most of such a model, and are listed as not converted.
    ``weights=`` names another format (:mod:`~actbench.methods.lora.frozenformats`): NF4 without double quantization,
    ``n / 2 + n / 16`` bytes; LLM.int8(), ``n + 4 d_out``; GPTQ and AWQ, ``0.52 n``. Only their bytes are those of these
    libraries: weights are rounded to the nearest, without calibration.
    Not reproduced: optimizer state that is paged to the host (``adam8bit:bnb,paged=true``), and the libraries' kernels:
    weights are unpacked by torch's operators, those of NF4 8 million at a time.

    Attributes:
        r: The rank.
        alpha: The factor of B A x, times r; twice the rank by default.
        dropout: The share of the inputs of A that is dropped.
        target: Names of the linear layers that get adapters; by default all but the head.
        adapter: What is put beside a layer, as in ``lora``; LoKr reads the weights' shape and is refused.
        dtype: Type of adapters beside half weights: float32, or that of the ``model``.
        modules_to_save: Ends of the paths of modules that are trained whole, as in ``lora``.
        weights: The format of the frozen weights.
        group: How many inputs share a scale of ``gptq`` or ``awq``; 0 for all, as in checkpoints of the largest models.
        prepared: Whether all other half parameters (norms, embeddings, biases, the head) become float32, as peft's
            ``prepare_model_for_kbit_training`` makes them. Packed layers then compute in the weights' own type and
            return the type of their inputs, as those of bitsandbytes do with ``bnb_4bit_compute_dtype``.
        storage: The type of the parameters that hold the codes: whole numbers, or that of the ``model``, of the same
            bits (bitsandbytes' ``bnb_4bit_quant_storage``). Then FSDP1 lays them in one vector with the norms and
            biases of a block, and each process keeps the scales of all weights.
    """

    name: ClassVar[str] = "qlora"
    card: ClassVar[Card] = Card(
        summary="lora on frozen weights of 4 bits (NF4, double quantization)",
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
        extras={"peft": "adapters of peft"},
    )

    weights: Literal["nf4", "nf4_single", "int8", "gptq", "awq"] = "nf4"
    group: Annotated[int, Field(ge=0, multiple_of=8)] = 128
    prepared: bool = False
    storage: Literal["packed", "model"] = "packed"

    @model_validator(mode="after")
    def _packable(self) -> Self:
        if self.adapter == "lokr":
            raise ValueError("adapter=lokr is for whole weights: take lora")
        if self.group != 128 and self.weights not in ("gptq", "awq"):
            raise ValueError(f"group={self.group} is for weights=gptq and awq, not {self.weights}")
        if self.storage == "model" and self.weights not in FLAT_PARTS:
            raise ValueError(f"storage=model is for weights={'/'.join(FLAT_PARTS)}, not {self.weights}")
        if self.prepared and self.weights == "gptq":
            raise ValueError("prepared=true: peft leaves a model of weights=gptq as it is")
        if self.prepared and self.only:
            raise ValueError(
                "prepared=true casts the whole model: a part in float32 would pass float32 to layers of another type; "
                "leave out only=, or prepared=true"
            )
        return self

    @property
    def facets(self) -> Iterable[Facet]:
        """Weights are rounded, and a model has to have linear layers that can get adapters."""
        return *super().facets, LossyForward()

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Freeze the model, put adapters on its linear layers, and store the weights of these in few bits.

        Raises:
            NothingToConvertError: No such layer is found.
            ConversionError: As for ``lora``; or a width is not one that the format stores.
            MeasurementError: peft is not installed.
        """
        changed = super().change(setup)
        if self.prepared:
            _to_float32(changed.module)
        return changed

    def _check(self, targets: Targets) -> None:
        if self.weights in ("gptq", "awq"):
            for path, layer in targets.layers.items():
                weight: Any = layer.weight
                if any(width % 8 for width in weight.shape):
                    shape = " x ".join(map(str, weight.shape))
                    raise ConversionError(
                        f"qlora: weights={self.weights} stores widths that are multiples of 8; {path} is {shape}"
                    )

    def _settled(self, model: nn.Module, targets: Targets) -> nn.Module:
        layers, encoding = set(targets.layers.values()), FROZEN_FORMATS[self.weights]
        if self.weights in ("gptq", "awq"):
            encoding = encoding.model_copy(update={"group_size": self.group})
        for part in lowrank.adapters(model):
            # peft looks both up on the layer, where an attribute of the object goes before its class
            vars(part).update(merge=lowrank.refuse_merging, _cast_input_dtype=_cast_outside_autocast)
        flat = FLAT_PARTS[self.weights] if self.storage == "model" else None

        def packed(layer: nn.Module, path: str) -> nn.Module | None:
            if layer not in layers:
                return None
            try:
                return FrozenLinear(layer, encoding, own_type=self.prepared, flat=flat)
            except ValueError as error:
                raise ConversionError(f"{self.spec}: {path}: {error}") from None

        return super()._settled(swap(model, packed), targets)

    def _left(self, path: str, module: nn.Module) -> Unreached:
        values = [value for _, value in lowrank.stacked(module)]
        left, types = super()._left(path, module), sorted({str(value.dtype).removeprefix("torch.") for value in values})
        reason = f"{left.reason}, and not in {self._bits} but in {' and '.join(types)}"
        return left.model_copy(update={"reason": reason, "weights_bytes": sum(value.nbytes for value in values)})

    def _sites(self, targets: Targets) -> list[Site]:
        plain = [path for path in targets.layers if path not in targets.adapted]
        found = [
            site.model_copy(update={"becomes": f"{self._bits}, {site.becomes}"}) for site in super()._sites(targets)
        ]
        return found + [
            Site(path=path, was=type(targets.layers[path]).__name__, becomes=f"{self._bits}, frozen") for path in plain
        ]

    @property
    def _bits(self) -> str:
        return "8 bits" if self.weights == "int8" else "4 bits"


def _cast_outside_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the input of an adapter in the adapter's type, as peft's layers over packed weights do (Linear4bit)."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(dtype)


def _to_float32(model: nn.Module) -> None:
    """Cast what is still of a half type, in place; packed weights have types of their own."""
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            # with storage=model a ParameterList holds codes under a half type, which a cast would destroy
            if parameter.dtype in (torch.float16, torch.bfloat16) and not isinstance(part, nn.ParameterList):
                # the object stays, for optimizers and tied modules that know it
                parameter.data = parameter.data.float()
