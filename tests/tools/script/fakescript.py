"""Stands in for ``actbench.tools.script.bench``: it runs the script as python does, and makes up what a step needs.

A script may set the peak, as ``PEAK_GIB = 30``, the type of its autocast, what each step leaves and what is advised,
and may end by an error.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from actbench.errors import MeasurementError
from actbench.model.estimated import EstimatedTime
from actbench.model.measured import Advised, Growth, Measurement, PeakParts, PhasePeaks
from actbench.model.records import Built, Case, Failure
from actbench.model.timeline import Holder, Span, Timeline

GIB = 1024**3
LIMIT = 24 * GIB
ROWS, ROW_BYTES = 16, GIB // 2
SHARES = {"exact": 1.0, "checkpoint": 0.5}
"""Of the saved tensors, by scheme."""

TRAIN = """
import sys
print("epoch 1", sys.argv[1:])
print("a warning", file=sys.stderr)
"""


def failure_of(error: BaseException) -> Failure:
    reason = "unsupported" if isinstance(error, MeasurementError) else "crash"
    return Failure(reason=reason, message=f"{type(error).__name__}: {error}")


class Session:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.note: Any = None

    def memory(self) -> Measurement:
        script = self.case.script
        assert script is not None
        before = sys.argv
        sys.argv = [script.target, *script.arguments]
        try:
            ran = (runpy.run_module if script.is_module else runpy.run_path)(script.target, run_name="__main__")
        finally:
            sys.argv = before
        self.note("step 2: peak 12.4 GiB")
        if "REFUSED" in ran:
            raise MeasurementError(ran["REFUSED"])
        found = measured(self.case, ran.get("PEAK_GIB", 12), ran.get("AT_MOST", ()))
        growth = Growth(step_bytes=ran["GROWS_BYTES"]) if "GROWS_BYTES" in ran else None
        advised = Advised(**ran["ADVISED"]) if "ADVISED" in ran else None
        return found.model_copy(update={"autocast": ran.get("AUTOCAST"), "growth": growth, "advised": advised})

    def time(self, steps: int) -> None:
        pass


def measured(case: Case, peak_gib: float, at_most: tuple[str, ...]) -> Measurement:
    rows = case.rows or ROWS
    saved = round(rows * ROW_BYTES * SHARES.get(case.scheme, 0.9))
    model = round(peak_gib * GIB) - ROWS * ROW_BYTES
    peak = model + saved
    limit = case.memory_limit_bytes or LIMIT
    holders = (
        holder("block.mlp", "saved", "aten::addmm", max(0, saved - GIB), "train.py:3 logits = model(x)"),
        holder("head", "saved", "aten::_log_softmax", GIB, "train.py:4 loss = cross_entropy(logits, y)"),
        holder("block.mlp", "weights", "parameter", model, None),
    )
    return Measurement(
        weights_bytes=model // 4,
        gradients_bytes=model // 4,
        optimizer_bytes=model // 2,
        activation_bytes=saved,
        peak_bytes=peak,
        at_most=at_most,
        peak_phase="backward",
        peak_parts=PeakParts(weights_bytes=model - model // 2, optimizer_bytes=model // 2, activation_bytes=saved),
        phase_peaks=PhasePeaks(forward_bytes=peak - GIB, backward_bytes=peak, optimizer_bytes=model),
        memory_limit_bytes=limit,
        over_limit_bytes=peak - limit if peak > limit else None,
        reserved_bytes=peak + GIB // 2 if case.meter == "simulated" else None,
        estimated=EstimatedTime(
            step_seconds=0.6,
            forward_seconds=0.2,
            backward_seconds=0.3,
            optimizer_seconds=0.1,
            host_seconds=0.1,
            device_seconds=0.5,
            flops=1,
            moved_bytes=1,
        ),
        simulated="cuda",
        largest_batch=(limit - model) // ROW_BYTES if case.find_largest_batch and case.meter == "simulated" else None,
        dtype="float32",
        optimizer="AdamW",
        built=Built(model_class="Net", batch_size=rows, micro_batches=2, stopped_after=3),
        timeline=Timeline(
            peak_bytes=peak,
            peak_event=1,
            events=2,
            moments=(0, 1, 2),
            held_bytes={"saved": (0, saved, 0), "weights": (model, model, model)},
            spans=(Span(phase="forward", start=0), Span(phase="backward", start=0)),
            holders=holders,
        ),
    )


def holder(module: str, kind: Any, operator: str, held_bytes: int, line: str | None) -> Holder:
    return Holder(module=module, kind=kind, operator=operator, tensors=1, held_bytes=held_bytes, line=line)
