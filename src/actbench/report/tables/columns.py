"""The columns of the comparison of schemes, and the selection of columns by name.

Values are in base units; None means that there is nothing to show.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from actbench.errors import UsageError
from actbench.model.contents import shown_content
from actbench.model.measured import FIRST_DIAGNOSTICS
from actbench.report.advice import over_limit_bytes
from actbench.report.tables import computed
from actbench.report.tables.entries import Entry
from actbench.report.tables.values import Column, SpreadValue, Unit, Value, change, quotient, with_spread

_OF_SCRIPTS = ("task", "attention", "weights")
"""Settings that a script has in its own lines, which no record knows."""


def _setting(entry: Entry, name: str) -> Value:
    value: Value = getattr(entry.record.case, name)
    return None if entry.record.case.script is not None and name in _OF_SCRIPTS else value


def setting(name: str, title: str, unit: Unit = "text", detail: int = 0) -> Column[Entry]:
    """Return the column of a field of the case."""
    return Column(name, title, unit, lambda entry: _setting(entry, name), detail=detail)


def _measured(name: str) -> Callable[[Entry], Value]:
    return lambda entry: getattr(entry.measured, name, None)


def diagnostic(name: str, title: str) -> Column[Entry]:
    """Return the column of a number that some schemes report beyond the common fields."""
    return Column(
        name, title, "number", lambda entry: entry.measured.diagnostic(name) if entry.measured else None, detail=3
    )


def _of(part: str, name: str) -> Callable[[Entry], Value]:
    """Return a function that reads a field of a part of the measurement; None without that part."""
    return lambda entry: getattr(getattr(entry.measured, part, None), name, None)


def _at_peak(part: str, title: str) -> Column[Entry]:
    return Column(f"peak_{part}", f"{title} at peak", "bytes", _of("peak_parts", part), "lower", detail=2, quiet=True)


def _peak_of(phase: str) -> Column[Entry]:
    key, compute = f"{phase}_peak_bytes", _of("phase_peaks", f"{phase}_bytes")
    return Column(key, f"Peak, {phase}", "bytes", compute, "lower", quiet=True)


def _with_estimate(
    columns: tuple[Column[Entry], Column[Entry]], compute: Callable[[Entry], Value]
) -> tuple[Column[Entry], ...]:
    """Return the columns of a measured value and its spread, and a column of the estimate."""
    key, title, unit = columns[0].key, columns[0].title, columns[0].unit
    return (*columns, Column(f"estimated_{key}", title, unit, compute, estimate_of=key))


def _peak_if(name: str, mark: str) -> Column[Entry]:
    def peak(entry: Entry) -> Value:
        return entry.measured.peak_bytes if entry.measured and getattr(entry.measured, name) else None

    return Column(f"{name}_peak_bytes", "Peak", "bytes", peak, estimate_of="peak_bytes", mark=mark)


def _estimated(name: str) -> Callable[[Entry], Value]:
    return lambda entry: getattr(entry.estimate, name, None)


def _published(quantity: str) -> Callable[[Entry], Value]:
    return lambda entry: next((item.value for item in entry.record.published if item.quantity == quantity), None)


def _against_exact(name: str, compute: Callable[[Any, Any], float | None]) -> Callable[[Entry], Value]:
    """Return a function that computes a value from one field of the exact model's and the scheme's measurement."""
    return lambda entry: compute(getattr(entry.exact, name, None), getattr(entry.measured, name, None))


def _spread(name: str) -> Callable[[Entry], SpreadValue | None]:
    return lambda entry: getattr(entry, name)


def _estimate_error(name: str) -> Callable[[Entry], Value]:
    return lambda entry: change(getattr(entry.measured, name, None), getattr(entry.estimate, name, None))


def _of_training(compute: Callable[[Entry], Value]) -> Callable[[Entry], Value]:
    """Return a function that computes a value of a training step, and None of a generation."""
    return lambda entry: None if entry.record.case.generate else compute(entry)


MODEL = setting("model", "Model")
BATCH: Column[Entry] = Column("batch_size", "Batch", "count", lambda entry: entry.rows)
SCHEME = replace(setting("scheme", "Scheme"), compute=_of_training(lambda entry: entry.record.case.scheme))
METER = setting("meter", "Meter", detail=1)
LABEL: Column[Entry] = Column("label", "Label", "text", lambda entry: entry.record.label, detail=2)
MACHINE: Column[Entry] = Column("machine", "Machine", "text", lambda entry: entry.record.machine.name)
PARETO: Column[Entry] = Column("pareto", "Pareto", "flag", lambda entry: entry.pareto or None, detail=3)
DIRTY: Column[Entry] = Column(
    "dirty", "Uncommitted", "flag", lambda entry: entry.record.versions.dirty or None, detail=3
)
STATUS: Column[Entry] = Column("status", "Status", "text", lambda entry: getattr(entry.record.outcome, "reason", None))
CONTENT: Column[Entry] = Column("content", "File version", "text", lambda entry: shown_content(entry.record))

# Each is a column if rows differ in it, else a note below the table.
SETTINGS: tuple[Column[Entry], ...] = (
    Column("task", "Task", "text", lambda entry: getattr(entry.built, "task", None) or _setting(entry, "task")),
    Column("model_class", "Class", "text", lambda entry: getattr(entry.built, "model_class", None)),
    Column("sequence_length", "Sequence length", "count", computed.sequence_length),
    Column("target_length", "Target length", "count", lambda entry: getattr(entry.built, "target_length", None)),
    setting("packed", "Packed"),
    Column("image_size", "Image size", "count", computed.image_size),
    Column("audio_shape", "Audio", "text", computed.audio_shape),
    setting("generate", "Generated", "count"),
    Column("cache", "Cache", "text", lambda entry: entry.record.case.cache if entry.record.case.generate else None),
    setting("attention", "Attention"),
    Column("dtype", "Type", "text", lambda entry: entry.own("dtype")),
    Column("autocast", "Autocast", "text", computed.autocast),
    Column("optimizer", "Optimizer", "text", _of_training(lambda entry: entry.own("optimizer"))),
    setting("weights", "Weights"),
    setting("device_profile", "Device profile"),
    setting("torch_era", "Torch, simulated"),
    Column("workspaces", "Workspaces", "text", lambda entry: None if entry.record.case.workspaces else "left out"),
    CONTENT,
    setting("memory_limit_bytes", "Memory limit", "bytes"),
    Column("seed", "Seed", "count", lambda entry: None if entry.record.case.script else entry.seeded.seeds),
)

PROCESSES: Column[Entry] = Column("processes", "Processes", "count", _of("mesh", "size"), detail=1)

OPTIMIZER_STATE: Column[Entry] = Column(
    "optimizer_bytes", "Optimizer state", "bytes", _measured("optimizer_bytes"), "lower", detail=1, short="optimizer"
)

VS_PREVIOUS: tuple[Column[Entry], ...] = (
    Column("peak_vs_previous", "Peak, vs previous", "change", computed.peak_vs_previous, "lower"),
    Column("step_vs_previous", "Step, vs previous", "change", computed.step_vs_previous, "lower"),
    Column(
        "gradient_error_vs_previous",
        "Gradient error, vs previous",
        "difference",
        computed.error_vs_previous,
        "lower",
        detail=2,
    ),
)

RESULTS: tuple[Column[Entry], ...] = (
    Column("largest_batch", "Largest batch", "count", _measured("largest_batch"), "higher"),
    Column("largest_batch_limit_bytes", "Largest batch within", "bytes", computed.largest_batch_limit, detail=1),
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
    Column("longest_prompt", "Longest prompt", "count", _of("generated", "longest_prompt"), "higher"),
    PROCESSES,
    Column("peak_bytes", "Peak", "bytes", lambda entry: entry.record.outcome.peak_bytes, "lower"),
    _peak_if("at_most", "at most {}"),
    _peak_if("approximate", "~{}"),
    Column("over_limit_bytes", "Over limit", "bytes", lambda entry: over_limit_bytes(entry.record), "lower"),
    Column("peak_saving", "Saved", "share", _of_training(computed.peak_saving), "higher"),
    *VS_PREVIOUS,
    Column("peak_phase", "Peak in", "text", _measured("peak_phase"), detail=2),
    Column("published_peak_saving", "Saved, published", "share", _published("peak_saving")),
    Column("published_peak_bytes", "Peak, published", "bytes", _published("peak_bytes")),
    Column("activation_bytes", "Activations", "bytes", _of_training(_measured("activation_bytes")), "lower", detail=1),
    Column(
        "activation_ratio",
        "Smaller by",
        "reduction",
        _of_training(_against_exact("activation_bytes", quotient)),
        "higher",
        detail=1,
    ),
    Column(
        "published_activation_ratio", "Smaller by, published", "reduction", _published("activation_ratio"), detail=1
    ),
    Column("weights_bytes", "Weights", "bytes", _measured("weights_bytes"), "lower", detail=1, quiet=True),
    Column("gradients_bytes", "Gradients", "bytes", _measured("gradients_bytes"), "lower", detail=1, quiet=True),
    OPTIMIZER_STATE,
    Column("cache_bytes", "Cache", "bytes", _of("generated", "cache_bytes"), "lower", detail=1, quiet=True),
    Column("prefill_peak_bytes", "Peak, prefill", "bytes", _of("generated", "prefill_bytes"), "lower", detail=1),
    Column(
        "generation_peak_bytes", "Peak, generation", "bytes", _of("generated", "generation_bytes"), "lower", detail=1
    ),
    Column(
        "estimated_prefill_seconds",
        "Prefill, est.",
        "seconds",
        _of("generated", "prefill_seconds"),
        "lower",
        short="prefill-time",
    ),
    Column(
        "estimated_token_seconds",
        "Token, est.",
        "seconds",
        _of("generated", "token_seconds"),
        "lower",
        short="token-time",
    ),
    *map(_peak_of, ("forward", "backward", "optimizer")),
    _at_peak("weights_bytes", "Weights"),
    _at_peak("gradients_bytes", "Gradients"),
    _at_peak("optimizer_bytes", "Optimizer state"),
    _at_peak("activation_bytes", "Activations"),
    _at_peak("cache_bytes", "Cache"),
    replace(_at_peak("engine_bytes", "Inference engine"), short="engine"),
    _at_peak("batch_bytes", "Batch"),
    replace(_at_peak("kept_bytes", "Kept from earlier steps"), short="kept"),
    replace(_at_peak("communication_bytes", "Gathered and reduced"), short="communication"),
    replace(_at_peak("temporary_bytes", "Temporaries"), short="temporaries"),
    Column("reserved_bytes", "Reserved", "bytes", _measured("reserved_bytes"), "lower", detail=2),
    Column("host_bytes", "In host memory", "bytes", _measured("host_bytes"), "lower", quiet=True, short="host"),
    Column("process_bytes", "Process", "bytes", _measured("process_bytes"), "lower", detail=2),
    *_with_estimate(
        with_spread("samples_per_second", "Samples/s", "rate", _spread("throughput"), "higher", detail=2),
        lambda entry: quotient(entry.samples, entry.estimated_step),
    ),
    *_with_estimate(
        with_spread("relative_throughput", "Speed", "ratio", _spread("relative_throughput"), "higher"),
        lambda entry: entry.estimated_speed,
    ),
    *_with_estimate(
        with_spread("step_seconds", "Step", "seconds", _spread("step"), "lower", detail=3),
        lambda entry: entry.estimated_step,
    ),
    Column("sent_bytes", "Comm.", "bytes", computed.sent_bytes, "lower", short="comm"),
    Column(
        "estimated_communication_seconds",
        "Comm. time, est.",
        "seconds",
        _of("estimated", "communication_seconds"),
        detail=1,
        short="comm-time",
    ),
    Column(
        "estimated_exposed_seconds",
        "Comm. exposed, est.",
        "seconds",
        _of("estimated", "exposed_seconds"),
        "lower",
        short="comm-exposed",
    ),
    Column(
        "estimated_largest_batch_rate",
        "Samples/s at largest batch, est.",
        "rate",
        computed.largest_batch_rate,
        "higher",
        detail=1,
        short="samples-per-second-at-largest",
    ),
    Column("gradient_error", "Gradient error", "number", _measured("gradient_error"), "lower", detail=2),
    Column("gradient_cosine", "Gradient cosine", "number", _measured("gradient_cosine"), "higher", detail=3),
    *(diagnostic(name, title) for name, title in FIRST_DIAGNOSTICS.items()),
    Column("estimate_error", "Estimate off by", "change", _estimate_error("peak_bytes"), detail=2),
    PARETO,
    Column("estimated_pareto", "Pareto", "flag", lambda entry: entry.estimated_pareto or None, estimate_of="pareto"),
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
    Column("step_seconds", "Step, measured", "seconds", computed.compared_step, detail=1),
    Column("estimated_step_seconds", "Step, estimated", "seconds", computed.estimate_of_step, detail=1),
    Column("step_estimate_error", "Step off by", "change", computed.step_estimate_error, detail=1),
)


IDENTITY: tuple[Column[Entry], ...] = (MACHINE, MODEL, BATCH, SCHEME, LABEL, METER)
"""Columns that distinguish rows, in addition to settings in which rows differ."""

CHOICES = {column.name: column for column in (*IDENTITY, *RESULTS) if not column.within}
"""The columns that a user can select, by name."""


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of columns in ``peak,saved,speed``.

    Raises:
        UsageError: There is no such column, or a name is repeated; the message has the closest names.
    """
    names = tuple(name.strip() for name in text.split(","))
    for place, name in enumerate(names):
        if name not in CHOICES:
            close = difflib.get_close_matches(name.lower(), CHOICES, n=3, cutoff=0.7)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(CHOICES)}"
            raise UsageError(f"there is no column {name!r}; {hint}")
        if name in names[:place]:
            raise UsageError(f"column {name!r} is given twice")
    return names


def selected(
    names: Sequence[str],
    identity: Sequence[Column[Entry]],
    results: Sequence[Column[Entry]],
    never_hidden: Collection[str],
) -> tuple[Column[Entry], ...]:
    """Return the columns of a table: those that distinguish rows, then the selected ones, in their order.

    Args:
        names: The selected columns. If any is in :data:`IDENTITY`, the table has no other column of these.
        identity: Columns that distinguish rows, with the settings in which rows differ.
        results: The other columns, if nothing is selected.
        never_hidden: Columns that no terminal is too narrow for. The other selected ones yield to them.
    """
    if not names:
        kept = {CHOICES[name].key for name in never_hidden}
        return (*identity, *(replace(each, quiet=False, detail=0) if each.key in kept else each for each in results))
    asked = {name: replace(CHOICES[name], quiet=False, detail=0, yields=name not in never_hidden) for name in names}
    own, there = {column.name for column in IDENTITY}, {column.name for column in identity}
    if asked.keys() & own:
        shown = (*identity, *(column for column in IDENTITY if column.name not in there))
        identity = [column for column in shown if column.name not in own or column.name in asked]
    wanted = [column for name, column in asked.items() if CHOICES[name] not in IDENTITY]
    with_theirs = [[column, *(each for each in RESULTS if each.within == column.key)] for column in wanted]
    return (*identity, *(column for columns in with_theirs for column in columns))
