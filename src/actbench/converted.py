"""What is asked of a conversion and what it reports: what passes between the command and the process that converts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from actbench.records import Built, Case, Site, Unreached


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion to be done.

    Attributes:
        case: What is converted: model, scheme, weights policy, and the batch for which bytes are told.
        output: Folder to write; None names one after model and scheme.
        dry_run: Whether nothing is written.
        force: Whether a folder that holds a converted model is replaced.
    """

    case: Case
    output: Path | None
    dry_run: bool
    force: bool


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion changed and what it is worth.

    Attributes:
        case: What was converted; bytes are for its batch.
        sites: What changed, with the bytes each keeps for backward before and after.
        unreached: What a reader might expect to have changed and did not, with the reason.
        bytes_before: What the exact model keeps for backward in one step, all of it.
        bytes_after: The same of the converted model.
        folder: Where the model was written, or None for a dry run.
        weights_origin: Where the weights come from.
        built: What the model and task came to; None where the function that builds it does not say.
        warnings: What a user must know of how the model was found.
        seconds: How long it all took.
    """

    case: Case
    sites: tuple[Site, ...]
    unreached: tuple[Unreached, ...]
    bytes_before: int
    bytes_after: int
    folder: Path | None
    weights_origin: str
    built: Built | None
    warnings: tuple[str, ...]
    seconds: float
