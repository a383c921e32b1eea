"""The tables of a ledger: every saved tensor as the model runs, and the bytes of each operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actbench.ledger import Ledger, SavedTensor, called
from actbench.records import Case
from actbench.tables.columns import Column
from actbench.tables.table import Table, fill
from actbench.units import format_bytes


@dataclass(frozen=True)
class LedgerLine:
    """A saved tensor with the case that it belongs to."""

    case: Case
    saved: SavedTensor


@dataclass(frozen=True)
class _Sum:
    """What one operator keeps.

    Attributes:
        operator: Its name.
        tensors: How many it saves, those that others hold too among them.
        kept_bytes: Bytes that are counted at it.
        share: Of all bytes.
    """

    operator: str
    tensors: int
    kept_bytes: int
    share: float | None


def _shared(saved: SavedTensor) -> str | None:
    if not saved.shared_with:
        return None
    others = len(saved.shared_with) - 1
    return saved.shared_with[0] + (f" and {others} more" if others else "")


TENSORS: tuple[Column[SavedTensor], ...] = (
    Column("module", "Module", "text", lambda saved: called(saved.module)),
    Column("operator", "Operator", "text", lambda saved: saved.operator),
    Column("argument", "Argument", "text", lambda saved: saved.argument, detail=2),
    Column("shape", "Shape", "text", lambda saved: "x".join(map(str, saved.shape)) or "scalar", detail=1),
    Column("dtype", "Type", "text", lambda saved: saved.dtype, detail=3),
    Column("bits", "Bits", "number", lambda saved: saved.bits),
    Column("kept_bytes", "Kept", "bytes", lambda saved: saved.kept_bytes),
    Column("shared_with", "Shared with", "text", _shared, detail=4),
    Column("reason", "Reason", "text", lambda saved: saved.reason, detail=1),
)
OPERATORS: tuple[Column[_Sum], ...] = (
    Column("operator", "Operator", "text", lambda total: total.operator),
    Column("tensors", "Tensors", "count", lambda total: total.tensors),
    Column("kept_bytes", "Kept", "bytes", lambda total: total.kept_bytes),
    Column("share", "Of all", "share", lambda total: total.share),
)


def ledger_table(ledger: Ledger, title: str = "Saved tensors") -> Table:
    """Return one row for each saved tensor, in the order in which the model runs, with a summary below."""
    return fill(title, TENSORS, ledger.entries, _notes(ledger))


def operators_table(ledger: Ledger, title: str = "Kept by operator") -> Table:
    """Return one row for each operator, the one that keeps the most first, and the total."""
    entries, total = ledger.entries, ledger.total_bytes
    names = dict.fromkeys(entry.operator for entry in entries)
    sums = [_sum(name, [entry for entry in entries if entry.operator == name], total) for name in names]
    sums.sort(key=lambda each: -each.kept_bytes)
    return fill(title, OPERATORS, [*sums, _sum(f"total of {len(sums)}", entries, total)])


def lines_table(lines: Sequence[LedgerLine], title: str = "Saved tensors") -> Table:
    """Return the saved tensors of several cases in one table, each row with what its case is."""
    return fill(title, (*(_of_case(name) for name in _CASE), *map(_of_tensor, TENSORS)), lines)


_CASE = ("model", "scheme", "batch_size", "meter")


def _of_case(name: str) -> Column[LedgerLine]:
    return Column(name, name.capitalize(), "text", lambda line: getattr(line.case, name))


def _of_tensor(column: Column[Any]) -> Column[LedgerLine]:
    return Column(column.key, column.title, column.unit, lambda line: column.compute(line.saved))


def _sum(name: str, entries: Sequence[SavedTensor], total_bytes: int) -> _Sum:
    kept = sum(entry.kept_bytes for entry in entries)
    return _Sum(name, len(entries), kept, kept / total_bytes if total_bytes else None)


def _notes(ledger: Ledger) -> list[str]:
    counted = [entry for entry in ledger.entries if entry.kept_bytes]
    shared = [entry for entry in ledger.entries if entry.shared_with and not entry.kept_bytes]
    verb = "shares" if len(shared) == 1 else "share"
    summary = (
        f"Kept for backward: {format_bytes(ledger.total_bytes)} in {len(counted)} of {len(ledger.entries)} saved "
        f"tensors; {len(shared)} {verb} the storage of an earlier row, not counted again."
    )
    more = f"{ledger.recomputed} more are not saved but recomputed in the backward pass."
    return [summary, more] if ledger.recomputed else [summary]
