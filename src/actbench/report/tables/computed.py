"""Values of rows that are computed from the fields of records."""

from __future__ import annotations

import math
from typing import NamedTuple

from actbench.model.imagesizes import edges
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.report.tables.entries import Entry
from actbench.report.tables.values import Value, change, quotient, step_time


class StepTime(NamedTuple):
    """Seconds of a training step, estimated if no step ran."""

    seconds: float
    is_estimated: bool


def step_time_of(record: MeasuredRecord) -> StepTime | None:
    """Return the step time of a record, its median or an estimate, or None; all parts of a page use this function."""
    outcome = record.outcome
    if not isinstance(outcome, Measurement):
        return None
    if outcome.estimated is not None:
        return StepTime(outcome.estimated.step_seconds, is_estimated=True)
    step = step_time(outcome.step_seconds)
    return StepTime(step.value, is_estimated=False) if step is not None and math.isfinite(step.value) else None


def sequence_length(entry: Entry) -> Value:
    """Return the tokens of a sample."""
    return entry.built.sequence_length if entry.built else entry.record.case.sequence_length


def image_size(entry: Entry) -> Value:
    """Return the pixels of one side for square images, ``height x width`` for others."""
    if entry.built is None:
        asked = entry.record.case.image_size
        return asked if asked is None or isinstance(asked, int) else _product(edges(asked))
    size = entry.built.image_size
    if size is None:
        return None
    return size[0] if size[0] == size[1] else _product(size)


def audio_shape(entry: Entry) -> Value:
    """Return the shape of a sample's audio."""
    shape = entry.built.audio_shape if entry.built else None
    return _product(shape) if shape else None


def _product(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def peak_saving(entry: Entry) -> Value:
    """Return the share of the exact model's peak that is saved."""
    left = quotient(entry.record.outcome.peak_bytes, entry.exact_peak_bytes)
    return None if left is None else 1 - left


def peak_vs_previous(entry: Entry) -> Value:
    """Return the change of the peak from the stack of schemes that this one extends."""
    before = entry.previous.outcome.peak_bytes if entry.previous else None
    return change(before, entry.record.outcome.peak_bytes)


def step_vs_previous(entry: Entry) -> float | None:
    """Return the change of the step time, if both steps were timed in turns or both estimated."""
    before, now = entry.previous.outcome if entry.previous else None, entry.measured
    if not isinstance(before, Measurement) or now is None or before.timing_round != now.timing_round:
        return None
    if before.estimated and now.estimated:
        return change(before.estimated.step_seconds, now.estimated.step_seconds)
    earlier, step = step_time(before.step_seconds), entry.step
    return change(earlier.value if earlier else None, step.value if step else None)


def step_change(entry: Entry) -> float | None:
    """Return the change of the step time from the stack that this one extends, or else from the exact model."""
    if entry.previous is not None and entry.previous.case.scheme != "exact":
        return step_vs_previous(entry)
    measured = entry.relative_throughput
    return change(entry.estimated_speed if measured is None else measured.value, 1.0)


def largest_batch_limit(entry: Entry) -> Value:
    """Return the memory in which the largest batch was searched."""
    found = entry.measured.largest_batch_search if entry.measured else None
    return found.memory_limit_bytes if found else None


def largest_batch_rate(entry: Entry) -> Value:
    """Return samples a second of all processes, by estimate, at the largest batch that fits."""
    found = entry.measured.largest_batch_search if entry.measured else None
    if entry.measured is None or found is None:
        return None
    return quotient(found.batch_size * entry.measured.batches, found.estimated_step_seconds)


def estimate_of_step(entry: Entry) -> Value:
    """Return the estimated seconds of a step that was also measured on the same device."""
    time = entry.estimate.estimated if entry.estimate and entry.step else None
    return time.step_seconds if time else None


def compared_step(entry: Entry) -> Value:
    """Return the measured seconds of a step that also has an estimate."""
    return entry.step.value if entry.step and estimate_of_step(entry) is not None else None


def step_estimate_error(entry: Entry) -> Value:
    """Return the relative error of the estimate of a step."""
    found = entry.estimate.estimated if entry.estimate else None
    return change(entry.step.value, found.step_seconds) if entry.step and found else None


def error_vs_previous(entry: Entry) -> Value:
    """Return the difference of the gradient errors; the exact model's error is 0."""
    if entry.previous is None or entry.measured is None or entry.measured.gradient_error is None:
        return None
    is_exact = entry.previous.case.scheme == "exact"
    earlier = 0.0 if is_exact else getattr(entry.previous.outcome, "gradient_error", None)
    return None if earlier is None else entry.measured.gradient_error - earlier


def sent_bytes(entry: Entry) -> Value:
    """Return the bytes that one process of several sends in a simulated step."""
    found = entry.measured.communication if entry.measured else None
    return sum(each.sent_bytes for each in found) if found else None


def autocast(entry: Entry) -> str | None:
    """Return the type in which autocast of a case computes, or of a script itself; None without autocast."""
    return entry.record.case.autocast or getattr(entry.same_model, "autocast", None)
