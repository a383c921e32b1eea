from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.errors import ConversionError
from actbench.methods.formats.optim.optimizers import check_fresh
from actbench.methods.lowbit.lowbitadam import Twin, blockwise_adam, bnb_adam, few_bits_adam
from actbench.methods.lowbit.params import Library
from actbench.model.provenance import Published
from actbench.model.records import Site, Unreached
from actbench.scheme.base import OPTIMIZER_STATE, Change, Scheme, refuse_untrained
from actbench.scheme.card import Card
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Facet, OwnOptimizer
from actbench.scheme.setup import Part, TrainingSetup

_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")
_STATE = "optimizer state"
_COMPILED = "torch compiles its step on CUDA; simulated for CUDA it is one kernel a parameter, without temporaries"
_PAGED = "paged moments are counted as host memory; on CUDA the driver keeps what fits on it, on a CPU nothing moves"
_UNSHARDED = (
    "adam8bit:bnb: parameters would be DTensors, which bitsandbytes' operators do not take; take adam8bit of torchao, "
    "or smaq,on=state"
)
_SOURCE = "README of torchao.optim"
_TORCHAO = {"torchao": "optimizers of torchao"}
_SETTING = "ViT-H fine-tuned on RESISC45, AdamW 12.23 GB"


class _LowBitAdam(Scheme):
    """Replaces torch's optimizer by one of another library; a subclass gives the docstring and the names."""

    suffix: ClassVar[str] = ""
    becomes: ClassVar[str] = ""
    changes: ClassVar[tuple[Change, ...]] = ("optimizer",)
    claims: ClassVar[tuple[str, ...]] = (OPTIMIZER_STATE,)

    bf16_stochastic_round: bool = False

    @property
    def facets(self) -> Iterable[Facet]:
        """An optimizer of the library."""
        options = ", bf16_stochastic_round=True" if self.bf16_stochastic_round else ""
        code = f"{self._class_name.replace('AdamW', '{kind}')}(trained, lr={{rate}}{options})"
        return (
            OwnOptimizer(code, rounds_by_chance=self.bf16_stochastic_round if self._library == "torchao" else None),
        )

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace the setup's optimizer by one with moments of few bits.

        Raises:
            NothingToConvertError: Nothing is trained.
            MeasurementError: The library is not installed.
        """
        refuse_untrained(self.name, setup.module)
        make = setup.make_optimizer
        if make is None:
            reason = f"the optimizer is not part of the model; make {self._class_name} of its parameters"
            return setup.changed(setup.module, (), (Unreached(path="", kind=_STATE, reason=reason),))
        twin = self._twin()

        def make_in_few_bits(module: torch.nn.Module) -> torch.optim.Optimizer:
            return _in_few_bits(self.spec, self._library, make(module), twin)

        site = Site(path=f"({_STATE})", was=_STATE, becomes=self._becomes)
        changed = setup.changed(setup.module, (site,), by=Part(self.spec))
        told = self._warning(next(setup.module.parameters()))
        warnings = (*changed.warnings, f"{self.name}: {told}") if told else changed.warnings
        return replace(changed, make_optimizer=make_in_few_bits, warnings=warnings)

    @property
    def _library(self) -> str:
        return "torchao"

    @property
    def _class_name(self) -> str:
        return f"torchao.optim.AdamW{self.suffix}"

    @property
    def _becomes(self) -> str:
        return self.becomes

    def _warning(self, parameter: Tensor) -> str:
        """Return a warning about the figures of a parameter on this device, fake or real; empty for none."""
        return _COMPILED if isinstance(parameter, FakeTensor) else ""

    def _twin(self) -> Twin:
        """Return what makes the optimizer; raise a MeasurementError if its library is not installed."""
        return few_bits_adam(self.name, self.suffix, bf16_stochastic_round=self.bf16_stochastic_round)


class Adam8bit(_LowBitAdam):
    """Adam and AdamW keep both moments in 8 bits: torchao's or bitsandbytes' optimizers in place of torch's.

    Paper: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861; by torchao or, as
    ``adam8bit:bnb``, by the authors' bitsandbytes, optional packages: ``pip install "actbench[torchao]"`` or
    ``"actbench[bitsandbytes]"``.
    Kept from step to step, for each parameter of at least 4,096 elements: two codes of 8 bits an element and a float32
    scale for each 256 of them. torchao adds 1 KiB of levels for each moment, and takes only multiples of 256 elements;
    bitsandbytes adds 2 KiB of levels for all moments. Smaller parameters keep moments in their own type, with
    bitsandbytes in float32. Gradients are bit for bit those without the scheme; updates come from rounded moments. On
    CUDA bitsandbytes' step is one kernel a parameter; torchao's is compiled by torch, and a simulation for CUDA counts
    no temporaries of it. On a CPU both run operator by operator, with temporaries of the largest parameter in float32.
    Not reproduced: stable embeddings.

    Attributes:
        bf16_stochastic_round: Whether torchao rounds weights of bfloat16 up or down by chance, so that small updates
            are kept on average; to the nearest, they are lost.
        library: torchao, or bnb for bitsandbytes; both names of it are taken.
        paged: With bnb on CUDA, moments of parameters of at least 100,000 elements are in memory that the driver moves
            between device and host as it is read, outside of torch's allocator. On a CPU nothing moves.
    """

    name: ClassVar[str] = "adam8bit"
    positional: ClassVar[str | None] = "library"
    card: ClassVar[Card] = Card(
        summary="Adam and AdamW with moments of 8 bits (torchao, or bnb: bitsandbytes); gradients are exact",
        paper="Dettmers et al. 2021, arXiv 2110.02861",
        published=(Published(quantity="peak_saving", value=1 - 8.33 / 12.23, setting=_SETTING, source=_SOURCE),),
        rank=50,
        extras=_TORCHAO | {"bitsandbytes": "optimizers of bitsandbytes, for adam8bit:bnb"},
        is_example=True,
    )

    suffix: ClassVar[str] = "8bit"
    becomes: ClassVar[str] = "8 bits, a scale for each 256 elements"

    library: Library = "torchao"
    paged: bool = False

    @model_validator(mode="after")
    def _pages(self) -> Self:
        if self.paged and self.library != "bnb":
            raise ValueError("paged=true is an option of bitsandbytes' optimizer: adam8bit:bnb,paged=true")
        if self.bf16_stochastic_round and self.library == "bnb":
            raise ValueError("bitsandbytes rounds to the nearest; take torchao: adam8bit,bf16_stochastic_round=true")
        return self

    @property
    def facets(self) -> Iterable[Facet]:
        """The optimizer; bitsandbytes' state, but not torchao's, does not go with FSDP2."""
        yield from super().facets
        if self.library == "bnb":
            yield Limits(unsharded=_UNSHARDED)

    @property
    def _library(self) -> str:
        return "bitsandbytes" if self.library == "bnb" else super()._library

    @property
    def _class_name(self) -> str:
        paged = "Paged" if self.paged else ""
        return f"bitsandbytes.optim.{paged}AdamW8bit" if self.library == "bnb" else super()._class_name

    @property
    def _becomes(self) -> str:
        return f"{self.becomes}, paged" if self.paged else self.becomes

    def _warning(self, parameter: Tensor) -> str:
        if self.library != "bnb":
            return super()._warning(parameter)
        return _PAGED if self.paged else ""

    def _twin(self) -> Twin:
        if self.library != "bnb":
            return super()._twin()
        bnb_adam()  # raises at once if the library is missing
        return functools.partial(blockwise_adam, paged=self.paged)


class Adam4bit(_LowBitAdam):
    """Adam and AdamW keep both moments in 4 bits: torchao's ``Adam4bit`` and ``AdamW4bit`` in place of torch's.

    Paper: Li et al., "Memory Efficient Optimizers with 4-bit States", arXiv 2309.01507; by torchao.
    Kept from step to step, for each parameter of at least 4,096 elements, a multiple of 128: two codes of 4 bits an
    element, a float32 scale for each 128 of them, and 64 bytes of levels for each moment. The rest is as in
    ``adam8bit``.
    Not reproduced: rank-1 normalization of the second moment.

    Attributes:
        bf16_stochastic_round: Whether weights of bfloat16 are rounded up or down by chance, as in ``adam8bit``.
    """

    name: ClassVar[str] = "adam4bit"
    card: ClassVar[Card] = Card(
        summary="Adam and AdamW with moments of 4 bits (torchao); gradients are exact",
        paper="Li et al. 2023, arXiv 2309.01507",
        published=(Published(quantity="peak_saving", value=1 - 7.72 / 12.23, setting=_SETTING, source=_SOURCE),),
        rank=50,
        extras=_TORCHAO,
    )
    suffix: ClassVar[str] = "4bit"
    becomes: ClassVar[str] = "4 bits, a scale for each 128 elements"


class AdamFp8(_LowBitAdam):
    """Adam and AdamW keep both moments as 8-bit floats: torchao's ``AdamFp8`` and ``AdamWFp8`` in place of torch's.

    Kept from step to step, for each parameter of at least 4,096 elements, a multiple of 256: two e4m3 floats an element
    and a float32 scale for each 256 of them. The rest is as in ``adam8bit``.

    Attributes:
        bf16_stochastic_round: Whether weights of bfloat16 are rounded up or down by chance, as in ``adam8bit``.
    """

    name: ClassVar[str] = "adamfp8"
    card: ClassVar[Card] = Card(
        summary="Adam and AdamW with moments of 8-bit floats (torchao); gradients are exact",
        rank=50,
        extras=_TORCHAO,
    )
    suffix: ClassVar[str] = "Fp8"
    becomes: ClassVar[str] = "8-bit floats, a scale for each 256 elements"


def _in_few_bits(scheme: str, library: str, optimizer: torch.optim.Optimizer, twin: Twin) -> torch.optim.Optimizer:
    """Return another library's optimizer for the parameters, groups and options of torch's."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConversionError(
            f"{scheme}: the optimizer is {type(optimizer).__name__}; {library} has a twin of torch.optim.Adam "
            "and AdamW only: --optimizer adamw"
        )
    check_fresh(optimizer, "let make_optimizer make a fresh one")
    for group in optimizer.param_groups:
        for option in _REFUSED:
            if group.get(option):
                raise ConversionError(
                    f"{scheme}: the optimizer has {option}=True, which the optimizer of {library} does not take"
                )
    return twin(optimizer)
