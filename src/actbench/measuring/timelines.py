"""Tasks of separate processes: ``measure --timeline``, ``--ledger``, ``--export-snapshot`` and ``--export-trace``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from actbench.errors import MeasurementError
from actbench.measuring import bench
from actbench.measuring.failures import failure_of as failure_of  # a bench has it
from actbench.model.data import Data
from actbench.model.ledger import Ledger
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import blockmarks
from actbench.simulator.simulated import SimulatedMeter

Session = partial(bench.Session, timeline=True)
"""A case whose measurement also has a timeline."""
Trial = bench.Trial
"""A trial for the largest batch, without a timeline, as none is shown."""


class FileRequest(Data):
    """A case, and the file for its snapshot or its trace."""

    case: Case
    path: Path


def write_snapshot(text: str) -> str:
    """Call :func:`actbench.measuring.bench.snapshot` as a task: from a request in JSON to an empty answer."""
    asked = FileRequest.model_validate_json(text)
    asked.path.write_bytes(bench.snapshot(asked.case))
    return ""


class _Traced(bench.Session):
    """A case whose step is cut at the blocks of its model."""

    def _exact(self) -> TrainingSetup:
        exact = super()._exact()
        if isinstance(self.meter, SimulatedMeter):
            self.meter.blocks = blockmarks.found(exact.module)  # before schemes, which replace parts of blocks
        return exact


def write_trace(text: str) -> str:
    """Write the trace of a simulated step as a task: from a request in JSON to an empty answer.

    Raises:
        MeasurementError: The model's blocks do not run one after the other, or its step is not simulated.
    """
    asked = FileRequest.model_validate_json(text)
    session = _Traced(asked.case)
    session.memory()
    trace = session.meter.trace if isinstance(session.meter, SimulatedMeter) else None
    if trace is None:
        raise MeasurementError(f"{asked.case.model} has no trace: its blocks do not run one after the other")
    asked.path.write_text("".join(f"{line}\n" for line in trace.lines()), encoding="utf-8")
    return ""


def itemize_all(text: str) -> str:
    """Call :func:`actbench.measuring.bench.itemize` as a task: from a list of cases to their ledgers, both as JSON."""
    ledgers = list(map(bench.itemize, TypeAdapter(list[Case]).validate_json(text)))
    return TypeAdapter(list[Ledger]).dump_json(ledgers).decode()
