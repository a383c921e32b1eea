"""Tables of the saved tensors of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actbench.model.ledger import Ledger, SavedTensor, display_path, of_blocks
from actbench.model.records import Case
from actbench.report.tables.table import Table, fill
from actbench.report.tables.values import Column
from actbench.units import counted, format_bytes


@dataclass(frozen=True)
class LedgerLine:
    """A saved tensor with its case."""

    case: Case
    saved: SavedTensor


@dataclass(frozen=True)
class _Sum:
    """The saved tensors with one name: their number, their bytes, and their share of all."""

    name: str
    tensors: int
    kept_bytes: int
    share: float | None


def _shared(saved: SavedTensor) -> str | None:
    if not saved.shared_with:
        return None
    others = len(saved.shared_with) - 1
    return saved.shared_with[0] + (f" and {others} more" if others else "")


TENSORS: tuple[Column[SavedTensor], ...] = (
    Column("module", "Module", "text", lambda saved: display_path(saved.module)),
    Column("operator", "Operator", "text", lambda saved: saved.operator),
    Column("argument", "Argument", "text", lambda saved: saved.argument, detail=1),
    Column("shape", "Shape", "text", lambda saved: "x".join(map(str, saved.shape)) or "scalar", detail=1),
    Column("dtype", "Type", "text", lambda saved: saved.dtype, detail=3),
    Column("bits", "Bits", "number", lambda saved: saved.bits),
    Column("kept_bytes", "Kept", "bytes", lambda saved: saved.kept_bytes),
    Column("shared_with", "Shared with", "text", _shared, detail=4),
    Column("reason", "Reason", "text", lambda saved: saved.reason),
)
TOP = 20
"""Rows of each table by default."""


def total_tables(ledger: Ledger, top: int | None = TOP) -> tuple[Table, ...]:
    """Return the totals by module, by operator and by reason, the largest first and the sum of all last.

    Modules whose paths differ only in numbers, such as the blocks of a network, are one row. Rows after the first
    ``top`` become one row.
    """
    return (
        _totals(ledger, "Kept by module", "Module", lambda saved: of_blocks(display_path(saved.module)), top),
        _totals(ledger, "Kept by operator", "Operator", lambda saved: saved.operator, top),
        _totals(ledger, "Kept by reason", "Reason", _why, top),
    )


def ledger_table(
    ledger: Ledger, title: str = "Saved tensors", *, top: int | None = None, everything: bool = True
) -> Table:
    """Return one row for each saved tensor in the order of the run, with a summary below.

    Args:
        ledger: The saved tensors.
        title: Heading of the table.
        top: Show only so many, the largest first; None for all.
        everything: Also show tensors of 0 bytes.
    """
    rows = [entry for entry in ledger.entries if everything or entry.kept_bytes]
    if top is not None:
        rows = sorted(rows, key=lambda entry: -entry.kept_bytes)[:top]
    return fill(title, TENSORS, rows, _notes(ledger, rows))


def _totals(ledger: Ledger, title: str, heading: str, of: Callable[[SavedTensor], str], top: int | None) -> Table:
    groups: dict[str, list[SavedTensor]] = {}
    for entry in ledger.entries:
        groups.setdefault(of(entry), []).append(entry)
    whole = ledger.total_bytes
    sums = sorted((_sum(name, group, whole) for name, group in groups.items()), key=lambda each: -each.kept_bytes)
    shown = sums[:top]
    if rest := sums[len(shown) :]:
        left = [entry for each in rest for entry in groups[each.name]]
        shown.append(_sum(f"{len(rest)} more", left, whole))
    columns: tuple[Column[_Sum], ...] = (
        Column(heading.lower(), heading, "text", lambda total: total.name),
        Column("tensors", "Tensors", "count", lambda total: total.tensors),
        Column("kept_bytes", "Kept", "bytes", lambda total: total.kept_bytes),
        Column("share", "Of all", "share", lambda total: total.share),
    )
    return fill(title, columns, [*shown, _sum(f"total of {len(sums)}", ledger.entries, whole)])


def _why(saved: SavedTensor) -> str:
    if saved.reason is not None:
        return saved.reason
    if saved.packed:
        return "packed by the scheme"
    return "saved as it is" if saved.kept_bytes or not saved.shared_with else "in a storage that is counted already"


def lines_table(lines: Sequence[LedgerLine], title: str = "Saved tensors") -> Table:
    """Return the saved tensors of several cases in one table."""
    return fill(title, (*(_of_case(name) for name in _CASE), *map(_of_tensor, TENSORS)), lines)


_CASE = ("model", "scheme", "batch_size", "sequence_length", "meter")


def _of_case(name: str) -> Column[LedgerLine]:
    return Column(name, name.capitalize(), "text", lambda line: getattr(line.case, name))


def _of_tensor(column: Column[Any]) -> Column[LedgerLine]:
    return Column(column.key, column.title, column.unit, lambda line: column.compute(line.saved))


def _sum(name: str, entries: Sequence[SavedTensor], total_bytes: int) -> _Sum:
    kept = sum(entry.kept_bytes for entry in entries)
    return _Sum(name, len(entries), kept, kept / total_bytes if total_bytes else None)


def _rows(count: int, kind: str = "") -> str:
    return counted(count, f"{kind}row")


def _notes(ledger: Ledger, shown: Sequence[SavedTensor]) -> list[str]:
    counted = [entry for entry in ledger.entries if entry.kept_bytes]
    shared = [entry for entry in ledger.entries if entry.shared_with and not entry.kept_bytes]
    verb = "shares" if len(shared) == 1 else "share"
    summary = (
        f"Kept for backward: {format_bytes(ledger.total_bytes)} in {len(counted)} of {len(ledger.entries)} saved "
        f"tensors; {len(shared)} {verb} the storage of an earlier row, not counted again."
    )
    lines = [summary]
    smaller = len(counted) - sum(1 for entry in shown if entry.kept_bytes)
    empty = len(ledger.entries) - len(shown) - smaller
    left = ledger.total_bytes - sum(entry.kept_bytes for entry in shown)
    if smaller:
        lines.append(
            f"Not shown: {_rows(smaller, 'smaller ')} of {format_bytes(left)} together; --top {len(counted)} shows all."
        )
    if empty:
        lines.append(f"Not shown: {_rows(empty)} of 0 B; --all shows every row, in the order of the run.")
    if ledger.recomputed:
        lines.append(f"{ledger.recomputed} more are not saved but recomputed in the backward pass.")
    return lines
