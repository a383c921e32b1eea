"""The report of a machine's calibration, and its table."""

from __future__ import annotations

from actbench.model.data import Data
from actbench.model.provenance import Machine, Versions
from actbench.model.records import SCHEMA_VERSION, SchemaVersion
from actbench.report.tables import Table, fill
from actbench.report.tables.values import Column
from actbench.units import NonNegativeFloat, NonNegativeInt, PositiveInt, format_seconds


class KindFound(Data):
    """The speed of the operators of one kind in one dtype.

    Attributes:
        operators: How many different operators were measured.
        flops_per_second: The best rate, for operators counted by floating-point operations.
        bytes_per_second: The median rate of other operators, each at its largest size.
        share: This rate as a share of the peak rate, or of the bandwidth.
        least_seconds: The median time on the smallest tensors.
    """

    kind: str
    precision: str
    operators: PositiveInt
    flops_per_second: NonNegativeFloat | None = None
    bytes_per_second: NonNegativeFloat | None = None
    share: NonNegativeFloat
    least_seconds: NonNegativeFloat


class HostFound(Data):
    """Seconds that the host needs for one operator, by part of the step and kind."""

    forward: NonNegativeFloat
    backward: NonNegativeFloat
    optimizer: NonNegativeFloat
    view: NonNegativeFloat
    packing: NonNegativeFloat
    listed: NonNegativeFloat


class CalibrationReport(Data):
    """The result of a calibration, as ``--export-json`` writes it.

    Attributes:
        device: Name of the measured device.
        threads: Threads of the processor.
        flops_per_second: Rate of the best matrix product, by precision.
        bandwidth: Bytes a second that a copy reads and writes.
        link: Bytes a second between device and host memory, in one direction.
        launch_seconds: Time of an operator on a tiny tensor.
        timed: Number of timed runs of operators.
        seconds: Duration of the calibration.
        notes: What was not measured, and why.
    """

    schema_version: SchemaVersion = SCHEMA_VERSION
    device: str
    threads: PositiveInt
    flops_per_second: dict[str, float]
    bandwidth: NonNegativeFloat
    link: NonNegativeFloat
    launch_seconds: NonNegativeFloat
    host: HostFound
    kinds: tuple[KindFound, ...]
    timed: NonNegativeInt
    seconds: NonNegativeFloat
    notes: tuple[str, ...] = ()
    machine: Machine
    versions: Versions
    command: str
    recorded_at: str


_TERA, _GIGA = 1e12, 1e9


def calibration_table(report: CalibrationReport) -> Table:
    """Return one row for each kind of operator and dtype."""
    peaks = ", ".join(f"{name} {rate / _TERA:.3g} TFLOP/s" for name, rate in report.flops_per_second.items())
    links = (
        f"memory {report.bandwidth / _GIGA:.3g} GB/s, link to host memory {report.link / _GIGA:.3g} GB/s, the smallest "
        f"operators {format_seconds(report.launch_seconds)}"
    )
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    notes = [
        f"{report.machine.name}, {threads} of the processor, torch {report.versions.torch}.",
        f"{report.timed} operators were timed in {report.seconds:.0f} s.",
        f"Peak rates: {peaks}; {links}.",
        f"The host needs, in addition to what operators take: {_of_host(report.host)}.",
        "Share: of the peak rate of the type, or of the bandwidth; more than 100 % where caches help.",
        *report.notes,
    ]
    return fill(f"What {report.device} reaches", COLUMNS, report.kinds, notes)


def _of_host(host: HostFound) -> str:
    what = {
        "an operator of the forward pass": host.forward,
        "one of the backward pass": host.backward,
        "one of the optimizer": host.optimizer,
        "one that packs": host.packing,
        "a view": host.view,
    }
    return ", ".join(f"{format_seconds(seconds)} for {name}" for name, seconds in what.items())


COLUMNS: tuple[Column[KindFound], ...] = (
    Column("kind", "Kind", "text", lambda found: found.kind),
    Column("precision", "Type", "text", lambda found: found.precision),
    Column("operators", "Operators", "count", lambda found: found.operators),
    Column(
        "gigaflops_per_second",
        "GFLOP/s",
        "rate",
        lambda found: None if found.flops_per_second is None else found.flops_per_second / _GIGA,
        better="higher",
    ),
    Column(
        "gigabytes_per_second",
        "GB/s",
        "rate",
        lambda found: None if found.bytes_per_second is None else found.bytes_per_second / _GIGA,
        better="higher",
    ),
    Column("share", "Share", "share", lambda found: found.share, better="higher"),
    Column("least_seconds", "Smallest", "seconds", lambda found: found.least_seconds, "lower"),
)
