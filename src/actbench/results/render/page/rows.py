"""The settings, command and machine of each row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actbench.results.measured import MeasuredRecord
from actbench.results.plain import plain
from actbench.results.records import Failure, Record
from actbench.results.render.page import memory, training
from actbench.results.render.page.pictures import Beside, Details
from actbench.results.runs import TrainingRun
from actbench.results.tables.computed import step_time_of
from actbench.results.tables.entries import join
from actbench.results.tables.training import Row, rows_of


def beside_measured(records: Sequence[MeasuredRecord]) -> Beside:
    """Return charts and details of the rows of :func:`actbench.results.tables.results_table`."""
    entries = join(records)
    details = tuple(_of_measured(entry.record) for entry in entries)
    return Beside(tuple(memory.groups_of(entries)), details)


def beside_trained(runs: Sequence[TrainingRun]) -> Beside:
    """Return charts and details of the rows of :func:`actbench.results.tables.training.accuracy_table`."""
    return Beside(tuple(training.groups_of(runs)), tuple(map(_of_trained, rows_of(runs))))


def _of_measured(record: MeasuredRecord) -> Details:
    time = step_time_of(record)
    return Details(_texts(record), is_estimated=time is not None and time.is_estimated)


def _of_trained(row: Row) -> Details:
    texts = _texts(row.runs[0])
    commands, seeds = {run.command for run in row.runs}, ", ".join(str(run.case.seed) for run in row.runs)
    return Details({**texts, "Command": plain("\n".join(sorted(commands))), "Seeds": seeds})


def _texts(record: Record[Any, Any]) -> dict[str, str]:
    machine, versions, outcome = record.machine, record.versions, record.outcome
    device = f"{machine.gpu}, " if machine.gpu else ""
    commit = f" ({versions.commit[:12]}{', uncommitted changes' if versions.dirty else ''})" if versions.commit else ""
    numbers = versions.model_dump(exclude_none=True, exclude={"actbench", "commit", "dirty"})
    found = {
        "Command": record.command,
        "Settings": _settings(record.case.model_dump(exclude_none=True)),
        "Failure": f"{outcome.reason}: {outcome.message}" if isinstance(outcome, Failure) else "",
        "Warnings": "\n".join(getattr(outcome, "warnings", ())),
        "Machine": f"{machine.name}: {device}{machine.processor}, {machine.cores} cores, {machine.system}",
        "Versions": f"actbench {versions.actbench}{commit}, {', '.join(f'{k} {v}' for k, v in numbers.items())}",
        "Recorded": f"{record.recorded_at}, recipe {record.recipe}",
    }
    return {heading: plain(text) for heading, text in found.items() if text}


def _settings(case: dict[str, Any]) -> str:
    """Return the fields of a case that are not None or false, as text."""
    told = ((name.replace("_", " "), value) for name, value in case.items() if value is not False)
    return ", ".join(name if value is True else f"{name} {value}" for name, value in told)
