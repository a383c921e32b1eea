"""What runs in a process of its own for ``measure --timeline`` and ``--export-snapshot``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from actbench.measuring import bench
from actbench.measuring.bench import failure_of as failure_of
from actbench.measuring.ranks import is_of_others as is_of_others
from actbench.measuring.ranks import join as join
from actbench.results.records import Case, Data

Session = partial(bench.Session, timeline=True)
"""A case whose measurement has a timeline, too."""
Trial = bench.Session
"""A case that is tried for the largest batch, of which nobody would see the timeline."""


class SnapshotRequest(Data):
    """A case, and the file that its snapshot is written to."""

    case: Case
    path: Path


def write_snapshot(text: str) -> str:
    """Do :func:`actbench.measuring.bench.snapshot` as a task: a request in JSON, and no answer."""
    asked = SnapshotRequest.model_validate_json(text)
    asked.path.write_bytes(bench.snapshot(asked.case))
    return ""
