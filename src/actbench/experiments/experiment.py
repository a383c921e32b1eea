"""What experiments of every kind share: their files, what is left to do of a plan, a record of each outcome.

Cases are measured by :mod:`actbench.experiments.sweep`, and models trained by :mod:`actbench.training.comparison`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, Protocol, TypeVar

from actbench.errors import RecipeError, UsageError
from actbench.experiments.recipes.sections import Planned
from actbench.experiments.runner.progress import Progress
from actbench.results import render
from actbench.results.machine import machine, now
from actbench.results.records import Case, Data, Failure, Record
from actbench.results.render import exports
from actbench.results.runs import TrainingCase
from actbench.results.store import Store, results_path
from actbench.results.store.lines import RecordT
from actbench.results.tables import Table

CaseT = TypeVar("CaseT", Case, TrainingCase)
AnyRecord = TypeVar("AnyRecord", bound=Record[Any, Any], contravariant=True)

BESIDE = (".md", ".csv")
"""Suffixes of the tables beside a results file."""


@dataclass(frozen=True)
class Summary:
    """How many cases of a plan were measured or trained, failed, and were done before."""

    measured: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class ExperimentResult(Generic[RecordT]):
    """What came of a recipe on this machine: a record for each of its cases, earlier experiments included.

    ``path`` is the results file, if one is kept; ``notice`` is what a user must know of how it was read.
    """

    records: tuple[RecordT, ...]
    summary: Summary
    path: Path | None
    notice: str | None = None


class RecordSink(Protocol[AnyRecord]):
    """Where records go: a :class:`~actbench.results.store.Store`, or what a test gives in its place."""

    def done(self, case: Data) -> bool:
        """Whether the case needs no measuring; a failure is done, too, unless ``retry_failed`` is given."""

    def failed(self, case: Data) -> bool:
        """Whether the case is done and failed."""

    def append(self, record: AnyRecord) -> None:
        """Store a record for good."""


@dataclass(frozen=True)
class Kind(Generic[RecordT]):
    """A kind of experiment: class of its records, suffix of its files, and a function from records and title to tables.

    The first table stands as CSV beside the results file, all of them as Markdown.
    """

    record: type[RecordT]
    suffix: str
    tables: Callable[[Sequence[RecordT], str], Sequence[Table]]

    def texts(self, records: Sequence[RecordT], title: str) -> dict[str, str]:
        """Return what stands beside a results file, by file suffix."""
        tables = self.tables(records, title)
        rendered = "\n".join(map(render.markdown, tables)), render.csv_text(tables[0])
        return dict(zip(BESIDE, rendered, strict=True))

    def write_beside(self, file: Path, records: Sequence[RecordT], title: str) -> None:
        """Write the tables beside a results file."""
        exports.export({file.with_suffix(suffix): text for suffix, text in self.texts(records, title).items()})

    @contextmanager
    def opened(self, recipe: str, output: Path | None) -> Iterator[Store[RecordT]]:
        """Hold the results file of a recipe on this machine.

        ``output`` is a folder, in which ``RECIPE/MACHINE`` with this kind's suffix is the file; a ``.jsonl`` file; or
        None for a temporary one.

        Raises:
            UsageError: ``output`` is named like another kind of file.
            StoreError: The file is in use or broken, or it or a table beside it cannot be written.
        """
        if output is not None and output.suffix in (".md", ".csv", ".json", ".html") and not output.is_dir():
            raise UsageError(f"--output {output}: name a folder or a .jsonl file")
        here = machine()
        with TemporaryDirectory(prefix="actbench-") as folder:
            file = Path(folder) / "kept.jsonl" if output is None else output
            if file.suffix != ".jsonl":
                file = results_path(file, recipe, here.name).with_suffix(self.suffix)
            for suffix in BESIDE:
                exports.check(file.with_suffix(suffix))
            with Store.opened(file, self.record, here) as store:
                yield store

    def finished(
        self, store: Store[RecordT], plan: Sequence[Planned[Any]], summary: Summary, title: str, output: Path | None
    ) -> ExperimentResult[RecordT]:
        """Return what came of a plan, and write the tables beside its results file unless that is temporary."""
        cases = dict.fromkeys(entry.case for entry in plan)
        records = tuple(record for case in cases if (record := store.find(case)) is not None)
        if output is None:
            return ExperimentResult(records, summary, None, store.notice)
        self.write_beside(store.path, records, title)
        return ExperimentResult(records, summary, store.path, store.notice)


def check_distinct(recipe: str, written: Sequence[Planned[CaseT]], plan: Sequence[Planned[CaseT]]) -> None:
    """Raise a RecipeError where two cases that an author wrote differently have one canonical form."""
    first: dict[CaseT, str] = {}
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
    """Return the cases of a plan that are to be run, each once; ``progress`` is told of all."""
    cases = dict.fromkeys(entry.case for entry in plan)
    todo = [case for case in cases if force or not store.done(case) or (retry_failed and store.failed(case))]
    chosen = set(todo)
    for case in cases:
        if case not in chosen:
            progress.skipped(case)
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
    origin: Mapping[str, Any],
) -> Summary:
    """Store a record of each outcome as soon as it comes; ``origin`` holds the provenance fields of records.

    Raises:
        StoreError: A record cannot be stored.
    """
    planned = {entry.case: entry for entry in plan}
    measured = failed = 0
    for case, outcome in outcomes:
        entry = planned[case]
        said = {"recipe": recipe, "label": entry.label, "published": entry.published, "recorded_at": now()}
        store.append(kind(case=case, outcome=outcome, **said, **origin))
        progress.finished(case, outcome)
        measured, failed = measured + (not isinstance(outcome, Failure)), failed + isinstance(outcome, Failure)
    return Summary(measured, failed, len(planned) - measured - failed)
