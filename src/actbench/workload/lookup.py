"""Looks up the model of a case, as the task of a process: what others wrote is read there, within limits."""

from __future__ import annotations

from actbench import workload as workloads
from actbench.model.records import Case


def look_up(text: str) -> str:
    """Find the model of a case, given as JSON.

    Raises:
        ModelError: It is unknown, broken, or unfit for the task.
    """
    workloads.load_workload(Case.model_validate_json(text))
    return ""
