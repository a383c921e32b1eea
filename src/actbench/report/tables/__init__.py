"""Tables: columns, declared once and filled from records."""

from __future__ import annotations

from actbench.report.tables.table import (
    Table,
    estimates_table,
    fill,
    report_tables,
    results_table,
    varying_settings,
)
from actbench.report.tables.values import Curve

__all__ = [
    "Curve",
    "Table",
    "estimates_table",
    "fill",
    "report_tables",
    "results_table",
    "varying_settings",
]
