"""Results files: one record per line, never lost and never repeated."""

from __future__ import annotations

from actbench.results.store.store import (
    FITS_SUFFIX,
    KERNELS_SUFFIX,
    RUNS_SUFFIX,
    SWEEP_SUFFIX,
    Results,
    Store,
    files_below,
    files_in,
    read,
    read_all,
    read_kind,
    results_path,
)

__all__ = [
    "FITS_SUFFIX",
    "KERNELS_SUFFIX",
    "RUNS_SUFFIX",
    "SWEEP_SUFFIX",
    "Results",
    "Store",
    "files_below",
    "files_in",
    "read",
    "read_all",
    "read_kind",
    "results_path",
]
