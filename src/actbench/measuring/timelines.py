"""The tasks of separate processes for ``measure --timeline``, ``--ledger`` and ``--export-snapshot``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from actbench.measuring import bench
from actbench.measuring.failures import failure_of as failure_of  # a bench has it
from actbench.model.data import Data
from actbench.model.ledger import Ledger
from actbench.model.records import Case

Session = partial(bench.Session, timeline=True)
"""A case whose measurement also has a timeline."""
Trial = bench.Trial
"""A trial for the largest batch, without a timeline, which nobody would see."""


class SnapshotRequest(Data):
    """A case, and the file for its snapshot."""

    case: Case
    path: Path


def write_snapshot(text: str) -> str:
    """Call :func:`actbench.measuring.bench.snapshot` as a task: from a request in JSON to an empty answer."""
    asked = SnapshotRequest.model_validate_json(text)
    asked.path.write_bytes(bench.snapshot(asked.case))
    return ""


def itemize_all(text: str) -> str:
    """Call :func:`actbench.measuring.bench.itemize` as a task: from a list of cases to their ledgers, both as JSON."""
    ledgers = list(map(bench.itemize, TypeAdapter(list[Case]).validate_json(text)))
    return TypeAdapter(list[Ledger]).dump_json(ledgers).decode()
