"""What is written down of measured operators, and its table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Literal

from pydantic import Field

from actbench.results.records import SCHEMA_VERSION, Data, FloatName, Machine, SchemaVersion, Versions
from actbench.results.tables import Table, fill
from actbench.results.tables.columns import Column, value_of, with_spread
from actbench.results.tables.values import Spread, ratio, step_time
from actbench.units import NonNegativeInt, PositiveInt

DeviceName = Literal["cpu", "cuda"]
ElementType = FloatName | Literal["uint8"]
Seconds = tuple[float, ...]


class KernelResult(Data):
    """One operator at one type, number of bits and size; seconds are those of each run.

    Attributes:
        operator: Such as ``stepwise_encode``, or ``layer:gelu`` for forward and backward.
        moved_bytes: What the operator reads and writes, by count.
        floor_bytes: What it would, if each tensor were read or written once.
        copied_bytes: What the copy reads and writes.
        copy_seconds: Of ``copy_`` between two existing tensors of this type and size, interleaved.
        exact: What the operator stands in for, such as ``nn.GELU``.
        compiled_seconds: Of the exact operator under ``torch.compile``.
    """

    operator: str
    device: DeviceName
    dtype: ElementType
    bits: int | None = Field(default=None, ge=1, le=8)
    rows: PositiveInt
    columns: PositiveInt
    moved_bytes: NonNegativeInt
    floor_bytes: NonNegativeInt
    copied_bytes: NonNegativeInt
    seconds: Seconds
    copy_seconds: Seconds
    exact: str | None = None
    exact_seconds: Seconds | None = None
    compiled_seconds: Seconds | None = None

    @property
    def bytes_per_second(self) -> float:
        """Moved bytes by the median run."""
        return self.moved_bytes / statistics.median(self.seconds)

    @property
    def copy_share(self) -> float:
        """Bytes a second as a share of the copy's."""
        return self.bytes_per_second * statistics.median(self.copy_seconds) / self.copied_bytes


class KernelReport(Data):
    """A whole run, as ``--export-json`` writes it; ``notes`` say what could not be measured."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    device: str
    threads: PositiveInt
    results: tuple[KernelResult, ...]
    notes: tuple[str, ...] = ()
    machine: Machine
    versions: Versions
    command: str
    recorded_at: str


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


def _time(of: Callable[[KernelResult], Sequence[float] | None]) -> Callable[[KernelResult], Spread | None]:
    return lambda result: step_time(of(result))


def _over(of: Callable[[KernelResult], Sequence[float] | None]) -> Callable[[KernelResult], Spread | None]:
    return lambda result: ratio(step_time(result.seconds), step_time(of(result)))


_EXACT, _COMPILED = attrgetter("exact_seconds"), attrgetter("compiled_seconds")

COLUMNS: tuple[Column[KernelResult], ...] = (
    Column("operator", "Operator", "text", lambda result: result.operator),
    Column("dtype", "Type", "text", lambda result: result.dtype),
    Column("bits", "Bits", "count", lambda result: result.bits),
    Column("size", "Size", "text", lambda result: f"{result.rows}x{result.columns}"),
    *with_spread(
        "seconds", "Time", "seconds", _time(attrgetter("seconds")), "lower", spread_key="seconds_iqr", sign="± IQR"
    ),
    Column("gigabytes_per_second", "GB/s", "rate", lambda result: result.bytes_per_second / _GIGA, better="higher"),
    Column("copy_share", "Of copy", "share", lambda result: result.copy_share, better="higher"),
    Column("moved_over_floor", "Bytes", "ratio", lambda result: result.moved_bytes / result.floor_bytes, "lower"),
    Column("exact", "Exact", "text", lambda result: result.exact, detail=1),
    *with_spread(
        "exact_seconds", "Exact time", "seconds", _time(_EXACT), detail=1, spread_key="exact_iqr", sign="± IQR"
    ),
    *with_spread("over_exact", "Over exact", "ratio", _over(_EXACT), "lower"),
    Column("compiled_seconds", "Compiled", "seconds", value_of(_time(_COMPILED)), detail=2),
    Column("over_compiled", "Over compiled", "ratio", value_of(_over(_COMPILED)), "lower", detail=2),
)
"""What a row shows. ``seconds`` is the median, and the ratios are those of medians."""
