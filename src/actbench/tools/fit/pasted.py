"""The lines that a scheme needs in a program that uses the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from actbench.scheme.base import OF_PARTS, Change, Scheme
from actbench.scheme.facets import LowPrecision, OwnOptimizer

_OF_MODEL: Final[frozenset[Change]] = OF_PARTS | {"loss"}
_CHANNELS_LAST: Final = "model = model.to(memory_format=torch.channels_last)"
_ACCUMULATION: Final = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Pasted:
    """The lines of Python that use a scheme beside ``Trainer``.

    Attributes:
        callback: The specification by which the callback converts the model; empty for none.
        convert: The specification by which the model is converted before the trainer is made; empty for none.
        before: A line before the trainer is made, about ``model``.
        arguments: Arguments of ``TrainingArguments``, as code.
        optimizer: The code of :class:`~actbench.scheme.facets.OwnOptimizer`; empty if the scheme has none.
        why_not: Why Trainer cannot use the scheme; empty if it can.
    """

    callback: str = ""
    convert: str = ""
    before: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    optimizer: str = ""
    why_not: str = ""


def pasted(part: Scheme, batch_size: int) -> Pasted:
    """Return the lines for a scheme that is no composition, with batches of so many rows."""
    own, precision = part.facet(OwnOptimizer), part.facet(LowPrecision)
    can: set[Change] = {*_OF_MODEL, "memory format"}
    can |= {"optimizer"} if own else set()
    can |= {"precision"} if precision else set()
    can |= {"batch"} if part.card.trainer else set()
    if not can.issuperset(part.changes):
        beyond = " and ".join(sorted(set(part.changes) - _OF_MODEL))
        return Pasted(why_not=f"{part.spec} changes {beyond}, which Trainer does itself")
    changes_model = not _OF_MODEL.isdisjoint(part.changes)
    spec = own.of_model if own else part.spec if changes_model else ""
    is_early = "parameters" in part.changes  # Trainer makes its optimizer before it calls callbacks
    return Pasted(
        callback="" if is_early else spec,
        convert=spec if is_early else "",
        before=_before(part, precision),
        arguments=_arguments(part, precision, batch_size),
        optimizer=own.code if own else "",
    )


def _before(part: Scheme, precision: LowPrecision | None) -> str:
    if precision is not None and precision.of_weights:
        return f"model = model.to(torch.{precision.dtype})"
    return _CHANNELS_LAST if "memory format" in part.changes else ""  # the first convolution converts the images


def _arguments(part: Scheme, precision: LowPrecision | None, batch_size: int) -> dict[str, str]:
    found = {argument: str(getattr(part, name)) for argument, name in part.card.trainer.items()}
    if _ACCUMULATION in found:
        found["per_device_train_batch_size"] = str(-(-batch_size // int(found[_ACCUMULATION])))
    if precision is not None and not precision.of_weights:  # Trainer scales the loss of float16
        found["bf16" if precision.dtype == "bfloat16" else "fp16"] = "True"
    return found
