"""The columns of the comparison of schemes, each with key, title, unit, direction and how to compute it.

Values are in base units; None means that there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from actbench.results.records import Failure
from actbench.results.tables.entries import Entry
from actbench.results.tables.values import Spread, Unit, Value

Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column of a table of items.

    Attributes:
        key: Name in CSV and data frames; amounts carry their base unit in it.
        title: Name in front of people.
        unit: ``share`` is a part of 1, ``change`` one with a sign, ``ratio`` a factor, ``rate`` samples a second.
        compute: From an item to its value.
        better: Which direction is an improvement, where one is.
        spread_of: Key of the column whose plus-minus this one is.
        detail: Where a terminal is narrow, columns of the highest detail are left out first; those of 0 never.
        quiet: Whether only CSV has it, because it tells rows apart nowhere.
    """

    key: str
    title: str
    unit: Unit
    compute: Callable[[Item], Value]
    better: Literal["lower", "higher"] | None = None
    spread_of: str | None = None
    detail: int = 0
    quiet: bool = False


def quotient(above: float | None, below: float | None) -> float | None:
    """Return ``above / below``, or None where one is missing or negative, or ``below`` is zero."""
    return above / below if above is not None and below is not None and above >= 0 and below > 0 else None


def change(before: float | None, after: float | None) -> float | None:
    """Return how much larger ``after`` is, as a share of ``before``."""
    grown = quotient(after, before)
    return None if grown is None else grown - 1


def setting(name: str, title: str, unit: Unit = "text", detail: int = 0) -> Column[Entry]:
    """Return the column of a field of the case."""
    return Column(name, title, unit, lambda entry: getattr(entry.record.case, name), detail=detail)


def _task(entry: Entry) -> Value:
    """Return the task that the model was trained for; in older records the one asked for, which may be ``auto``."""
    return getattr(entry.built, "task", None) or entry.record.case.task


def _sequence_length(entry: Entry) -> Value:
    return entry.built.sequence_length if entry.built else entry.record.case.sequence_length


def _image_size(entry: Entry) -> Value:
    """Return one number of pixels for square images, ``height x width`` for others."""
    if entry.built is None:
        return entry.record.case.image_size
    size = entry.built.image_size
    if size is None:
        return None
    return size[0] if size[0] == size[1] else _product(size)


def _audio_shape(entry: Entry) -> Value:
    shape = entry.built.audio_shape if entry.built else None
    return _product(shape) if shape else None


def _product(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _measured(name: str) -> Callable[[Entry], Value]:
    return lambda entry: getattr(entry.measured, name, None)


def _estimated(name: str) -> Callable[[Entry], Value]:
    return lambda entry: getattr(entry.estimate, name, None)


def _published(quantity: str) -> Callable[[Entry], Value]:
    def compute(entry: Entry) -> Value:
        for item in entry.record.published:
            if item.quantity == quantity:
                return item.value
        return None

    return compute


def _against_exact(name: str, compute: Callable[[Any, Any], float | None]) -> Callable[[Entry], Value]:
    """Compute a value from a field of the exact model's and the scheme's measurement."""
    return lambda entry: compute(getattr(entry.exact, name, None), getattr(entry.measured, name, None))


def value_of(of: Callable[[Item], Spread | None]) -> Callable[[Item], Value]:
    """Return a function from an item to its value without the spread."""
    return lambda item: spread.value if (spread := of(item)) else None


def with_spread(
    key: str,
    title: str,
    unit: Unit,
    of: Callable[[Item], Spread | None],
    better: Literal["lower", "higher"] | None = None,
    *,
    detail: int = 0,
    spread_key: str | None = None,
    spread_unit: Unit | None = None,
    sign: str = "±",
) -> tuple[Column[Item], Column[Item]]:
    """Return the columns of a value and of its spread, whose key and unit follow the value's unless given."""

    def spread(item: Item) -> Value:
        return found.spread if (found := of(item)) else None

    return (
        Column(key, title, unit, value_of(of), better, detail=detail),
        Column(spread_key or f"{key}_spread", sign, spread_unit or unit, spread, spread_of=key),
    )


def _spread(name: str) -> Callable[[Entry], Spread | None]:
    return lambda entry: getattr(entry, name)


def _saving(exact: float | None, scheme: float | None) -> float | None:
    left = quotient(scheme, exact)
    return None if left is None else 1 - left


def _estimate_error(name: str) -> Callable[[Entry], Value]:
    return lambda entry: change(getattr(entry.measured, name, None), getattr(entry.estimate, name, None))


def _status(entry: Entry) -> Value:
    return entry.record.outcome.reason if isinstance(entry.record.outcome, Failure) else None


MODEL = setting("model", "Model")
BATCH = setting("batch_size", "Batch", "count")
SCHEME = setting("scheme", "Scheme")
METER = setting("meter", "Meter", detail=1)
LABEL: Column[Entry] = Column("label", "Label", "text", lambda entry: entry.record.label, detail=2)
MACHINE: Column[Entry] = Column("machine", "Machine", "text", lambda entry: entry.record.machine.name)
PARETO: Column[Entry] = Column("pareto", "Pareto", "flag", lambda entry: entry.pareto or None, detail=3)
DIRTY: Column[Entry] = Column(
    "dirty", "Uncommitted", "flag", lambda entry: entry.record.versions.dirty or None, detail=3
)
STATUS: Column[Entry] = Column("status", "Status", "text", _status)

# A column where rows differ in them, a note below the table where they do not.
SETTINGS: tuple[Column[Entry], ...] = (
    Column("task", "Task", "text", _task),
    Column("model_class", "Class", "text", lambda entry: getattr(entry.built, "model_class", None)),
    Column("sequence_length", "Sequence length", "count", _sequence_length),
    Column("image_size", "Image size", "count", _image_size),
    Column("audio_shape", "Audio", "text", _audio_shape),
    setting("attention", "Attention"),
    Column("dtype", "Type", "text", lambda entry: entry.own("dtype")),
    setting("autocast", "Autocast"),
    Column("optimizer", "Optimizer", "text", lambda entry: entry.own("optimizer")),
    setting("weights", "Weights"),
    setting("device_profile", "Device profile"),
    setting("memory_limit_bytes", "Memory limit", "bytes"),
    setting("seed", "Seed", "count"),
)

OPTIMIZER_STATE: Column[Entry] = Column(
    "optimizer_bytes", "Optimizer state", "bytes", _measured("optimizer_bytes"), "lower", detail=1
)

RESULTS: tuple[Column[Entry], ...] = (
    Column("peak_bytes", "Peak", "bytes", _measured("peak_bytes"), "lower"),
    Column("peak_saving", "Saved", "share", _against_exact("peak_bytes", _saving), "higher"),
    Column("published_peak_saving", "Saved, published", "share", _published("peak_saving")),
    Column("published_peak_bytes", "Peak, published", "bytes", _published("peak_bytes")),
    Column("activation_bytes", "Activations", "bytes", _measured("activation_bytes"), "lower", detail=1),
    Column("activation_ratio", "Smaller by", "ratio", _against_exact("activation_bytes", quotient), "higher", detail=1),
    Column("published_activation_ratio", "Smaller by, published", "ratio", _published("activation_ratio"), detail=1),
    OPTIMIZER_STATE,
    Column("reserved_bytes", "Reserved", "bytes", _measured("reserved_bytes"), "lower", detail=2),
    Column("process_bytes", "Process", "bytes", _measured("process_bytes"), "lower", detail=2),
    *with_spread("samples_per_second", "Samples/s", "rate", _spread("throughput"), "higher", detail=2),
    *with_spread("relative_throughput", "Speed", "ratio", _spread("relative_throughput"), "higher"),
    *with_spread("step_seconds", "Step", "seconds", _spread("step"), "lower", detail=3),
    Column("largest_batch", "Largest batch", "count", _measured("largest_batch"), "higher"),
    Column("published_largest_batch", "Largest batch, published", "count", _published("largest_batch")),
    Column(
        "batch_ratio",
        "Batch ratio",
        "ratio",
        _against_exact("largest_batch", lambda exact, scheme: quotient(scheme, exact)),
        "higher",
        detail=1,
    ),
    Column("published_batch_ratio", "Batch ratio, published", "ratio", _published("batch_ratio"), detail=1),
    Column("gradient_error", "Gradient error", "number", _measured("gradient_error"), "lower", detail=2),
    Column("gradient_cosine", "Gradient cosine", "number", _measured("gradient_cosine"), "higher", detail=3),
    Column(
        "sketch_variance_predicted", "Variance, predicted", "number", _measured("sketch_variance_predicted"), detail=3
    ),
    Column("sketch_variance_observed", "Variance, observed", "number", _measured("sketch_variance_observed"), detail=3),
    Column(
        "quantization_variance_observed",
        "Variance, rounding",
        "number",
        _measured("quantization_variance_observed"),
        detail=3,
    ),
    Column("sgd_variance", "Variance, SGD", "number", _measured("sgd_variance"), detail=3),
    Column("estimate_error", "Estimate off by", "change", _estimate_error("peak_bytes"), detail=2),
    PARETO,
    DIRTY,
    STATUS,
)

ESTIMATES: tuple[Column[Entry], ...] = (
    Column("peak_bytes", "Peak, measured", "bytes", _measured("peak_bytes")),
    Column("estimated_peak_bytes", "Peak, estimated", "bytes", _estimated("peak_bytes")),
    Column("peak_estimate_error", "Peak off by", "change", _estimate_error("peak_bytes")),
    Column("activation_bytes", "Activations, measured", "bytes", _measured("activation_bytes"), detail=1),
    Column("estimated_activation_bytes", "Activations, estimated", "bytes", _estimated("activation_bytes"), detail=1),
    Column("activation_estimate_error", "Activations off by", "change", _estimate_error("activation_bytes"), detail=1),
)
