"""The table of a report: columns declared once, in base units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actbench.kernelbench.records import KernelReport, KernelResult
from actbench.tables import Table, fill
from actbench.tables.columns import Column
from actbench.tables.timing import Spread, ratio, step_time

_GIGA = 1e9
_HOW = (
    "medians with interquartile ranges of runs that took turns with the copy and the exact operator, each after a copy "
    "of other tensors."
)
_BYTES = (
    "GB/s and its share: bytes that the operator reads and writes, by count, against those of copy_ between two "
    "existing tensors. Bytes: those moved, against reading and writing each tensor once."
)


def report_table(report: KernelReport) -> Table:
    """Return one row for each result."""
    return fill(f"Operators on {report.device}", COLUMNS, report.results, _notes(report))


def _notes(report: KernelReport) -> list[str]:
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    where = f"{report.machine.name}, {threads} of the processor, torch {report.versions.torch}"
    return [f"{where}; {_HOW}", _BYTES, *report.notes]


def _median(of: Callable[[KernelResult], Sequence[float] | None]) -> Callable[[KernelResult], float | None]:
    return lambda result: _value(step_time(of(result)))


def _range(of: Callable[[KernelResult], Sequence[float] | None]) -> Callable[[KernelResult], float | None]:
    return lambda result: _spread(step_time(of(result)))


def _value(found: Spread | None) -> float | None:
    return None if found is None else found.value


def _spread(found: Spread | None) -> float | None:
    return None if found is None else found.spread


def _over(result: KernelResult, other: Sequence[float] | None) -> Spread | None:
    return ratio(step_time(result.seconds), step_time(other))


COLUMNS: tuple[Column[KernelResult], ...] = (
    Column("operator", "Operator", "text", lambda result: result.operator),
    Column("dtype", "Type", "text", lambda result: result.dtype),
    Column("bits", "Bits", "count", lambda result: result.bits),
    Column("size", "Size", "text", lambda result: f"{result.rows}x{result.columns}"),
    Column("seconds", "Time", "seconds", _median(lambda result: result.seconds), better="lower"),
    Column("seconds_iqr", "± IQR", "seconds", _range(lambda result: result.seconds), spread_of="seconds"),
    Column("gigabytes_per_second", "GB/s", "rate", lambda result: result.bytes_per_second / _GIGA, better="higher"),
    Column("copy_share", "Of copy", "share", lambda result: result.copy_share, better="higher"),
    Column("moved_over_floor", "Bytes", "ratio", lambda result: result.moved_bytes / result.floor_bytes, "lower"),
    Column("exact", "Exact", "text", lambda result: result.exact, detail=1),
    Column("exact_seconds", "Exact time", "seconds", _median(lambda result: result.exact_seconds), detail=1),
    Column("exact_iqr", "± IQR", "seconds", _range(lambda result: result.exact_seconds), spread_of="exact_seconds"),
    Column("over_exact", "Over exact", "ratio", lambda r: _value(_over(r, r.exact_seconds)), better="lower"),
    Column("over_exact_spread", "±", "ratio", lambda r: _spread(_over(r, r.exact_seconds)), spread_of="over_exact"),
    Column("compiled_seconds", "Compiled", "seconds", _median(lambda result: result.compiled_seconds), detail=2),
    Column(
        "over_compiled", "Over compiled", "ratio", lambda r: _value(_over(r, r.compiled_seconds)), "lower", detail=2
    ),
)
"""What a row shows. ``seconds`` is the median, and the ratios are those of medians."""
