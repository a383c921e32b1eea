"""One model measured with several schemes in this process, and the measurements side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from pydantic import ValidationError

from actbench.display import Displayed, cell_line
from actbench.errors import ActbenchError, UsageError, check_argument
from actbench.keywords import check_keywords
from actbench.machine import machine, now, versions
from actbench.measuring import bench
from actbench.measuring.failures import failure_of
from actbench.model.declared import check_model, check_scheme, device_named
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Case, Failure
from actbench.validation import explain


@dataclass(frozen=True, repr=False)
class Compared(Displayed):
    """Measurements of one model, by scheme; a notebook shows them as a table.

    Attributes:
        records: One for each scheme, the exact model first.
    """

    records: tuple[MeasuredRecord, ...]

    def __getitem__(self, scheme: str) -> Measurement | Failure:
        """Return what came of a scheme, as it was written; a KeyError if it was not measured."""
        return {record.label or record.case.scheme: record.outcome for record in self.records}[scheme]

    def __iter__(self) -> Iterator[str]:
        """Yield the schemes."""
        return (record.label or record.case.scheme for record in self.records)

    def __len__(self) -> int:
        """Return how many schemes were measured."""
        return len(self.records)

    def __repr__(self) -> str:
        """Return how each scheme ended, with its peak."""
        found = "; ".join(f"{scheme}: {self[scheme].ending}" for scheme in self)
        return f"<Compared {self.records[0].case.model}, {found}>"


@overload
def measure(case: Case, *, timeline: bool = False) -> Measurement: ...
@overload
def measure(case: str, *, timeline: bool = False, schemes: Sequence[str] = (), **settings: Any) -> Compared: ...
def measure(
    case: Case | str, *, timeline: bool = False, schemes: Sequence[str] = (), **settings: Any
) -> Measurement | Compared:
    """Measure a case, or a model by its name with the exact step and with schemes, in this process.

    ::

        found = actbench.measure("tiny-bert", batch_size=8, schemes=["checkpoint", "adam8bit"])
        print(found["checkpoint"].peak_bytes)

    Bytes are read first, then time in a separate pass. A scheme that cannot be measured has a
    :class:`~actbench.model.records.Failure` in its place.

    Args:
        case: The case; or a model as on the command line.
        timeline: Whether a measurement has the memory over the step (:class:`actbench.model.timeline.Timeline`).
        schemes: Specifications to compare with the exact step; only for a model by its name.
        settings: Other fields of :class:`actbench.Case`, for a model by its name: ``batch_size`` (8 unless given),
            ``device_profile``, ``sequence_length``, ``dtype``, ``meter`` and so on.

    Returns:
        The measurement of a case; of a model by its name all of them, by scheme.

    Raises:
        ActbenchError: The case cannot be measured.
        UsageError: A keyword does not exist, a value cannot be, or the case asks for the largest batch on a real
            device, which needs separate processes.
        ModelError, SpecError: There is no such model or scheme.
    """
    if isinstance(case, str):
        return _compared(case, schemes, timeline, settings)
    check_argument(case, Case, "measure", "an actbench.Case, or the name of a model")
    if schemes or settings:
        given = ", ".join([*(["schemes"] if schemes else []), *settings])
        raise UsageError(f"actbench.measure: the case says all of {given}: leave them out, or name a model")
    return bench.measure(case, timeline=timeline)


def _compared(model: str, schemes: Sequence[str], timeline: bool, settings: dict[str, Any]) -> Compared:
    own = [name for name in Case.model_fields if name not in ("model", "scheme", "script")]
    check_keywords("actbench.measure", settings, ["timeline", "schemes", *own])
    check_model(model)
    if isinstance(schemes, str):
        raise UsageError(f"actbench.measure: schemes is a list of schemes: [{schemes!r}]")
    for scheme in schemes:
        check_scheme(scheme)
    given = {"batch_size": 8, "meter": "simulated", **settings}
    if given.get("device_profile") is not None:
        given["device_profile"] = device_named(given["device_profile"])
    try:
        exact = Case.model_validate({"model": model, **given})
    except ValidationError as error:
        raise UsageError(f"actbench.measure: {'; '.join(explain(error, given, {'': Case}))}") from None
    said = ", ".join(f"{name}={value!r}" for name, value in {"schemes": [*schemes], **settings}.items())
    origin: dict[str, Any] = {"command": f"actbench.measure({model!r}, {said})", "recipe": "measure"}
    records, wanted = [], list(dict.fromkeys(["exact", *schemes]))
    with cell_line() as tell:
        for number, scheme in enumerate(wanted, 1):
            if tell is not None:
                tell(f"[{number}/{len(wanted)}] {model}, {scheme} …")
            case = exact.model_copy(update={"scheme": scheme})
            try:
                outcome: Measurement | Failure = bench.measure(case, timeline=timeline)
            except ActbenchError as error:
                if scheme == "exact":
                    raise
                outcome = failure_of(error)
            here = {"machine": machine(), "versions": versions(), "recorded_at": now()}
            records.append(MeasuredRecord(case=case, outcome=outcome, **here, **origin))
    return Compared(tuple(records))
