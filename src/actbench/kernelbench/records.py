"""What is written down of a measured operator."""

from __future__ import annotations

import statistics
from typing import Annotated, Final, Literal

from pydantic import Field

from actbench.counts import NonNegativeInt, PositiveInt
from actbench.records import Data, FloatType, Machine, Versions

SCHEMA_VERSION: Final = 1

DeviceName = Literal["cpu", "cuda"]
ElementType = FloatType | Literal["uint8"]
Seconds = tuple[float, ...]


class KernelResult(Data):
    """One operator at one type, number of bits and size.

    Attributes:
        operator: What was measured, such as ``stepwise_encode``, or ``layer:gelu`` for forward and backward.
        bits: Bits of a code, where there are codes.
        rows: Rows of the tensor.
        columns: Columns of the tensor.
        moved_bytes: What the operator reads and writes, by count.
        floor_bytes: What it would, if each tensor were read or written once.
        copied_bytes: What the copy reads and writes.
        seconds: Of each run.
        copy_seconds: Of each run of ``copy_`` between two existing tensors of this type and size.
        exact: What the operator stands in for, such as ``nn.GELU``.
        exact_seconds: Of each run of that, interleaved with the others.
        compiled_seconds: The same under ``torch.compile``.
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
    """A whole run: what ``--export-json`` writes.

    Attributes:
        device: Name of the processor or GPU that computed.
        threads: Threads of the processor that torch used.
        notes: What could not be measured, and why.
    """

    schema_version: Annotated[int, Field(strict=True, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    device: str
    threads: PositiveInt
    results: tuple[KernelResult, ...]
    notes: tuple[str, ...] = ()
    machine: Machine
    versions: Versions
    command: str
    recorded_at: str
