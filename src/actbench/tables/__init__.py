"""Tables: columns that are declared once, filled from records."""

from __future__ import annotations

from actbench.tables.ledger import LedgerLine, ledger_table, lines_table, operators_table
from actbench.tables.table import (
    Table,
    estimates_table,
    fill,
    report_tables,
    results_table,
    sites_table,
    to_frame,
    unreached_table,
    varying_settings,
)

__all__ = [
    "LedgerLine",
    "Table",
    "estimates_table",
    "fill",
    "ledger_table",
    "lines_table",
    "operators_table",
    "report_tables",
    "results_table",
    "sites_table",
    "to_frame",
    "unreached_table",
    "varying_settings",
]
