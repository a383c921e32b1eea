from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn

from actbench.errors import ConversionError
from actbench.methods.parallel.ddp import DataParallel
from actbench.model.records import Site
from actbench.packing.blocks import blocks, repeated
from actbench.packing.refusals import refuse_compiled_around
from actbench.scheme.base import PRECISION, Change, refuse_untrained
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, LossyForward, LowPrecision
from actbench.scheme.setup import Part, TrainingSetup

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FullySharded(DataParallel):
    """Each process holds a share of parameters, gradients and optimizer state.

    Attributes:
        ranks: How many processes there are.
        mixed: The type in which parameters are gathered and blocks compute (bf16, fp16); none is the parameters' own.
        reduce: The type in which gradients are added up where ``mixed`` is given: fp32, or the same as ``mixed``.
    """

    mixed: Literal["none", "bf16", "fp16"] = "none"
    reduce: Literal["fp32", "same"] = "fp32"

    @model_validator(mode="after")
    def _reduces_what_is_mixed(self) -> Self:
        if self.reduce == "same" and self.mixed == "none":
            raise ValueError("reduce=same is about the type that mixed= gives; add mixed=bf16, or leave reduce= out")
        return self

    @property
    def changes(self) -> tuple[Change, ...]:
        """Where parameters are, and with ``mixed`` the type of the computation."""
        return super().changes if self.mixed == "none" else (*super().changes, "precision")

    @property
    def claims(self) -> tuple[str, ...]:
        """Only one scheme may shard over data-parallel processes, and only one may set the type of computation."""
        return super().claims if self.mixed == "none" else (*super().claims, PRECISION)

    @property
    def facets(self) -> Iterable[Facet]:
        """With ``mixed``, weights are rounded where they are gathered; gradients of float16 vanish unscaled."""
        yield from super().facets
        if self.mixed != "none":
            yield LossyForward()
            yield LowPrecision("bfloat16" if self.mixed == "bf16" else "float16", scales_loss=self.mixed == "fp16")

    @property
    def _types(self) -> dict[str, Any]:
        """The types of gathered parameters and of reduced gradients, where they are not the parameters' own."""
        if self.mixed == "none":
            return {}
        half = _HALVES[self.mixed]
        return {"param_dtype": half, "reduce_dtype": half if self.reduce == "same" else torch.float32}

    def _units(self, setup: TrainingSetup, kind: Literal["FSDP1", "FSDP2"]) -> list[nn.Module]:
        """Return the blocks of the model, or raise a ConversionError where it cannot be shared out by ``kind``."""
        refuse_untrained(self.name, setup.module)
        if setup.limits.unsharded:
            raise ConversionError(f"{self.spec} ({kind}) does not go with {setup.limits.unsharded}")
        if self.mixed != "none" and setup.precision.autocast is not None:
            raise ConversionError(f"{self.spec}: the step runs under autocast; leave mixed= or autocast out")
        units = [unit for _, unit in blocks(setup.module) or repeated(setup.module)]
        refuse_compiled_around(setup.module, units, f"{self.spec} ({kind})")
        return units

    def _divided(self, setup: TrainingSetup, module: nn.Module, units: list[nn.Module], kept: str) -> TrainingSetup:
        """Return the setup with ``module``, whose site names the units' classes."""
        names = sorted({type(unit).__name__ for unit in units})
        of = f", gathered by {' and '.join(names)}" if names else ", gathered as one"
        site = Site(
            path="(parameters)", was=type(setup.module).__name__, becomes=f"{kept} of {self.ranks} processes{of}"
        )
        return setup.changed(module, (site,), by=Part(self.spec))


class Fsdp(FullySharded):
    """Each process holds a share of parameters, gradients and optimizer state, and gathers a block where it runs.

    Paper: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277, after
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054 (stage
    3); by torch's ``fully_shard`` (FSDP2).
    Kept by each process: ``ceil(rows / ranks)`` rows of each parameter, of its gradient and of its state. A block's
    parameters are gathered before its forward pass, freed after it and gathered again for its backward pass; parameters
    outside of blocks (embeddings, the last norm, the head) are gathered from the first forward pass to the end of the
    backward pass. Buffers hold the parameters that are being gathered and the gradients that are being reduced.
    The batch size is that of one process. Gradients are the mean over processes, exact to rounding; with ``mixed``
    weights are rounded to half precision when they are gathered.

    Attributes:
        ranks: How many processes there are.
        reshard: Whether a block's parameters are freed between forward and backward pass; with a number, they are
            gathered again among that many processes only, which keep larger shares in between.
        mixed: The type in which parameters are gathered and blocks compute (bf16, fp16); none is the parameters' own.
        reduce: The type in which gradients are added up where ``mixed`` is given: fp32, or the same as ``mixed``.
        cpu_offload: Whether shares of parameters, gradients and optimizer state are in host memory, where the CPU runs
            the step (torch's ``CPUOffloadPolicy``). A unit's shares are copied to the device each time that it is
            gathered, and its gradients to the host when they are reduced.
    """

    name: ClassVar[str] = "fsdp"
    card: ClassVar[Card] = Card(
        summary="shares of parameters, gradients and optimizer state; blocks are gathered as they run",
        paper="Zhao et al. 2023, arXiv 2304.11277",
        rank=80,  # around what all others have made of modules and optimizer
        variants=(),  # ``actbench fit`` asks what fits on one card
    )
    variants: ClassVar[tuple[str, ...]] = ("", ",mixed=bf16")

    reshard: bool | Annotated[int, Field(ge=2)] = True
    cpu_offload: bool = False

    @field_validator("reshard", mode="before")
    @classmethod
    def _no_digit_for_a_word(cls, reshard: Any) -> Any:
        if reshard in ("0", "1"):
            raise ValueError("say true or false, or a number of at least 2 processes that divides the ranks")
        return reshard

    @model_validator(mode="after")
    def _reshards_among_equal_groups(self) -> Self:
        if not isinstance(self.reshard, bool) and self.ranks % self.reshard:
            raise ValueError(f"{self.ranks} ranks are no multiple of reshard={self.reshard}")
        return self

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Share out the parameters of the model, block by block.

        Raises:
            NothingToConvertError: Nothing is trained.
            ConversionError: There are not as many processes, torch cannot share out a parameter, or another scheme
                does not go with it.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy  # imports as much as all of torch

        from actbench.methods.parallel.sharded import ShardedModel, on_local_shards

        module, units, mesh = setup.module, self._units(setup, "FSDP2"), self._mesh(setup)
        policy, offload = MixedPrecisionPolicy(**self._types), self.cpu_offload
        divided = self._divided(setup, module, units, "shares")  # FSDP2 makes new classes of modules
        ShardedModel(module, units, mesh, reshard=self.reshard, policy=policy, cpu_offload=offload)
        make = setup.make_optimizer and on_local_shards(setup.make_optimizer, on_host=self.cpu_offload)
        return replace(divided, make_optimizer=make)


class Zero2(Fsdp):
    """ZeRO stage 2 by torch's FSDP2: weights are whole during a step, gradients and optimizer state are sharded.

    Paper: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054
    (stage 2); as ``fsdp:N,reshard=false``, which torch calls ``SHARD_GRAD_OP``.
    Kept by each process: shares as with ``fsdp``; from the forward to the end of the backward pass also all weights.
    DeepSpeed keeps the whole weights, and no shares, from step to step; this gathers them in each forward pass.

    Attributes:
        ranks: How many processes there are.
        reshard: Always false: blocks stay gathered up to the backward pass.
        mixed: The type in which parameters are gathered and blocks compute (bf16, fp16); none is the parameters' own.
        reduce: The type in which gradients are added up where ``mixed`` is given: fp32, or the same as ``mixed``.
        cpu_offload: As of ``fsdp``.
    """

    name: ClassVar[str] = "zero2"
    card: ClassVar[Card] = Card(
        summary="shares of gradients and optimizer state, by torch's FSDP2 (ZeRO stage 2)",
        paper="Rajbhandari et al. 2019, arXiv 1910.02054",
        rank=80,  # around what all others have made of modules and optimizer
        variants=(),  # ``actbench fit`` asks what fits on one card
    )
    variants: ClassVar[tuple[str, ...]] = ()  # fsdp is tried

    reshard: Literal[False] = False


class Zero3(Fsdp):
    """ZeRO stage 3 by torch's FSDP2: the same as ``fsdp``.

    Paper: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054
    (stage 3).
    Kept by each process: the same as with ``fsdp``. DeepSpeed gathers parameter by parameter, not block by block, and
    prefetches a number of elements.

    Attributes:
        ranks: How many processes there are.
        reshard: As of ``fsdp``.
        mixed: As of ``fsdp``.
        reduce: As of ``fsdp``.
        cpu_offload: As of ``fsdp``.
    """

    name: ClassVar[str] = "zero3"
    card: ClassVar[Card] = Card(
        summary="shares of parameters, gradients and optimizer state, by torch's FSDP2 (ZeRO stage 3)",
        paper="Rajbhandari et al. 2019, arXiv 1910.02054",
        rank=80,  # around what all others have made of modules and optimizer
        variants=(),  # ``actbench fit`` asks what fits on one card
    )
    variants: ClassVar[tuple[str, ...]] = ()  # fsdp is tried
