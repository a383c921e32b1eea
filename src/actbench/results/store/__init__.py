"""Results files: one record a line, never lost and never repeated."""

from __future__ import annotations

from actbench.results.store.store import RUNS_SUFFIX, Results, Store, files_in, read, read_all, results_path

__all__ = ["RUNS_SUFFIX", "Results", "Store", "files_in", "read", "read_all", "results_path"]
