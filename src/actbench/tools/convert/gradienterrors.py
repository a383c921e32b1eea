"""How far a scheme takes the gradient of a model from the exact one: from records, or measured on one batch."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Final, NamedTuple

from actbench.errors import StoreError, message_of
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Case
from actbench.report import kinds

LARGE: Final = 0.5
"""The relative L2 error of the gradient above which a user is warned."""

RESULTS: Final = Path("results")
"""Where ``sweep`` writes records by default."""


class Known(NamedTuple):
    """A relative L2 error of a gradient, and its source."""

    error: float
    place: str


def recorded(model: str, scheme: str, folder: Path = RESULTS) -> Known | None:
    """Return the gradient error of a scheme, in canonical form, on a model by the latest record of it in a folder.

    ``org/name`` on the hub is the model ``name``, and the other way round.
    """
    name = model.removeprefix("hf:").removeprefix("torchvision:").rpartition("/")[2]
    latest: tuple[str, Known] | None = None
    needed = [json.dumps(text).encode() for text in (scheme, "gradient_error")] + [name.encode()]
    files = kinds.files_below(folder) if name and folder.is_dir() else []
    for file in files:
        for record in _records(file, needed):
            case, outcome = record.case, record.outcome
            error = outcome.gradient_error if isinstance(outcome, Measurement) else None
            is_of = case.scheme == scheme and case.model.rpartition("/")[2].rpartition(":")[2] == name
            if is_of and error is not None and (latest is None or record.recorded_at > latest[0]):
                latest = record.recorded_at, Known(error, f"measured at batch {case.batch_size}, {file}")
    return latest[1] if latest else None


def _records(file: Path, needed: list[bytes]) -> list[MeasuredRecord]:
    """Return the records of a file whose lines have these texts; a UserWarning names what cannot be read."""
    found = []
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except OSError as error:
        _warn(f"{file}: {message_of(error)}")
        return []
    for number, line in enumerate(lines, 1):
        if all(text in line for text in needed):
            try:
                found.append(MeasuredRecord.model_validate_json(line))
            except (ValueError, StoreError) as error:
                if line.endswith(b"\n"):  # else a sweep was killed while it wrote its last record
                    _warn(f"{file}, line {number}: {message_of(error).splitlines()[0]}")
    return found


def _warn(what: str) -> None:
    warnings.warn(f"a record that may have the gradient error cannot be read: {what}", stacklevel=4)


def probed(case: Case) -> Known | None:
    """Measure the gradient error of a case's scheme on one batch, on this machine's CPU; None if it has none.

    Raises:
        ActbenchError: The step does not run here.
    """
    from actbench.measuring.bench import Session

    on_cpu = {"meter": "cpu", "device_profile": None, "gradient_quality": True, "memory_limit_bytes": None}
    found = Session(case.model_copy(update=on_cpu)).memory().gradient_error
    return None if found is None else Known(found, f"one batch of {case.batch_size} on this machine's CPU")


def warning(scheme: str, model: str, known: Known | None) -> str | None:
    """Return one line about an error that is large; None if it is not, or if there is none."""
    if known is None or known.error < LARGE:
        return None
    if math.isnan(known.error):
        return f"{scheme} on {model}: the gradient is not finite ({known.place})"
    return (
        f"{scheme} takes the gradient of {model} far from the exact one: relative error {known.error:.2g} "
        f"({known.place}); train a short while first and look at the loss, or take a scheme with a smaller error"
    )
