"""Results files: one record a line, never lost and never repeated."""

from __future__ import annotations

from actbench.store.store import Results, Store, files_in, read, read_all, results_path

__all__ = ["Results", "Store", "files_in", "read", "read_all", "results_path"]
