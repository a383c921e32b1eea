"""Shared by all kinds of experiments: results files, the unfinished cases of a plan, a record of each outcome.

This module knows no kind of record: a :class:`~actbench.report.kinds.Kind` is given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from actbench.errors import RecipeError
from actbench.machine import now
from actbench.model.data import CaseData, Data
from actbench.model.records import Failure, Record
from actbench.report.kinds import Kind
from actbench.report.lines import RecordT
from actbench.report.store import Store
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned

CaseT = TypeVar("CaseT", bound=CaseData)
AnyRecord = TypeVar("AnyRecord", bound=Record[Any, Any], contravariant=True)


@dataclass(frozen=True)
class Summary:
    """How many cases of a plan were measured or trained, failed, and were done before."""

    measured: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class ExperimentResult(Generic[RecordT]):
    """The result of a recipe on this machine: a record for each of its cases, earlier experiments included.

    ``path`` is the results file, if one is kept; ``notice`` is what a user must know of how it was read.
    """

    records: tuple[RecordT, ...]
    summary: Summary
    path: Path | None
    notice: str | None = None


class RecordSink(Protocol[AnyRecord]):
    """Where records go: a :class:`~actbench.report.store.Store`, or what another kind of experiment keeps them in."""

    @property
    def path(self) -> Path | None:
        """The file that holds them; None for a command without ``--force``."""

    def done(self, case: Data) -> bool:
        """Whether the case needs no measuring; a failure is done, too, unless ``retry_failed`` is given."""

    def failed(self, case: Data) -> bool:
        """Whether the case is done and failed."""

    def find(self, case: Data) -> Record[Any, Any] | None:
        """Return the record that counts for a case."""

    def append(self, record: AnyRecord) -> None:
        """Store a record for good."""


def finished(
    kind: Kind[RecordT],
    store: Store[RecordT],
    plan: Sequence[Planned[Any]],
    summary: Summary,
    title: str,
    output: Path | None,
) -> ExperimentResult[RecordT]:
    """Return the records of a plan, and write tables next to its results file unless that file is temporary."""
    cases = dict.fromkeys(entry.case for entry in plan)
    records = tuple(record for case in cases if (record := store.find(case)) is not None)
    if output is None:
        return ExperimentResult(records, summary, None, store.notice)
    kind.write_beside(store.path, records, title)
    return ExperimentResult(records, summary, store.path, store.notice)


def check_distinct(recipe: str, written: Sequence[Planned[Any]], plan: Sequence[Planned[Any]]) -> None:
    """Raise a RecipeError where two cases whose schemes an author wrote differently have one canonical form."""
    first: dict[CaseData, str] = {}
    for entry, author in zip(plan, written, strict=True):
        if entry.case in first:
            schemes = f"{first[entry.case]!r} and {author.case.scheme!r}"
            raise RecipeError(f"{recipe}: {schemes} are the same scheme; keep one")
        first[entry.case] = author.case.scheme


def pending(
    plan: Sequence[Planned[CaseT]],
    store: RecordSink[Any],
    progress: Progress,
    *,
    jobs: int = 1,
    force: bool = False,
    retry_failed: bool = False,
) -> list[CaseT]:
    """Return the cases of a plan that are to be run, each once, and report them to ``progress``."""
    cases = dict.fromkeys(entry.case for entry in plan)
    # Each is looked for, also if it is forced: a file that it names is read now, and not once it may have changed.
    todo = [case for case in cases if not store.done(case) or force or (retry_failed and store.failed(case))]
    if (found := len(cases) - len(todo)) and store.path is not None:
        are = "is" if found == 1 else "are"
        progress.message(f"{found} of {len(cases)} rows {are} already in {store.path} (--force runs them again)")
    progress.planned(todo, jobs)
    return todo


def keep(
    outcomes: Iterable[tuple[CaseT, Any]],
    kind: type[RecordT],
    plan: Sequence[Planned[CaseT]],
    store: RecordSink[RecordT],
    progress: Progress,
    *,
    recipe: str,
    origin: Callable[[CaseT], Mapping[str, Any]],
) -> Summary:
    """Store a record of each outcome as soon as it comes, twice where a search follows the measurement.

    ``origin`` returns the provenance fields of a case's record.

    Raises:
        StoreError: A record cannot be stored.
    """
    planned = {entry.case: entry for entry in plan}
    measured = failed = 0
    for case, outcome in outcomes:
        entry = planned[case]
        said = {"recipe": recipe, "label": entry.label, "published": entry.published, "recorded_at": now()}
        record = kind(case=case, outcome=outcome, **said, **origin(case))
        store.append(record)
        if record.awaits_search:
            progress.measured(record.case, record.outcome)
            continue
        progress.finished(case, outcome)
        measured, failed = measured + (not isinstance(outcome, Failure)), failed + isinstance(outcome, Failure)
    return Summary(measured, failed, len(planned) - measured - failed)
