from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from actbench.errors import ConversionError
from actbench.results.fits import Gradient
from actbench.results.records import Site
from actbench.schemes.base import STEPS, Change, Scheme
from actbench.schemes.pasted import InTrainer
from actbench.setup import TrainingSetup


class Accumulate(Scheme):
    """The batch in micro-batches, whose gradients are added up before the one step of the optimizer.

    Kept for backward: what one micro-batch keeps, of ``ceil(batch / parts)`` rows. The gradients of all parameters lie
    beside it from the second micro-batch on. A batch with fewer rows than parts is cut into its rows.
    Loss and gradients are those of the whole batch to rounding: the mean loss of a micro-batch is weighted by its share
    of the labels that count, which are not -100, or of the rows where there are no such labels. They are not where rows
    of a batch see each other, as in batch norm and contrastive losses; a warning says so.

    Attributes:
        parts: Into how many micro-batches a batch is cut.
    """

    name: ClassVar[str] = "accumulate"
    summary: ClassVar[str] = "the batch in micro-batches, one step of the optimizer; gradients are exact to rounding"
    positional: ClassVar[str | None] = "parts"
    rank: ClassVar[int] = 4  # norms are seen as they were made; after what changes parameters
    claims: ClassVar[tuple[str, ...]] = (STEPS,)

    parts: Annotated[int, Field(ge=2, le=1 << 20)] = 4

    @classmethod
    def worth_trying(cls, batch_size: int) -> tuple[str, ...]:
        """As many parts as divide the batch: two, and twice as many each time, and its rows."""
        return tuple(
            f"{cls.name}:{parts}"
            for parts in range(2, batch_size + 1)
            if batch_size % parts == 0 and (parts == batch_size or parts & (parts - 1) == 0)
        )

    @property
    def changes(self) -> tuple[Change, ...]:
        """How the batch is fed."""
        return ("batch",)

    def gradient_of(self, warnings: Sequence[str]) -> Gradient:
        """Another one where rows of a batch see each other, which a warning says."""
        return "approximate" if any(text.startswith(f"{self.spec}: ") for text in warnings) else self.gradient

    def in_trainer(self, batch_size: int) -> InTrainer:
        """Trainer accumulates by itself."""
        rows = -(-batch_size // self.parts)
        return InTrainer(
            arguments={"per_device_train_batch_size": str(rows), "gradient_accumulation_steps": str(self.parts)}
        )

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Let steps cut their batches.

        Raises:
            ConversionError: They do already.
        """
        if setup.micro_batches > 1:
            raise ConversionError(
                f"{self.spec}: a step cuts its batch into {setup.micro_batches} micro-batches already, by "
                "gradient_accumulation or accumulate; say it once"
            )
        site = Site(path="(batch)", was="batch", becomes=f"{self.parts} micro-batches")
        warnings = (f"{self.spec}: {why}" for why in _differences(setup))
        changed = setup.changed(setup.module, (site,))
        return replace(changed, micro_batches=self.parts, warnings=(*setup.warnings, *warnings))


def _differences(setup: TrainingSetup) -> list[str]:
    """Return why micro-batches add up to something else than the batch."""
    why = [setup.uncuttable] if setup.uncuttable else []
    found = next((part for part in setup.module.modules() if _takes_batch_statistics(part)), None)
    if found is not None:
        why.append(f"batch statistics are of the micro-batch ({type(found).__name__})")
    return why


def _takes_batch_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
