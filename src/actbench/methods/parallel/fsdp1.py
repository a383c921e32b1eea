from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from torch import nn

from actbench.errors import ConversionError
from actbench.methods.parallel.fsdp import FullySharded
from actbench.scheme.card import Card
from actbench.scheme.setup import TrainingSetup


class Fsdp1(FullySharded):
    """FSDP with flat parameters, as before ``fully_shard``: each process holds a part of one vector per block.

    Paper: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277; by torch's
    ``FullyShardedDataParallel`` with ``use_orig_params=True``.
    Kept by each process: ``ceil(elements / ranks)`` elements of each block's vector, of its gradient and of its
    state, where each parameter begins at a multiple of 16 bytes. A block is gathered as one vector before its forward
    pass, freed after it and gathered again for its backward pass, the next one while the one before runs; what is in no
    block stays from the first forward pass to the end of the backward pass. Frozen parameters of a block with a trained
    one have gradients of zeros, up to the reduction. All parameters of a block need one type.
    The batch size is that of one process. Gradients are the mean over processes, exact to rounding; with ``mixed``
    weights are rounded to half precision when they are gathered.

    Attributes:
        ranks: How many processes there are.
        mixed: The type in which parameters are gathered and blocks compute (bf16, fp16); none is the parameters' own.
        reduce: The type in which gradients are added up where ``mixed`` is given: fp32, or the same as ``mixed``.
        prefetch: When the next block is gathered in the backward pass: before the gradients of the one that runs are
            computed (pre), after that (post), or not before it runs (none).
        adapters: Whether trained modules of frozen blocks lie in the vectors of these (together), each has one of its
            own (apart), as peft's policy for FSDP has it, or each process holds them whole (whole) and their gradients
            are averaged one by one. Frozen parameters have gradients only if they lie together.
    """

    name: ClassVar[str] = "fsdp1"
    card: ClassVar[Card] = Card(
        summary="as fsdp, with one flat parameter per block (FullyShardedDataParallel)",
        paper="Zhao et al. 2023, arXiv 2304.11277",
        rank=80,  # around what all others have made of modules and optimizer
        variants=(),  # ``actbench fit`` asks what fits on one card
    )
    variants: ClassVar[tuple[str, ...]] = ()  # fsdp is tried

    prefetch: Literal["pre", "post", "none"] = "pre"
    adapters: Literal["together", "apart", "whole"] = "together"

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Flatten the parameters of the model, block by block, and share them out.

        Raises:
            NothingToConvertError: Nothing is trained.
            ConversionError: There are not as many processes, parameters of a block differ in type, nothing is frozen
                beside ``adapters=whole``, or another scheme does not go with it.
        """
        from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

        from actbench.methods.parallel.flattened import flattened, on_pieces  # imports as much as all of torch

        units = self._units(setup, "FSDP1")
        if setup.processes.mesh is not None and setup.processes.mesh.ndim > 1:
            raise ConversionError(f"{self.spec} does not go with tensor parallelism: take fsdp, which is FSDP2")
        if self.adapters == "whole" and all(each.requires_grad for each in setup.module.parameters()):
            raise ConversionError(f"{self.spec}: nothing is frozen, so that nothing would be shared out: take ddp")
        adapters = [] if self.adapters == "together" else _adapters(setup.module)
        orders = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}
        whole = flattened(
            setup.module,
            units if self.adapters == "whole" else [*units, *adapters],
            self._mesh(setup),
            unsharded=adapters if self.adapters == "whole" else (),
            precision=MixedPrecision(**self._types) if self._types else None,
            prefetch=orders.get(self.prefetch),
        )
        divided = self._divided(setup, whole, units, "parts of flat parameters")
        return replace(divided, make_optimizer=setup.make_optimizer and on_pieces(setup.make_optimizer, self.spec))


def _adapters(module: nn.Module) -> list[nn.Module]:
    """Return the trained modules that have no others in them."""
    alone = ((each, list(each.parameters())) for each in module.modules() if not list(each.children()))
    return [each for each, own in alone if own and all(parameter.requires_grad for parameter in own)]
