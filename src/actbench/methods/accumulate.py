"""Gradient accumulation: a step runs its batch in micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from torch.nn.modules.batchnorm import _BatchNorm

from actbench.errors import ConversionError
from actbench.model.records import Site
from actbench.scheme.base import STEPS, Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, InParts
from actbench.scheme.setup import TrainingSetup

MOST_PARTS = 2**20


def _variants(batch_size: int) -> tuple[str, ...]:
    """Return the powers of two that divide the batch, and one part for each row."""
    powers = (2**power for power in range(1, MOST_PARTS.bit_length()))
    tried = {batch_size, *(parts for parts in powers if batch_size % parts == 0)}
    return tuple(f":{parts}" for parts in sorted(tried) if 2 <= parts <= MOST_PARTS)


class Accumulate(Scheme):
    """Steps cut their batch into micro-batches and add up the gradients; the optimizer then steps once.

    Kept for backward: the saved tensors of one micro-batch of ``ceil(batch / parts)`` rows. From the second micro-batch
    on, the gradients of all parameters exist beside them. A batch with fewer rows than parts is cut into single rows.
    Loss and gradients equal those of the whole batch to rounding: the mean loss of a micro-batch is weighted by its
    share of the labels that count (not -100), or of the rows if there are no such labels. They differ if rows of a
    batch see each other, as in batch norm and contrastive losses; a warning says so.

    Attributes:
        parts: How many micro-batches a batch is cut into.
    """

    name: ClassVar[str] = "accumulate"
    positional: ClassVar[str | None] = "parts"
    card: ClassVar[Card] = Card(
        summary="the batch in micro-batches, with one optimizer step; gradients are exact to rounding",
        variants=_variants,
        draws_alike=False,  # each micro-batch draws its own
        trainer={"gradient_accumulation_steps": "parts"},
        rank=4,  # before schemes that replace norms, after schemes that change parameters
    )
    claims: ClassVar[tuple[str, ...]] = (STEPS,)
    changes: ClassVar[tuple[Change, ...]] = ("batch",)

    parts: Annotated[int, Field(ge=2, le=MOST_PARTS)] = 4

    @property
    def facets(self) -> Iterable[Facet]:
        """Steps have so many micro-batches."""
        return (InParts(self.parts),)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Make steps cut their batches.

        Raises:
            ConversionError: Steps cut their batches already.
        """
        if setup.micro_batching.parts > 1:
            raise ConversionError(
                f"{self.spec}: a step cuts its batch into {setup.micro_batching.parts} micro-batches already, by "
                "gradient_accumulation or accumulate; say it once"
            )
        site = Site(path="(batch)", was="batch", becomes=f"{self.parts} micro-batches")
        warnings = (f"{self.spec}: {why}" for why in _differences(setup))
        changed = setup.changed(setup.module, (site,))
        micro_batching = replace(setup.micro_batching, parts=self.parts)
        return replace(changed, micro_batching=micro_batching, warnings=(*setup.warnings, *warnings))


def _differences(setup: TrainingSetup) -> list[str]:
    """Return why the gradients of micro-batches do not add up to the gradient of the batch."""
    why = [setup.micro_batching.uncuttable] if setup.micro_batching.uncuttable else []
    norms = (part for part in setup.module.modules() if isinstance(part, _BatchNorm))
    found = next((norm for norm in norms if norm.training or not norm.track_running_stats), None)
    if found is not None:
        why.append(f"{type(found).__name__} takes its statistics from the micro-batch, not from the batch")
    return why
