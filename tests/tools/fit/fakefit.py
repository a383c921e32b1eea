"""Stands in for ``actbench.measuring.bench`` in the tests of fit: a step of 10 GiB and a second, made up."""

from __future__ import annotations

import os
import time
from pathlib import Path

from actbench.model.estimated import EstimatedTime
from actbench.model.measured import Measurement, PeakParts, PhasePeaks
from actbench.model.records import Case

GIB = 1024**3
WEIGHTS = GIB
SECONDS, UPDATE_SECONDS = 1.0, 0.05
FACTORS = {
    "checkpoint": (0.5, 1.3),
    "gact": (0.4, 1.4),
    "chunked_loss": (0.9, 1.02),
    "adam8bit": (0.95, 1.05),
    "lora": (0.4, 1.0),
}
"""Of activations and time, by scheme."""

ACTIVATIONS = 9 * GIB
OVER_ESTIMATE = 1.25
"""How many times the measured peak and step the simulated ones are."""


class Session:
    def __init__(self, case: Case) -> None:
        self.case = case

    def memory(self) -> Measurement:
        time.sleep(float(os.environ.get("FAKEFIT_SLEEP", "0")))
        if log := os.environ.get("FAKEFIT_LOG"):
            with Path(log).open("a") as file:
                file.write(f"{self.case.meter} {self.case.scheme} {self.case.optimizer}\n")
        activations, seconds = float(ACTIVATIONS), SECONDS
        for part in self.case.scheme.split("+"):
            of_bytes, of_seconds = FACTORS.get(part.partition(":")[0].partition(",")[0], (1.0, 1.0))
            activations, seconds = activations * of_bytes, seconds * of_seconds
        peak = WEIGHTS + round(activations)
        limit = self.case.memory_limit_bytes
        if self.case.meter != "simulated":
            return Measurement(weights_bytes=WEIGHTS, activation_bytes=0, peak_bytes=round(peak / OVER_ESTIMATE))
        return Measurement(
            weights_bytes=WEIGHTS,
            gradients_bytes=1,
            optimizer_bytes=2,
            dtype=self.case.dtype or ("bfloat16" if self.case.model.endswith(":half") else "float32"),
            optimizer="SGD" if self.case.model.endswith(":descent") else "AdamW",
            activation_bytes=round(activations),
            peak_bytes=peak,
            peak_parts=PeakParts(weights_bytes=WEIGHTS, activation_bytes=round(activations)),
            phase_peaks=PhasePeaks(forward_bytes=peak, backward_bytes=peak, optimizer_bytes=WEIGHTS),
            memory_limit_bytes=limit,
            over_limit_bytes=peak - limit if limit and peak > limit else None,
            estimated=EstimatedTime(
                step_seconds=seconds,
                forward_seconds=(seconds - UPDATE_SECONDS) / 3,
                backward_seconds=2 * (seconds - UPDATE_SECONDS) / 3,
                optimizer_seconds=UPDATE_SECONDS,
                host_seconds=0,
                device_seconds=seconds,
                flops=0,
                moved_bytes=0,
            ),
        )

    def time(self, steps: int) -> tuple[float, ...] | None:
        return (SECONDS / OVER_ESTIMATE,) * steps
