"""The table of training runs: one row for each model and scheme, over the seeds.

Differences from the exact model compare runs with the same seed, that is with the same first weights and batches, so
their spread is smaller than that of the runs themselves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from actbench.machine import machine
from actbench.model.contents import content_of
from actbench.model.records import Failure
from actbench.report.kinds import Kind
from actbench.report.sentences import failures, warnings
from actbench.report.tables import Table, fill
from actbench.report.tables.table import published_note
from actbench.report.tables.values import Column, SpreadValue, Unit, ratio, step_time, value_of, with_spread
from actbench.run.experiment import ExperimentResult
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned
from actbench.run.stored import stored_rows
from actbench.tools.train.recipe import TrainingRecipe
from actbench.tools.train.records import DeviceName, Trained, TrainingCase, TrainingRun
from actbench.units import counted

Score = Callable[[Trained], float | None]


@dataclass(frozen=True)
class Row:
    """The runs of one scheme that differ only in the seed, and those of the exact model."""

    runs: tuple[TrainingRun, ...]
    exact: tuple[TrainingRun, ...]

    @property
    def case(self) -> TrainingCase:
        """The case of the first seed."""
        return self.runs[0].case

    @property
    def trained(self) -> tuple[Trained, ...]:
        """The outcomes of the runs that did not fail."""
        return tuple(outcome for run in self.runs if isinstance(outcome := run.outcome, Trained))


def accuracy_table(runs: Sequence[TrainingRun], title: str) -> Table:
    """Return the comparison of schemes by the quality of the trained models."""
    rows = rows_of(runs)
    where = (MACHINE,) if len({run.machine.identity for run in runs}) > 1 else ()
    return fill(title, (*where, *COLUMNS), rows, _notes(rows))


def mean_and_deviation(values: Sequence[float]) -> SpreadValue | None:
    """Return the mean with the sample standard deviation; a single value has none."""
    if not values:
        return None
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return SpreadValue(math.fsum(values) / len(values))
    return SpreadValue(statistics.fmean(values), statistics.stdev(values))


def difference(row: Row, of: Score) -> SpreadValue | None:
    """Return the difference of scheme and exact model, paired by seed; None for the exact model itself."""
    if row.case.scheme == "exact":
        return None
    exact = {run.case.seed: run.outcome for run in row.exact}
    pairs = [(run.outcome, exact.get(run.case.seed)) for run in row.runs]
    scores = [(of(one), of(other)) for one, other in pairs if isinstance(one, Trained) and isinstance(other, Trained)]
    return mean_and_deviation([one - other for one, other in scores if one is not None and other is not None])


def rows_of(runs: Sequence[TrainingRun]) -> tuple[Row, ...]:
    """Return the rows of the table, in its order."""
    groups: dict[tuple[tuple[Any, ...], TrainingCase], list[TrainingRun]] = {}
    for run in runs:
        place = (*run.machine.identity, content_of(run))
        groups.setdefault((place, run.case.model_copy(update={"seed": 0})), []).append(run)
    rows = []
    for (where, case), members in groups.items():
        exact = groups.get((where, case.model_copy(update={"scheme": "exact"})), [])
        rows.append(Row(tuple(members), tuple(exact)))
    return tuple(rows)


def _final(name: str) -> Score:
    return lambda outcome: getattr(outcome.final, name)


def _scores(of: Score) -> Callable[[Row], SpreadValue | None]:
    return lambda row: mean_and_deviation([score for outcome in row.trained if (score := of(outcome)) is not None])


def _step(row: Row) -> SpreadValue | None:
    return step_time([seconds for outcome in row.trained for seconds in outcome.step_seconds])


def _speed(row: Row) -> SpreadValue | None:
    return ratio(_step(Row(row.exact, ())), _step(row)) if row.exact else None


def _largest(name: str) -> Callable[[Row], int | None]:
    return lambda row: max((getattr(outcome, name) or 0 for outcome in row.trained), default=None)


def _saved(row: Row) -> float | None:
    mine, exact = _largest("peak_bytes")(row), _largest("peak_bytes")(Row(row.exact, ()))
    return None if mine is None or not exact else 1 - mine / exact


def _status(row: Row) -> str | None:
    failed = sum(isinstance(run.outcome, Failure) for run in row.runs)
    diverged = sum(outcome.diverged_at is not None for outcome in row.trained)
    parts = [f"{failed} failed"] * (failed > 0) + [f"{diverged} diverged"] * (diverged > 0)
    return ", ".join(parts) or None


def _metric(
    key: str, title: str, unit: Unit, better: Literal["lower", "higher"], *, changes: Unit, detail: int = 0
) -> tuple[Column[Row], ...]:
    """Return the columns of a metric's mean and its difference from the exact model, with spreads."""
    score, more = _scores(_final(key)), lambda row: difference(row, _final(key))
    difference_key = f"{key}_difference"
    return (
        *with_spread(key, title, unit, score, better, spread_key=f"{key}_deviation"),
        *with_spread(
            difference_key,
            f"{title}, minus exact",
            changes,
            more,
            better,
            detail=detail,
            spread_key=f"{difference_key}_deviation",
            spread_unit=unit,
        ),
    )


def _machine(row: Row) -> str:
    name, gpu = row.runs[0].machine.identity
    return name if gpu is None else f"{name} ({gpu})"


MACHINE: Column[Row] = Column("machine", "Machine", "text", _machine)
COLUMNS: tuple[Column[Row], ...] = (
    Column("model", "Model", "text", lambda row: row.case.model),
    Column("data", "Data", "text", lambda row: row.case.data),
    Column("scheme", "Scheme", "text", lambda row: row.case.scheme),
    Column("label", "Label", "text", lambda row: row.runs[0].label, detail=2),
    Column("seeds", "Seeds", "count", lambda row: len(row.trained)),
    *_metric("accuracy", "Accuracy", "share", "higher", changes="change"),
    *_metric("f1", "F1", "share", "higher", changes="change"),
    *_metric("correlation", "Correlation", "number", "higher", changes="number"),
    *_metric("loss", "Loss", "number", "lower", changes="number", detail=1),
    Column("peak_bytes", "Peak", "bytes", _largest("peak_bytes"), "lower"),
    Column("peak_saving", "Saved", "share", _saved, "higher"),
    Column("activation_bytes", "Activations", "bytes", _largest("activation_bytes"), "lower", detail=1),
    Column("optimizer_bytes", "Optimizer", "bytes", _largest("optimizer_bytes"), "lower", detail=2),
    *with_spread("step_seconds", "Step", "seconds", _step, "lower", detail=1),
    Column("relative_speed", "Speed", "ratio", value_of(_speed), "higher", detail=1),
    Column("dirty", "Uncommitted", "flag", lambda row: any(run.versions.dirty for run in row.runs) or None, detail=3),
    Column("status", "Status", "text", _status),
)


_TOLD = (
    *("optimizer", "learning_rate", "weight_decay", "momentum", "schedule", "max_grad_norm", "batch_size"),
    *("autocast", "tokenizer"),
)
_HOW = (
    "Of the finished models on the validation set: mean ± sample standard deviation over the seeds; differences are "
    "paired by seed, those of accuracy in points. Peak and activations: of one training step at the end of a run. "
    "Step: median ± half the interquartile range over all runs, which ran one behind the other."
)


def _notes(rows: Sequence[Row]) -> list[str]:
    lines = [
        _HOW,
        *(line for row in rows for line in _settings(row)),
        *(line for row in rows for run in row.runs for line in _of_run(run)),
        *failures(
            ((run.case, run.case.scheme, run.outcome) for row in rows for run in row.runs),
            lambda cases: "; ".join(f"{case.model}, {case.scheme}, seed {case.seed}" for case in cases),
        ),
        *(
            f"Warning: {text}"
            for text, _ in warnings(
                (run.case.scheme, getattr(run.outcome, "warnings", ())) for row in rows for run in row.runs
            )
        ),
    ]
    return list(dict.fromkeys(lines))


def _settings(row: Row) -> list[str]:
    case, described = row.case, []
    for name in _TOLD:
        value = getattr(case, name)
        if value not in (None, 0, 0.0):
            described.append(f"{name.replace('_', ' ')} {value}")
    if case.gradient_accumulation > 1:
        described.append(f"cut into {case.gradient_accumulation} parts")
    if case.processes > 1:
        described.append(f"{case.processes} processes ({case.strategy}), of whose peaks the largest counts")
    length = counted(case.epochs, "epoch") if case.epochs else counted(case.steps or 0, "step")
    seeds = ", ".join(str(run.case.seed) for run in row.runs)
    return [f"{case.model} on {case.data}: {length}, {', '.join(described)}, seeds {seeds}, device {case.device}."]


def _of_run(run: TrainingRun) -> list[str]:
    here, made, case = run.machine, run.versions, run.case
    device = here.gpu if case.device == "cuda" else f"{here.processor}, {counted(here.cores, 'core')}"
    commit = f", commit {made.commit[:7]}" if made.commit else ""
    lines = [f"Trained on {here.name} ({device}) with actbench {made.actbench}{commit}, torch {made.torch}."]
    for item in run.published:
        lines.append(published_note(case.scheme, item))
    if isinstance(run.outcome, Failure):
        return lines
    if run.outcome.diverged_at is not None:
        lines.append(
            f"{case.model}, {case.scheme}, seed {case.seed}: the loss of step {run.outcome.diverged_at} is no "
            "finite number; the run ended there."
        )
    if (built := run.outcome.built) is not None:
        lines.append(f"{case.model} is a {built.model_class}, for {built.task}.")
    return lines


TRAINED: Final = Kind("runs", TrainingRun, lambda runs, title: (accuracy_table(runs, title),))


def stored_runs(recipe: TrainingRecipe, output: Path, progress: Progress) -> ExperimentResult[TrainingRun] | None:
    """Return the result of a recipe whose runs all have rows, without torch; None where one may be left to train.

    Args:
        recipe: What to compare, by one process.
        output: As of :func:`actbench.tools.train.comparison.run`.
        progress: Told what is stored.
    """

    def canonical(entry: Planned[TrainingCase], scheme: str) -> Planned[TrainingCase]:
        return replace(entry, case=entry.case.model_copy(update={"scheme": scheme}))

    auto: DeviceName = "cpu" if machine().gpu is None else "cuda"
    return stored_rows(
        TRAINED, canonical, recipe.name, recipe.title, lambda: recipe.runs(auto), output, progress=progress
    )
