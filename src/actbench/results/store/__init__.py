"""Results files: one record a line, never lost and never repeated."""

from __future__ import annotations

from actbench.results.store.store import (
    FITS_SUFFIX,
    RUNS_SUFFIX,
    Results,
    Store,
    files_in,
    read,
    read_all,
    read_all_runs,
    results_path,
    runs_in,
)

__all__ = [
    "FITS_SUFFIX",
    "RUNS_SUFFIX",
    "Results",
    "Store",
    "files_in",
    "read",
    "read_all",
    "read_all_runs",
    "results_path",
    "runs_in",
]
