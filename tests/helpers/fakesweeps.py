"""Sweeps of the cases of fakebench into a store in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case
from actbench.run.recipes.sections import Planned
from actbench.run.runner import run_plan


@dataclass
class Rows:
    """A store in memory."""

    path = Path("results.jsonl")
    records: list[MeasuredRecord] = field(default_factory=list)

    def done(self, case):
        return any(record.case == case for record in self.records)

    def failed(self, case):
        return any(record.case == case and record.outcome.kind == "failed" for record in self.records)

    def find(self, case):
        return next((record for record in reversed(self.records) if record.case == case), None)

    def append(self, record):
        self.records.append(record)

    def outcome(self, scheme):
        return [record.outcome for record in self.records if record.case.scheme == scheme][-1]


def cases(log, *schemes, **settings):
    settings = {"batch_size": 4, "meter": "cpu", "min_steps": 10, "min_seconds": 0.0, **settings}
    return [Case(model=str(log), scheme=scheme, **settings) for scheme in schemes]


def sweep(plan, rows=None, **settings):
    rows = Rows() if rows is None else rows
    entries = [entry if isinstance(entry, Planned) else Planned(entry) for entry in plan]
    settings = {"recipe": "test", "command": "actbench sweep test", "bench": "fakebench", "preload": (), **settings}
    return rows, run_plan(entries, rows, **settings)


def events(log, kind):
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split()[0] for line in lines if line.split()[2] == kind]
