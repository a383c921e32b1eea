"""What is stored: where every case of a recipe has a row, nothing is started, and torch is not imported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from actbench.model.data import CaseData, Data
from actbench.model.declared import DEFAULT_DEVICE, spelled
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Case
from actbench.report import store
from actbench.report.kinds import MEASURED, Kind
from actbench.report.lines import RecordT
from actbench.run.experiment import ExperimentResult, Summary, finished, pending
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned

CaseT = TypeVar("CaseT", bound=CaseData)


class WithTimelines:
    """A store in which a case is done once its measurement has a timeline."""

    def __init__(self, opened: store.Store[MeasuredRecord]) -> None:
        self._opened = opened
        self.path = opened.path
        self.find, self.failed, self.append = opened.find, opened.failed, opened.append

    def done(self, case: Data) -> bool:
        """Whether the case needs no measuring."""
        found = self.find(case)
        lacks_timeline = found is not None and isinstance(found.outcome, Measurement) and found.outcome.timeline is None
        return self._opened.done(case) and not lacks_timeline


def canonical(entry: Planned[Case], scheme: str) -> Planned[Case]:
    """Return a case as records have it: the scheme in its canonical form, ``scheme``, the simulated device named."""
    profile = entry.case.device_profile or (DEFAULT_DEVICE if entry.case.meter == "simulated" else None)
    return replace(entry, case=entry.case.model_copy(update={"scheme": scheme, "device_profile": profile}))


def stored_results(
    name: str,
    title: str,
    written: Callable[[], Iterable[Planned[Case]]],
    output: Path | None,
    *,
    retry_failed: bool,
    progress: Progress,
    timelines: bool = False,
) -> ExperimentResult[MeasuredRecord] | None:
    """Return the result of a recipe whose cases all have rows that count; None where one may be left to measure.

    Arguments are as of :func:`stored_rows`, with ``timelines``: whether rows without a timeline do not count.
    """
    settled: Any = {"retry_failed": retry_failed, "progress": progress}
    counting = WithTimelines if timelines else None
    return stored_rows(MEASURED, canonical, name, title, written, output, counting=counting, **settled)


def stored_rows(
    kind: Kind[RecordT],
    canonical: Callable[[Planned[CaseT], str], Planned[CaseT]],
    name: str,
    title: str,
    written: Callable[[], Iterable[Planned[CaseT]]],
    output: Path | None,
    *,
    progress: Progress,
    retry_failed: bool = False,
    counting: Callable[[Any], Any] | None = None,
) -> ExperimentResult[RecordT] | None:
    """Return the result of an experiment of any kind whose cases all have rows that count; None where one may be left.

    A scheme whose canonical form is known to torch's half of the package alone may have a row, and is left to the loop
    of the sweep.

    Args:
        kind: What the rows are.
        canonical: Returns a planned case as records have it, with its scheme in this canonical form.
        name: Of the recipe.
        title: Of its tables.
        written: Returns its cases as their author wrote them.
        output: As of :func:`actbench.run.sweep.run_sweep`, like the others.
        progress: Told what is stored.
        retry_failed: Whether failed rows do not count.
        counting: Returns a store in which only some rows count, of the one that was opened.

    Raises:
        UsageError: ``output`` is no place for results.
        StoreError: The results file is in use, broken or cannot be written.
    """
    if output is None or not kind.file(name, output).is_file():
        return None
    with kind.opened(name, output) as opened:
        plan = _found(written(), (record.case for record in opened.records), canonical)
        kept = counting(opened) if counting is not None else opened
        cases = [entry.case for entry in plan or ()]
        if not cases or not all(kept.done(case) and not (retry_failed and kept.failed(case)) for case in cases):
            return None
        pending(plan, kept, progress)
        return finished(kind, opened, plan, Summary(skipped=len(cases)), title, output)


def _found(
    written: Iterable[Planned[CaseT]],
    stored: Iterable[Any],
    canonical: Callable[[Planned[CaseT], str], Planned[CaseT]],
) -> list[Planned[CaseT]]:
    """Return a plan with the schemes of stored cases; an empty one if a case is not among these, or two are one."""
    schemes: Mapping[Any, dict[tuple[str, ...], str]] = defaultdict(dict)
    for case in stored:
        schemes[_without_scheme(case)][tuple(sorted(case.scheme.split("+")))] = case.scheme
    plan: list[Planned[CaseT]] = []
    for entry in written:
        parts = spelled(entry.case.scheme)  # type: ignore[attr-defined]
        scheme = None if parts is None else schemes.get(canonical(entry, "").case, {}).get(parts)
        if scheme is None:
            return []
        plan.append(canonical(entry, scheme))
    return plan if len({entry.case for entry in plan}) == len(plan) else []


def _without_scheme(case: Any) -> Any:
    return case.model_copy(update={"scheme": ""})
