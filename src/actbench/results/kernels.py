"""The records of measured operators, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, ValidationError

from actbench.errors import StoreError, first_line
from actbench.paths import read_bytes
from actbench.results.data import CaseData, OutcomeData
from actbench.results.kinds import Kind
from actbench.results.records import (
    SCHEMA_VERSION,
    Data,
    Failure,
    FloatName,
    Machine,
    Migrations,
    Record,
    SchemaVersion,
    Versions,
)
from actbench.results.sentences import failures
from actbench.results.tables import Table, fill
from actbench.results.tables.values import Column, Spread, ratio, step_time, value_of, with_spread
from actbench.units import MIB, NonNegativeInt, PositiveInt

DeviceName = Literal["cpu", "cuda"]
ElementType = FloatName | Literal["uint8"]
Seconds = tuple[float, ...]
TITLE = "Operators"


class KernelCase(CaseData):
    """One operator at one dtype, number of bits and size.

    Attributes:
        operator: Such as ``stepwise_encode``, or ``layer:gelu`` for forward and backward.
        bits: Bits of a code; None for an operator without a choice.
        threads: Threads of the processor.
        compiled: Whether the exact operator is also measured under ``torch.compile``.
    """

    operator: str
    device: DeviceName
    dtype: ElementType
    bits: int | None = Field(default=None, ge=1, le=8)
    rows: PositiveInt
    columns: PositiveInt
    threads: PositiveInt
    compiled: bool = False

    @property
    def size(self) -> str:
        """Rows and columns as a user types them."""
        return f"{self.rows}x{self.columns}"

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.operator} {self.dtype}{'' if self.bits is None else f' {self.bits} bits'} {self.size}"

    @property
    def cells(self) -> dict[str, str]:
        """What distinguishes it from other operators."""
        return {"operator": self.operator, "type": self.dtype, "bits": str(self.bits or ""), "size": self.size}


class KernelTimes(OutcomeData):
    """The measurements of an operator; seconds are those of each run.

    Attributes:
        bits: Bits of a code; None if nothing is coded.
        moved_bytes: Bytes that the operator reads and writes, by count.
        floor_bytes: Bytes if each tensor were read or written once.
        copied_bytes: Bytes that the copy reads and writes.
        copy_seconds: Seconds of ``copy_`` between two existing tensors of this dtype and size, interleaved.
        exact: The operator that it replaces, such as ``nn.GELU``.
        compiled_seconds: Seconds of the exact operator under ``torch.compile``.
        note: What could not be measured.
    """

    kind: Literal["timed"] = "timed"
    bits: int | None = Field(default=None, ge=1, le=8)
    moved_bytes: NonNegativeInt
    floor_bytes: NonNegativeInt
    copied_bytes: NonNegativeInt
    seconds: Seconds
    copy_seconds: Seconds
    exact: str | None = None
    exact_seconds: Seconds | None = None
    compiled_seconds: Seconds | None = None
    note: str | None = None

    @property
    def bytes_per_second(self) -> float:
        """Moved bytes over the time of the median run."""
        return self.moved_bytes / statistics.median(self.seconds)

    @property
    def copy_share(self) -> float:
        """Bytes a second, as a share of the copy's."""
        return self.bytes_per_second * statistics.median(self.copy_seconds) / self.copied_bytes

    @property
    def ending(self) -> str:
        """The speed, beside a copy's."""
        return f"{self.bytes_per_second / 1e9:.3g} GB/s, {100 * self.copy_share:.0f} % of a copy's"


class KernelRecord(Record[KernelCase, Annotated[KernelTimes | Failure, Field(discriminator="kind")]]):
    """One line of a file of measured operators."""

    migrations: ClassVar[Migrations] = {}


class _Report(Data):
    """A whole run, in the format before December 2026."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    device: str
    threads: PositiveInt
    results: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    machine: Machine
    versions: Versions
    command: str
    recorded_at: str


_MOST_BYTES = 64 * MIB


def read_report(path: Path) -> list[KernelRecord]:
    """Return the records of a file that ``actbench kernels`` wrote as one report, before December 2026.

    Raises:
        StoreError: The file cannot be read, or is no such report.
    """
    try:
        report = _Report.model_validate_json(read_bytes(path, _MOST_BYTES))
        return [_of_report(report, result) for result in report.results]
    except (OSError, ValidationError) as error:
        raise StoreError(f"{path} is no report of 'actbench kernels': {first_line(error)}") from None


def _of_report(report: _Report, result: dict[str, Any]) -> KernelRecord:
    of_case = {name: value for name, value in result.items() if name in KernelCase.model_fields}
    measured = {name: value for name, value in result.items() if name in KernelTimes.model_fields}
    compiled = result.get("compiled_seconds") is not None
    return KernelRecord(
        recipe="kernels",
        case=KernelCase(**of_case, threads=report.threads, compiled=compiled),
        outcome=KernelTimes(**measured, note="; ".join(report.notes) or None),
        machine=report.machine,
        versions=report.versions,
        command=report.command,
        recorded_at=report.recorded_at,
    )


_GIGA = 1e9
_HOW = (
    "Medians with interquartile ranges of runs that took turns with the copy and the exact operator, each after a copy "
    "of other tensors."
)
_BYTES = (
    "GB/s and its share: bytes that the operator reads and writes, by count, against those of copy_ between two "
    "existing tensors. Bytes: those moved, against reading and writing each tensor once."
)


def kernel_tables(records: Sequence[KernelRecord], title: str = TITLE) -> tuple[Table]:
    """Return one row for each operator."""
    several = len({(record.machine.identity, record.case.device) for record in records}) > 1
    columns = (_WHERE, *COLUMNS) if several else COLUMNS
    return (fill(title, columns, records, _notes(records)),)


def _notes(records: Sequence[KernelRecord]) -> list[str]:
    outcomes = ((record.case.name, "", record.outcome) for record in records)
    failed = failures(outcomes, "; ".join)
    notes = [record.outcome.note for record in records if isinstance(record.outcome, KernelTimes)]
    return [*dict.fromkeys(map(_where, records)), _HOW, _BYTES, *dict.fromkeys(filter(None, notes)), *failed]


def _where(record: KernelRecord) -> str:
    case, machine = record.case, record.machine
    device = machine.gpu if case.device == "cuda" else machine.processor
    threads = "1 thread" if case.threads == 1 else f"{case.threads} threads"
    return f"{machine.name}: {device}, {threads} of the processor, torch {record.versions.torch}."


def _of(value: Callable[[KernelTimes], Any]) -> Callable[[KernelRecord], Any]:
    """Return a function from a record to a value of its measurement, or None if the operator failed."""
    return lambda record: value(record.outcome) if isinstance(record.outcome, KernelTimes) else None


def _time(of: Callable[[KernelTimes], Sequence[float] | None]) -> Callable[[KernelRecord], Spread | None]:
    return _of(lambda found: step_time(of(found)))


def _over(of: Callable[[KernelTimes], Sequence[float] | None]) -> Callable[[KernelRecord], Spread | None]:
    return _of(lambda found: ratio(step_time(found.seconds), step_time(of(found))))


_EXACT, _COMPILED = attrgetter("exact_seconds"), attrgetter("compiled_seconds")
_WHERE: Column[KernelRecord] = Column(
    "machine", "Machine", "text", lambda record: f"{record.machine.name}, {record.case.device}"
)

COLUMNS: tuple[Column[KernelRecord], ...] = (
    Column("operator", "Operator", "text", lambda record: record.case.operator),
    Column("dtype", "Type", "text", lambda record: record.case.dtype),
    Column("bits", "Bits", "count", _of(lambda found: found.bits)),
    Column("size", "Size", "text", lambda record: record.case.size),
    *with_spread(
        "seconds", "Time", "seconds", _time(attrgetter("seconds")), "lower", spread_key="seconds_iqr", sign="± IQR"
    ),
    Column("gigabytes_per_second", "GB/s", "rate", _of(lambda found: found.bytes_per_second / _GIGA), better="higher"),
    Column("copy_share", "Of copy", "share", _of(lambda found: found.copy_share), better="higher"),
    Column("moved_over_floor", "Bytes", "ratio", _of(lambda found: found.moved_bytes / found.floor_bytes), "lower"),
    Column("exact", "Exact", "text", _of(lambda found: found.exact), detail=1),
    *with_spread(
        "exact_seconds", "Exact time", "seconds", _time(_EXACT), detail=1, spread_key="exact_iqr", sign="± IQR"
    ),
    *with_spread("over_exact", "Over exact", "ratio", _over(_EXACT), "lower"),
    Column("compiled_seconds", "Compiled", "seconds", value_of(_time(_COMPILED)), detail=2),
    Column("over_compiled", "Over compiled", "ratio", value_of(_over(_COMPILED)), "lower", detail=2),
)
"""The columns. ``seconds`` is the median, and ratios are ratios of medians."""

TIMED: Final = Kind("kernels", KernelRecord, kernel_tables, TITLE, older={".json": read_report})
