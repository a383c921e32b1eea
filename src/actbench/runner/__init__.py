"""Running a plan of cases, each in a process of its own."""

from __future__ import annotations

from actbench.runner.runner import Summary, run

__all__ = ["Summary", "run"]
